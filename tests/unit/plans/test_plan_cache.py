"""The look-up of plans takes the long way for unknown calls only, and hides no bug of its own."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import collectives as cc
import inprocess
from collectives.arrays.adapter import ArrayAdapter
from collectives.communicator import group_of
from collectives.node.shared_arrays import SharedArrays
from inprocess import on_ranks, world_settings


class Exported:
    """An array of a library that knows only DLPack."""

    def __init__(self, array):
        self._array = array
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


@pytest.mark.parametrize("error", [AttributeError, KeyError, TypeError, ValueError])
def test_a_bug_in_a_part_of_the_key_surfaces(monkeypatch, error):
    broken: set[int] = set()  # threads, of which each fails once: the long way would fail as well
    location_at = SharedArrays.location_at

    def fail(*arguments):
        if threading.get_ident() in broken:
            broken.remove(threading.get_ident())
            raise error("a bug")
        return location_at(*arguments)

    def check(comm):
        x = comm.shared_empty(3, "float64")
        comm.allreduce(x, out=x)
        broken.add(threading.get_ident())
        with pytest.raises(error, match="a bug"):
            comm.allreduce(x, out=x)
        assert comm.allreduce(x, out=x) is x

    monkeypatch.setattr(SharedArrays, "location_at", fail)
    inprocess.run_ranks(2, check, settings=world_settings(True))


@pytest.mark.parametrize("error", [AttributeError, KeyError, RuntimeError, TypeError])
def test_a_bug_in_the_look_up_of_another_librarys_array_surfaces(monkeypatch, error):
    class Broken:
        def __get__(self, instance, owner):
            raise error("a bug")

    def check(comm):
        x = Exported(np.ones(3))
        comm.allreduce(x)
        with monkeypatch.context() as patched:
            patched.setattr(ArrayAdapter, "pinnable", Broken())
            with pytest.raises(error, match="a bug"):
                comm.allreduce(x)
        assert comm.allreduce(x).tolist() == [1.0] * 3

    inprocess.run_ranks(1, check)


@on_ranks(2, settings=world_settings(False))
def test_arguments_that_cannot_be_looked_for_take_the_long_way_which_refuses_them(comm):
    x = np.ones(3)
    comm.allreduce(x)
    for wrong in ({"op": [cc.SUM]}, {"algorithm": ["ring"]}, {"timeout": "1"}):
        with pytest.raises((TypeError, ValueError)):
            comm.allreduce(x, **wrong)
    assert comm.allreduce(x).tolist() == [1.0] * 3
    assert len(group_of(comm).plans) == 1
