"""Timelines of several ranks as one: clocks, who waited for whom, files that are not whole."""

import json

import pytest

from collectives.__main__ import main
from collectives.tools.timeline import late_ranks, merge, report
from collectives.tools.timeline_files import read
from requirements import installed

SECOND = 1e6  # us


class File:
    """A rank's file, as `collectives.tracing.timeline` writes it."""

    def __init__(self, rank, size, node=0, job=1, date="2026-01-01T00:00:00Z"):
        self.rank = rank
        self.lines = ["["]
        ranks = list(range(size))
        facts = {"rank": rank, "ranks": ranks, "node": node, "job": job, "date": date}
        self.add(ph="M", name="unisono", args=facts)

    def add(self, **event):
        self.lines.append(json.dumps({"pid": self.rank, **event}) + ",")

    def clock(self, at, offset, error=0):
        args = {"at": round(1000 * at), "offset": round(1000 * offset), "error": error}
        self.add(ph="M", name="unisono_clock", args=args)

    def slice(self, name, began, ended, cat="call", **args):
        times = {"ts": began, "dur": ended - began}
        self.add(ph="X", tid=0, cat=cat, name=name, **times, args=args)

    def call(self, name, number, began, ended, **args):
        args = {"group": "world:0", "key": f"call {number}", "at": "train.py:7", **args}
        self.slice(name, began, ended, **args)

    def write(self, directory, end="{}]\n"):
        path = directory / f"rank-{self.rank}.json"
        path.write_text("\n".join(self.lines) + "\n" + end)


def write(directory, *files, **options):
    for file in files:
        file.write(directory, **options)


def test_the_last_to_enter_a_call_keeps_the_others_waiting(tmp_path, capsys):
    files = [File(rank, 3) for rank in range(3)]
    for file, late in zip(files, (0.0, 2.0, 0.5), strict=True):
        file.clock(0, 0)
        file.call("allreduce", 1, late * SECOND, 2.1 * SECOND, **{"network us": 1000.0})
        file.call("barrier", 2, 3 * SECOND + file.rank, 3 * SECOND + 10)
    files[1].slice("epoch", 0, 2 * SECOND, cat="span")
    files[1].slice("forward", 0.1 * SECOND, 1.9 * SECOND, cat="span")
    files[1].slice("backward", 1.9 * SECOND, 2 * SECOND, cat="span")
    write(tmp_path, *files)
    ranks, remarks = read(tmp_path)
    assert not remarks

    first, second, third = late_ranks(ranks)
    assert first.rank == 1
    assert first.waited == pytest.approx({0: 2.0, 2: 1.5})
    assert first.calls == 1
    assert second.rank == 2
    assert second.waited == pytest.approx({0: 2e-6, 1: 1e-6})
    assert third.total == 0

    text = report(ranks)
    assert "3 ranks on 1 node, 3.000 s" in text
    assert "for rank 1: 3.500 s in 1 call: rank 0 2.000 s, rank 2 1.500 s" in text
    assert "longest 2.000 s, for allreduce at train.py:7, while it was in 'forward'" in text
    (line,) = (line for line in text.splitlines() if line.startswith("rank 1 "))
    assert line.split() == ["rank", "1", "2", "0.100", "0.000", "0.000", "0.000", "0.001"]

    capsys.readouterr()
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["nodes"], told["seconds"]) == (1, pytest.approx(3.0, abs=1e-4))
    assert told["ranks"]["1"]["calls"] == 2
    assert told["ranks"]["1"]["in_calls"] == pytest.approx(0.1, abs=1e-4)
    assert [one["rank"] for one in told["late"]] == [1, 2]
    assert told["late"][0]["waited"] == pytest.approx({"0": 2.0, "2": 1.5})
    longest = {"seconds": 2.0, "call": "allreduce", "at": "train.py:7", "span": "forward"}
    assert told["late"][0]["longest"] == longest
    assert (told["remarks"], told["file"]) == ([], str(tmp_path / "timeline.json"))


def test_a_rank_that_leaves_by_an_error_waited_no_longer_than_it_was_there(tmp_path):
    files = [File(rank, 2) for rank in range(2)]
    for file in files:
        file.clock(0, 0)
    files[0].call("allreduce", 1, 0, 1 * SECOND)
    files[1].call("allreduce", 1, 5 * SECOND, 6 * SECOND)
    write(tmp_path, *files)
    ranks, _ = read(tmp_path)
    assert late_ranks(ranks)[0].waited == pytest.approx({0: 1.0})


def test_who_receives_waits_for_who_sends(tmp_path):
    files = [File(rank, 2) for rank in range(2)]
    for file in files:
        file.clock(0, 0)
    files[0].slice("send", 9, 10, group="world:0", key="call 0", at="a.py:1", dest=1)
    files[1].slice(
        "recv", 0, 10, group="world:0", key="call 0", at="a.py:2", source=0, **{"from": 0}
    )
    write(tmp_path, *files)
    ranks, _ = read(tmp_path)
    assert [(late.rank, late.waited) for late in late_ranks(ranks)] == [
        (0, pytest.approx({1: 1e-5})), (1, {}),
    ]  # fmt: skip


