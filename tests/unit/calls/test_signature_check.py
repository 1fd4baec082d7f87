"""Which calls are compared, and what the comparison costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import collectives as cc
import inprocess
from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.calls import signature, signature_check
from collectives.calls.shared_settings import negotiate
from collectives.communicator import group_of
from collectives.core import links, settings, tuning_file
from collectives.core.links import DEFAULT, LinkCost
from collectives.core.settings import Settings
from collectives.transport.transport import Deadline

LIMIT = 20.0
KIB = 1 << 10


def test_differences_lists_fields_values_and_ranks():
    calls = [{"op": "SUM", "shape": (2,)}] * 3 + [{"op": "MAX", "shape": (2,), "root": 1}]
    text = signature.differences(calls)
    assert text == (
        "op is SUM on ranks 0 1 2, MAX on rank 3; root is absent on ranks 0 1 2, 1 on rank 3"
    )


@pytest.mark.parametrize(
    ("value", "equal"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ((2, 3), (2, np.int64(3))),
        (((1,), 0.5), ((True,), np.float32(0.5))),
        (float("inf"), np.float64("inf")),
    ],
)
def test_equal_values_have_one_hash_whatever_was_hashed_before(value, equal):
    first = signature.hash_of({"operation": "gather", "root": value})
    # As many other calls as the cache holds.
    for root in range(2000):
        signature.hash_of({"operation": "other", "root": root})
    assert signature.hash_of({"operation": "gather", "root": equal}) == first


def mismatch(calls):
    """The text of the error of ranks that describe their calls so, the same on all."""
    return mismatch_and_fields(calls)[0]


def mismatch_and_fields(calls):
    errors = [None] * len(calls)

    def disagree(comm):
        with pytest.raises(cc.MismatchError) as caught:
            signature.raise_mismatch(
                group_of(comm).transport, calls[comm.rank], Deadline("compare", LIMIT)
            )
        errors[comm.rank] = str(caught.value), caught.value.fields

    inprocess.run_ranks(len(calls), disagree, settings=Settings(shared_memory=None))
    (error,) = set(errors)
    return error


def test_a_refusal_of_several_lines_is_one_field():
    why = "TypeError: expected\n\ta number\n\n\tor\ta list\nof numbers"
    calls = [{"operation": "gather", "refused": why}, {"operation": "gather"}]
    text, fields = mismatch_and_fields(calls)
    assert f"refused on rank 0, so no rank continues: rank 0: {why}; gather at" in text
    assert fields == {"refused"}


def test_a_mismatch_of_many_ranks_is_short():
    calls = [
        {"operation": "allreduce", "shape": f"({rank},)", "site": f"train.py:{rank % 2}"}
        for rank in range(64)
    ]
    text = mismatch(calls)
    assert text.count("on rank ") == 8
    assert "(7,) on rank 7, and 56 more; " in text
    assert text.endswith(
        "; allreduce at train.py:0 on ranks 0 2 4 6 8 10 12 14 ..., "
        "allreduce at train.py:1 on ranks 1 3 5 7 9 11 13 15 ..."
    )


def test_a_mismatch_names_what_of_the_strategies_was_called():
    calls = [
        {"operation": "broadcast_object", "site": "a.py:1", "entry": "CheckpointManager.save"},
        {"operation": "barrier", "site": "a.py:2", "entry": ""},
    ]
    assert mismatch(calls) == (
        "CheckpointManager.save / barrier: calls differ between ranks: "
        "CheckpointManager.save (broadcast_object) at a.py:1 on rank 0, barrier at a.py:2 on rank 1"
    )


@pytest.mark.parametrize(("machines", "ranks"), [(2, 1), (4, 1), (8, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("megabits", [100, 1000, 100_000])
@pytest.mark.parametrize("alpha", [1e-5, 1e-4, 1e-3])
def test_what_travels_with_a_comparison_is_not_faster_after_it(machines, ranks, megabits, alpha):
    network = LinkCost(alpha, 8e-6 / megabits, 3.3e-11, eager=alpha)
    layout = RankLayout(machines * ranks, machines, DEFAULT._replace(network=network))
    most = signature_check.max_piggyback_bytes(layout)
    assert signature_check.MAX_PAYLOAD_BYTES <= most <= 64 * KIB
    assert signature_check.max_piggyback_bytes(replace(layout)) == most

    def together_over_after(nbytes):
        times = selection.estimate("allreduce", nbytes, layout)
        return signature_check.seconds(nbytes, layout) / (
            signature_check.seconds(0, layout) + min(times.values())
        )

    if most > signature_check.MAX_PAYLOAD_BYTES:
        assert together_over_after(most) <= 1
    if most < 64 * KIB // max(1, ranks - 1):
        assert together_over_after(most + KIB) > 1


def test_slow_lines_carry_less_with_a_comparison():
    def most(megabits, machines):
        network = LinkCost(1e-4, 8e-6 / megabits, 3.3e-11, eager=3e-5)
        return signature_check.max_piggyback_bytes(
            RankLayout(machines, machines, DEFAULT._replace(network=network))
        )

    assert most(100, 2) == 64 * KIB  # two ranks send no more bytes than a ring does
    assert most(100, 8) < most(100, 4) < 16 * KIB
    assert most(1000, 4) == 64 * KIB


def test_what_python_takes_for_a_call_lets_more_travel_with_its_comparison():
    def most(call):
        network = LinkCost(1e-4, 8e-8, 3.3e-11, eager=3e-5, call=call)
        return signature_check.max_piggyback_bytes(
            RankLayout(8, 8, DEFAULT._replace(network=network))
        )

    assert most(0.0) < most(3e-4) < most(3e-3)


def sent_messages(check, calls, call, size=2):
    """Count the messages of rank 0 in some calls at a level of checking."""

    def count(comm):
        comm.barrier()
        sent = []
        start = group_of(comm).transport.start_send
        group_of(comm).transport.start_send = lambda *a: (sent.append(a), start(*a))[1]
        for _ in range(calls):
            call(comm)
        return len(sent)

    settings = Settings(check=check, timeout=20, shared_memory=None)
    return inprocess.run_ranks(size, count, settings=settings)[0]


def by_tree(comm):
    comm.allreduce(np.ones(3), op=cc.SUM, algorithm="tree")


def test_off_adds_no_message_and_always_adds_one_exchange():
    assert sent_messages("off", 5, by_tree) == 5  # rank 0 of 2 sends the result down the tree
    assert sent_messages("always", 5, by_tree) == 10


def test_sample_compares_the_first_calls_and_then_a_few():
    assert sent_messages("sample", 63, by_tree) == 126  # after a barrier
    assert sent_messages("sample", 191, by_tree) == 191 + 63 + 2


LARGEST_CARRIED = np.ones(signature_check.MAX_PAYLOAD_BYTES // 8)
SMALL = {
    "allreduce": lambda comm: comm.allreduce(LARGEST_CARRIED),
    "reduce": lambda comm: comm.reduce(LARGEST_CARRIED),
    "reduce_scatter": lambda comm: comm.reduce_scatter(LARGEST_CARRIED),
    "broadcast": lambda comm: comm.broadcast(LARGEST_CARRIED),
    "broadcast_object": lambda comm: comm.broadcast_object("text"),
    "barrier": lambda comm: comm.barrier(),
}


@pytest.mark.parametrize("operation", SMALL)
def test_small_operations_travel_with_their_comparison(operation):
    assert sent_messages("always", 3, SMALL[operation], size=4) == 3 * 2  # log2 P each
    assert sent_messages("sample", 100, SMALL[operation], size=4) == 100 * 2


def test_larger_operations_follow_their_comparison():
    def larger(comm):
        comm.allreduce(np.append(LARGEST_CARRIED, 1))

    assert sent_messages("always", 3, larger, size=4) == 3 * 4


def test_the_rows_of_an_allgather_travel_with_its_comparison():
    assert sent_messages("always", 3, lambda comm: comm.allgather(1.0)) == 3 * (1 + 1)


@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN, cc.MAX], ids=lambda op: op.value)
def test_a_small_array_is_not_touched_where_ranks_disagree(op):
    def check(comm):
        x = np.full(5 + comm.rank, np.nan) if comm.rank == 2 else np.arange(5.0 + comm.rank)
        before = x.copy()
        with pytest.raises(cc.MismatchError, match="shape"):
            comm.allreduce(x, op=op, out=x)
        np.testing.assert_array_equal(x, before)
        return comm.allreduce(1.0, op=cc.SUM)

    settings = Settings(timeout=20, shared_memory=None)
    assert inprocess.run_ranks(3, check, settings=settings) == [3.0] * 3


def test_many_ranks_bring_their_rows_after_the_comparison(monkeypatch):
    monkeypatch.setattr(signature_check, "MAX_PAYLOAD_BYTES", 16)  # two ranks' rows

    def check(comm):
        with pytest.raises(cc.MismatchError, match="dtype"):
            comm.allgather(np.zeros(2, np.float32 if comm.rank else np.float64))
        return comm.allgather(np.full(comm.rank, comm.rank)).tolist()

    settings = Settings(timeout=20, shared_memory=None)
    assert inprocess.run_ranks(3, check, settings=settings) == [[1, 2, 2]] * 3


@pytest.mark.parametrize("levels", [["off", "sample", "off"], ["always", "off", "sample"]])
def test_all_ranks_compare_as_much_as_the_strictest(caplog, levels):
    def ask(comm):
        own = Settings(timeout=10, check=levels[comm.rank])
        return negotiate(own, group_of(comm).transport).check

    strictest = max(levels, key=["off", "sample", "always"].index)
    assert inprocess.run_ranks(3, ask) == [strictest] * 3
    assert caplog.text.count("on another rank") == 2


@pytest.mark.parametrize(
    ("field", "values", "leaders", "expected"),
    [
        (
            "shared_memory",
            ["/dev/shm", None, "/dev/shm"],
            [0, 0, 0],
            "of a node, got UNISONO_SHARED_MEMORY is /dev/shm on ranks 0 2, off on rank 1",
        ),
        ("shared_memory", ["/dev/shm", "/dev/shm", None], [0, 0, 2], None),
        (
            "shared_memory",
            [None, "/dev/shm", "/dev/shm"],
            [0, 1, 0],
            "UNISONO_SHARED_MEMORY is off on",
        ),
        (
            "nccl",
            ["on", "off", "off"],
            [0, 1, 2],
            "all ranks, got UNISONO_NCCL is on on rank 0, off",
        ),
        ("shared_memory", [f"/{300 * 'x'}{end}" for end in "aab"], [0, 0, 0], "xxx... (CRC-32 "),
        ("stores", ["plain", "auto", "streaming"], [0, 0, 0], None),
        ("timeout", [10.0, 11.0, 12.0], [0, 0, 0], None),
    ],
)
def test_settings_that_must_be_equal_are_compared(field, values, leaders, expected):
    def ask(comm):
        own = replace(Settings(timeout=10), **{field: values[comm.rank]})
        try:
            return getattr(negotiate(own, group_of(comm).transport, leaders), field)
        except cc.LaunchError as error:
            return str(error)

    found = inprocess.run_ranks(3, ask)
    if expected is None:
        assert found == values
        return
    for rank, text in enumerate(found):
        assert text.startswith("init: settings differ, expected the same on all ranks")
        assert expected in text
        assert text.endswith(f"(rank {rank} of 3)")


@pytest.mark.parametrize("character", ["\U0001f600", "\udcff", "\x01"])
def test_long_values_of_any_characters_are_compared(monkeypatch, character):
    monkeypatch.setenv("UNISONO_CLUSTER", 300 * character)

    def ask(comm):
        own = Settings(timeout=10, shared_memory=f"/{300 * character}{comm.rank}")
        with pytest.raises(cc.LaunchError, match="got UNISONO_SHARED_MEMORY is /"):
            negotiate(own, group_of(comm).transport)

    inprocess.run_ranks(2, ask)


@pytest.mark.parametrize("field", ["tuned", "timeline"])
@pytest.mark.parametrize("character", ["x", "\U0001f600", "\udcff"])
def test_paths_that_do_not_fit_are_an_error_on_every_rank(field, character, monkeypatch):
    def found(configuration, environ):
        return links.defaults()._replace(sources=(configuration.tuned,))

    def ask(comm):
        own = replace(Settings(timeout=10), **{field: 4060 * character if comm.rank == 0 else None})
        with pytest.raises(ValueError, match="^init: .* too long, expected at most 4078 bytes"):
            negotiate(own, group_of(comm).transport)

    monkeypatch.setattr(tuning_file, "load_links", found)
    inprocess.run_ranks(2, ask)


def test_every_variable_that_must_be_equal_has_a_value():
    values = settings.equal_values(Settings(shared_memory=None), {"UNISONO_CLUSTER": "ps:1"})
    assert set(values) == set(settings.EQUAL)
    assert values["UNISONO_SHARED_MEMORY"] == "off"
    assert values["UNISONO_CLUSTER"] == "ps:1"


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        ("sample", lambda c: c.allreduce(np.ones(3)), lambda c: c.allreduce("text")),
        ("sample", lambda c: c.gather(np.ones(3)), lambda c: c.gather("text")),
        ("off", lambda c: c.gather(np.ones(3)), lambda c: c.gather("text")),
        ("off", lambda c: c.allgather_object(1), lambda c: c.allgather_object(lambda: 1)),
        ("off", lambda c: c.grouped_allgather([1.0]), lambda c: c.grouped_allgather(["text"])),
        ("off", lambda c: c.plan_allgather(np.ones(3)), lambda c: c.plan_allgather("text")),
    ],
)
def test_a_refusal_reaches_ranks_that_compare_though_their_call_is_not_sampled(check, good, bad):
    def run(comm):
        for _ in range(70):
            comm.allreduce(np.ones(3), algorithm="tree")
        kind = Exception if comm.rank == 0 else cc.MismatchError
        with pytest.raises(kind, match=r"cannot be sent|lambda|refused on rank 0"):
            (bad if comm.rank == 0 else good)(comm)
        return comm.allreduce(1, op=cc.SUM)

    settings = Settings(check=check, timeout=10, shared_memory=None)
    assert inprocess.run_ranks(3, run, settings=settings) == [3] * 3


def test_with_checks_off_a_refused_call_is_still_an_error_on_its_rank():
    def check(comm):
        with pytest.raises(TypeError):
            comm.allreduce("text")
        return comm.allreduce(1, op=cc.SUM)

    assert inprocess.run_ranks(2, check, settings=Settings(check="off", timeout=20)) == [2, 2]
