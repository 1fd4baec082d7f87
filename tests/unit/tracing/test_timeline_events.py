"""What the timeline shows of operations, with ranks as threads; their files are one file here."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
from calls import until

import collectives as cc
import inprocess
from collectives.calls.group import attach_listeners_to_all
from collectives.communicator import group_of
from collectives.core.errors import MismatchError
from collectives.operations.timeline_control import compare_clocks
from collectives.tracing import timeline
from collectives.tracing.timeline_events import KINDS

TWO_NODES = [0, 0, 2, 2]


class Shown(NamedTuple):
    """The slices of one rank's threads."""

    calls: list[dict]
    parts: list[dict]

    def named(self, name):
        return [call for call in self.calls if call["name"] == name]

    def inside(self, call):
        """The kinds of a call's parts."""
        end = call["ts"] + call["dur"] + 0.002  # times are rounded
        return [
            part["name"] for part in self.parts
            if (part["tid"], part["cat"]) == (call["tid"], "part")
            and call["ts"] <= part["ts"] + 0.002 and part["ts"] + part["dur"] <= end
        ]  # fmt: skip


def slices(events):
    """Yield complete slices; one of more than half a second is written as its begin and its end."""
    begun = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            yield event
        elif event.get("ph") == "B":
            begun[event["tid"]].append(event)
        elif event.get("ph") == "E":
            first = begun[event["tid"]].pop()
            yield {**first, "dur": event["ts"] - first["ts"], "args": event["args"]}


@pytest.fixture
def shown(tmp_path):
    """A function that runs ranks under a timeline, and returns what it shows of each."""

    def run(size, function, shared=True, **options):
        tids = [None] * size

        def body(comm):
            tids[comm.rank] = threading.get_ident()
            threading.current_thread().name = f"rank {comm.rank}"
            function(comm)

        path = tmp_path / "rank-0.json"
        timeline.start(path, 0)
        try:
            settings = inprocess.world_settings(shared)
            inprocess.run_ranks(size, body, settings=settings, **options)
        finally:
            timeline.stop()
            attach_listeners_to_all()
        events = json.loads(path.read_text())
        threads = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        calls, parts = defaultdict(list), defaultdict(list)
        for event in slices(events):
            (calls if event["cat"] == "call" else parts)[threads[event["tid"]]].append(event)
        names = [f"rank {rank}" for rank in range(size)]
        return [Shown(calls[name], parts[name]) for name in names], Shown(
            calls["unisono-requests"], parts["unisono-requests"]
        )

    yield run
    timeline.stop()


def keys(calls):
    return [(call["args"]["group"], call["args"]["key"], call["name"]) for call in calls]


def many_calls(comm):
    x = np.ones(1 << 16, np.float32)
    plan = comm.plan_allreduce(x.copy())
    for _ in range(3):
        comm.allreduce(x, op=cc.SUM)
        plan()
    comm.allgather(np.ones((comm.rank + 1, 2)))
    comm.grouped_allreduce([x, np.ones(3)])
    part = comm.split(comm.rank % 2)
    part.barrier()
    part.close()
    with pytest.raises(MismatchError):
        comm.broadcast(np.ones(comm.rank + 1))
    comm.barrier()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_show_the_same_calls_by_the_same_keys(shown, size, shared):
    ranks, _ = shown(size, many_calls, shared)
    of_world = [[key for key in keys(one.calls) if key[0] == "world:0"] for one in ranks]
    assert all(sorted(own) == sorted(of_world[0]) for own in of_world)
    assert len(set(of_world[0])) == len(of_world[0]), "a key of two calls"
    for one in ranks:
        assert len(one.named("allreduce")) >= 3
        assert len(one.named("planned allreduce")) == 3
        for name in ("plan_allreduce", "allgather", "grouped_allreduce", "split", "barrier"):
            assert one.named(name), name
        assert {part["name"] for part in one.parts} <= set(KINDS)
        (refused,) = one.named("broadcast")
        assert refused["args"]["error"].startswith("MismatchError: broadcast: ")
    groups = {key[0] for one in ranks for key in keys(one.named("barrier"))}
    assert groups == {"world:0", "world.1:0", "world.1:1"}


def test_a_call_says_what_where_and_of_what_it_was_made(shown):
    def calls(comm):
        comm.allreduce(np.ones((4, 1 << 15), np.float32), op=cc.SUM)

    ranks, _ = shown(2, calls)
    for one in ranks:
        (call,) = one.named("allreduce")
        expected = {
            "call": 1, "op": "SUM", "dtype": "float32", "shape": "(4, 32768)", "bytes": 1 << 19,
            "algorithm": "node", "where": "near", "group": "world:0", "compression": "none",
        }  # fmt: skip
        assert expected.items() <= call["args"].items()
        assert call["args"]["at"].startswith("test_timeline_events.py:")
        assert {"copy", "reduce"} <= set(one.inside(call))
        spent = sum(call["args"].get(f"{kind} us", 0) for kind in KINDS)
        assert 0 < spent <= call["dur"]
        for part in one.parts:
            assert part["args"] in ({}, {"rank": 0}, {"rank": 1})