def test_clocks_are_compared_at_the_begin_and_at_the_end(tmp_path):
    # The other node's clock is ahead by 100 s, and gains 1 ms in 10 s.
    def theirs(time):
        return (time * (1 + 1e-4)) + 100 * SECOND

    near, far = File(0, 2), File(1, 2, node=1)
    near.clock(0, 0)
    near.clock(10 * SECOND, 0)
    for time in (0, 10 * SECOND):
        far.clock(theirs(time), time - theirs(time), error=2000)
    for number in range(1, 10):
        time = number * SECOND
        near.call("barrier", number, time, time + 100)
        far.call("barrier", number, theirs(time + 50), theirs(time + 100))
    write(tmp_path, near, far)
    ranks, _ = read(tmp_path)
    (late, _) = late_ranks(ranks)
    assert late.rank == 1
    assert late.waited[0] == pytest.approx(9 * 50e-6, rel=1e-3)
    assert "2 ranks on 2 nodes, whose clocks fit to 0.002 ms" in report(ranks)

    merge(ranks, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())
    begun = {(e["pid"], e["args"]["key"]): e["ts"] for e in events if e.get("ph") == "X"}
    assert min(begun.values()) == 0
    for number in range(1, 10):
        key = f"call {number}"
        assert begun[1, key] - begun[0, key] == pytest.approx(50, abs=0.1)


def test_the_calls_of_a_killed_job_say_how_wrong_its_clocks_are(tmp_path):
    # Compared at the begin only; since then the other node's clock has gained 5 ms.
    near, far = File(0, 2), File(1, 2, node=1)
    near.clock(0, 0)
    far.clock(0, 0)
    near.call("barrier", 1, 0, 100)
    far.call("barrier", 1, 0, 100)
    near.call("barrier", 2, 100 * SECOND, 100 * SECOND + 100)
    far.call("barrier", 2, 100 * SECOND + 5020, 100 * SECOND + 5120)
    write(tmp_path, near, far, end='{"ph":"X","name":"barr')
    ranks, remarks = read(tmp_path)
    assert remarks == ["cut short or damaged: rank 0, rank 1"]
    # Rank 1 has entered the last call 100 us after rank 0 at most, as that one left it then.
    late = {one.rank: one for one in late_ranks(ranks)}
    assert late[1].waited[0] == pytest.approx(100e-6, abs=2e-6)
    assert "fit to 4.9" in report(ranks)


def test_what_was_under_way_when_the_job_was_killed_is_kept_open(tmp_path):
    file = File(0, 1)
    file.clock(0, 0)
    file.add(ph="B", tid=0, cat="call", name="barrier", ts=5, args={"is": "barrier #1 at a.py:3"})
    file.add(ph="B", tid=0, cat="span", name="inner", ts=6, args={})
    file.add(ph="E", tid=0, ts=8, args={})
    file.write(tmp_path, end="")
    ranks, remarks = read(tmp_path)
    assert not remarks
    assert ranks[0].spans == [(6, 8, "inner")]
    assert ranks[0].number_of_calls == 0
    merge(ranks, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())
    assert [event["ts"] for event in events if event.get("ph") in ("B", "E")] == [0, 1, 3]


def test_files_of_other_jobs_and_missing_ones_are_named(tmp_path, capsys):
    old, one = File(0, 3, job=7, date="2025-12-31T23:59:59Z"), File(1, 3)
    for file in (old, one):
        file.clock(0, 0)
        file.call("barrier", 1, 0, 1)
    one.add(ph="M", name="left_out", args={"lines": 12})
    write(tmp_path, old, one)
    (tmp_path / "rank-x.json").write_text("not one of ours")
    (tmp_path / "rank-2.json").write_text("[\n")  # killed at once
    assert main(["timeline", str(tmp_path), "--out", str(tmp_path / "all.json")]) == 0
    text = capsys.readouterr().out
    assert "1 rank on 1 node" in text
    assert "no rank waited for another" in text
    assert "left out, as of another job: rank 0" in text
    assert "no files of rank 0, rank 2" in text
    assert "12 lines left out by rank 1" in text
    assert str(tmp_path / "all.json") in text


@pytest.mark.parametrize("rate", [0, 1e-3])
@pytest.mark.parametrize("cut", [0, 1])
def test_ranks_without_a_complete_event_are_merged(tmp_path, capsys, cut, rate):
    files = [File(rank, 3, node=rank) for rank in range(3)]
    for file in files:
        file.clock(0, 0)
        file.clock(10, 10 * rate * file.rank)
    files[0].call("barrier", 1, 5, 6)
    for file in files[cut:2]:
        file.add(ph="B", tid=0, cat="call", name="barrier", ts=7, args={})
    write(tmp_path, *files[cut:])
    assert main(["timeline", str(tmp_path), "--out", str(tmp_path / "all.json")]) == 0
    assert ", 0.000 s" in capsys.readouterr().out
    events = json.loads((tmp_path / "all.json").read_text())
    assert min(event["ts"] for event in events if "ts" in event) == 0


def test_files_without_any_event_are_an_error(tmp_path, capsys):
    for file in (File(0, 2), File(1, 2)):
        file.clock(0, 0)
        file.write(tmp_path)
    assert main(["timeline", str(tmp_path)]) == 1
    assert "timeline: no event in the files rank-N.json in" in capsys.readouterr().err


def test_a_picture_is_drawn(tmp_path):
    installed("matplotlib")
    for number in range(2):
        file = File(number, 2)
        file.clock(0, 0)
        file.call("barrier", 1, 100 * number, 200)
        file.slice("wait for peers", 100 * number, 190, cat="part")
        file.slice("forward", 0, 100 * number, cat="span")
        file.write(tmp_path)
    assert main(["timeline", str(tmp_path), "--plot", str(tmp_path / "all.png")]) == 0
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_without_timelines_is_an_error(tmp_path, capsys):
    assert main(["timeline", str(tmp_path)]) == 1
    assert "no files rank-N.json of a timeline in" in capsys.readouterr().err
