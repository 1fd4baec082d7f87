"""Which calls are compared, and what the comparison costs."""

from __future__ import annotations

import numpy as np
import pytest

import collectives as cc
import inprocess
from collectives import fingerprint
from collectives.settings import Settings


def test_differences_lists_fields_values_and_ranks():
    calls = [{"op": "SUM", "shape": (2,)}] * 3 + [{"op": "MAX", "shape": (2,), "root": 1}]
    text = fingerprint.differences(calls)
    assert text == (
        "op is SUM on ranks 0 1 2, MAX on rank 3; root is absent on ranks 0 1 2, 1 on rank 3"
    )


def sent_messages(check, calls):
    """Count the messages of rank 0 in some all-reduces at a level of checking."""

    def count(comm):
        sent = []
        start = comm._transport.start_send
        comm._transport.start_send = lambda *a: (sent.append(a), start(*a))[1]
        for _ in range(calls):
            comm.allreduce(np.ones(3), op=cc.SUM, algorithm="tree")
        return len(sent)

    settings = Settings(check=check, timeout=20, shared_memory=None)
    return inprocess.run_ranks(2, count, settings=settings)[0]


def test_off_adds_no_message_and_always_adds_one_exchange():
    assert sent_messages("off", 5) == 5  # rank 0 of 2 sends the result down the tree
    assert sent_messages("always", 5) == 10


def test_sample_compares_the_first_calls_and_then_a_few():
    assert sent_messages("sample", 64) == 128
    assert sent_messages("sample", 192) == 192 + 64 + 2


def test_with_checks_off_a_refused_call_is_still_an_error_on_its_rank():
    def check(comm):
        with pytest.raises(TypeError):
            comm.allreduce("text")
        return comm.allreduce(1, op=cc.SUM)

    assert inprocess.run_ranks(2, check, settings=Settings(check="off", timeout=20)) == [2, 2]