def test_a_wait_names_the_last_rank_to_come(shown):
    comms = {}

    def is_inside(rank):
        record = group_of(comms[rank]).recorder.records[-1]
        return (record.operation, record.state) == ("allreduce", "running")

    def calls(comm):
        comms[comm.rank] = comm
        comm.barrier()
        if comm.rank == 1:
            until(lambda: is_inside(0) and is_inside(2))
            threading.Event().wait(0.1)
        comm.allreduce(np.ones(3))

    ranks, _ = shown(3, calls)
    waits = []
    for one in ranks:
        (call,) = one.named("allreduce")
        begun = [part for part in one.parts if part["ts"] + 0.002 >= call["ts"]]
        waits.append(max(begun, key=lambda part: part["dur"], default={"dur": 0}))
    for number in (0, 2):
        assert (waits[number]["name"], waits[number]["args"]) == ("wait for peers", {"rank": 1})
        assert waits[number]["dur"] > max(50_000, waits[1]["dur"])


@pytest.mark.parametrize("algorithm", ["ring", "tree", "auto"])
def test_messages_are_network_and_what_lies_between_them_is_reducing(shown, algorithm):
    def calls(comm):
        comm.allreduce(np.ones(1 << 18, np.float32), algorithm=algorithm)

    ranks, _ = shown(3, calls, shared=False)
    for one in ranks:
        (call,) = one.named("allreduce")
        assert call["args"]["algorithm"] in {"ring", "tree", "doubling", "halving"}
        assert algorithm in ("auto", call["args"]["algorithm"])
        assert "network" in one.inside(call)
        assert {part["args"]["rank"] for part in one.parts if part["name"] == "network"} <= {
            0,
            1,
            2,
        }
    assert any("reduce" in one.inside(one.named("allreduce")[0]) for one in ranks)


def test_between_nodes_ranks_meet_near_and_send_far(shown):
    def calls(comm):
        comm.allreduce(np.ones(1 << 18, np.float32), algorithm="hierarchical")

    ranks, _ = shown(4, calls, leaders=TWO_NODES)
    for number, one in enumerate(ranks):
        (call,) = one.named("allreduce")
        assert (call["args"]["where"], call["args"]["algorithm"]) == ("far", "hierarchical")
        assert {"network", "reduce", "copy"} <= set(one.inside(call))
        peers = {part["args"]["rank"] for part in one.parts if part["name"] == "network"}
        assert (number + 2) % 4 in peers


def test_an_asynchronous_call_is_on_a_track_of_its_own(shown):
    def calls(comm):
        comm.allreduce_async(np.ones(3)).wait()

    ranks, requests = shown(2, calls)
    assert not any(one.named("allreduce") for one in ranks)
    first, second = requests.named("allreduce")
    assert first["args"]["group"] == second["args"]["group"] == "world.1:0"
    assert first["args"]["key"] == second["args"]["key"]
    assert first["args"]["at"].startswith("test_timeline_events.py:")


def test_an_array_of_another_rank_is_network(shown):
    def calls(comm):
        if comm.rank == 0:
            comm.send(np.ones(3), 1)
            comm.send(np.ones(3), 1)
        else:
            comm.recv(0)
            comm.recv()  # from any

    ranks, _ = shown(2, calls)
    (sent, _), (received, of_any) = ranks[0].named("send"), ranks[1].named("recv")
    assert sent["args"]["dest"] == 1
    assert received["args"]["from"] == 0
    assert "from" not in of_any["args"]
    assert "network" in ranks[1].inside(received)


def test_a_timeline_may_begin_and_end_between_calls(tmp_path):
    path = tmp_path / "rank-0.json"
    turn = threading.Barrier(2, timeout=20)

    def calls(comm):
        plan = comm.plan_allreduce(np.ones(3))
        plan()
        for act in (lambda: timeline.start(path, 0), timeline.stop):
            turn.wait()
            if comm.rank == 0:
                act()
                attach_listeners_to_all()
            turn.wait()
            plan()
            comm.barrier()

    inprocess.run_ranks(2, calls, settings=inprocess.world_settings(True))
    names = [event["name"] for event in slices(json.loads(path.read_text()))]
    calls = [name for name in names if name not in KINDS]
    assert sorted(calls) == ["barrier", "barrier", "planned allreduce", "planned allreduce"]


@pytest.mark.parametrize("leaders", [[0, 0, 0], [0, 1, 0], TWO_NODES, [7]])
def test_clocks_of_one_machine_are_alike(leaders):
    def compare(comm):
        return compare_clocks(
            group_of(comm).transport, group_of(comm).leaders, group_of(comm).deadline("a test")
        )

    found = inprocess.run_ranks(len(leaders), compare, leaders=leaders)
    assert len({clock.job for clock in found}) == 1
    for leader, clock in zip(leaders, found, strict=True):
        same_node = leader == leaders[0]
        assert abs(clock.offset) <= clock.error
        assert same_node == (clock.error == 0)
    by_node = {(leader, clock) for leader, clock in zip(leaders, found, strict=True)}
    assert len(by_node) == len(set(leaders))
