"""Names of other libraries: the error names ours."""

import pytest

import collectives as cc
import inprocess
from collectives.core import suggestions

OF_COMMUNICATORS = {
    "Get_rank": "rank",
    "Get_size": "size",
    "bcast": "broadcast, or broadcast_object for Python objects",
    "Allreduce": "allreduce",
    "all_reduce": "allreduce",
    "Reduce_scatter": "reduce_scatter",
    "all_gather_object": "allgather_object",
    "Barrier": "barrier",
    "Dup": "split(0)",
}
OF_THE_MODULE = {"AVG": "MEAN", "Average": "MEAN", "Sum": "SUM", "all_reduce": "allreduce"}


def test_a_name_of_another_library_is_answered_with_ours():
    def check(comm):
        for name, ours in OF_COMMUNICATORS.items():
            with pytest.raises(AttributeError) as caught:
                getattr(comm, name)
            words = f"'Communicator' object has no attribute '{name}'; use {ours}"
            assert str(caught.value) == words

    inprocess.run_ranks(1, check)
    for name, ours in OF_THE_MODULE.items():
        with pytest.raises(AttributeError) as caught:
            getattr(cc, name)
        assert str(caught.value) == f"module 'collectives' has no attribute '{name}'; use {ours}"


def test_names_of_no_library_get_no_answer():
    with pytest.raises(AttributeError, match="no attribute 'adasum'$") as caught:
        cc.adasum  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("adasum", cc)
    assert not hasattr(cc, "_all_reduce")


@inprocess.on_ranks(1)
def test_other_names_are_neither_listed_nor_looked_up_by_a_hook(comm):
    assert not hasattr(comm, "bcast")
    assert not suggestions.FOREIGN_NAMES & set(dir(comm))
    # With it, every look-up of an attribute of a communicator takes longer.
    assert not any("__getattr__" in vars(kind) for kind in type(comm).__mro__)
