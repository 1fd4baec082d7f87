"""What is recorded of operations, and when and where it is written."""

import json
import os
import re
import signal
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import inprocess
from collectives.core.errors import CollectiveError, CollectiveTimeout
from collectives.node import control_block
from collectives.tracing import recorder
from collectives.tracing.peer_status import StatusBoard
from collectives.tracing.recorder import Recorder, default_directory
from launcher import run

LIMIT = 20.0


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Let this process write to a folder of its own; returns the folder."""
    monkeypatch.setattr(recorder, "_process", None)
    before = signal.getsignal(signal.SIGUSR2)
    recorder.install(3, 8, str(tmp_path / "records"))
    yield tmp_path / "records"
    signal.signal(signal.SIGUSR2, before)


def wait_for(condition):
    give_up = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_record_says_what_when_where_and_how_it_ended():
    mine = Recorder("world", 1, 4)
    before = time.time()
    good = mine.begin(7, "allreduce")
    line = sys._getframe().f_lineno - 1
    good.fields = {"op": "SUM", "dtype": np.dtype("float32"), "shape": (2, 3), "root": 0}
    good.end()
    mine.begin(8, "barrier").end(CollectiveTimeout("rank 2 is silent"))
    mine.begin(9, "gather")

    facts = json.loads(json.dumps(mine.facts()))
    assert (facts["name"], facts["rank"], facts["size"]) == ("world", 1, 4)
    first, second, third = facts["operations"]
    expected = {
        "number": 7, "operation": "allreduce", "op": "SUM", "dtype": "float32", "shape": [2, 3],
        "root": 0, "state": "done", "site": f"{__file__}:{line}",
    }  # fmt: skip
    assert expected.items() <= first.items()
    assert 0 <= first["seconds"] < LIMIT
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", first["began"])
    assert first["began"][:16] in (
        time.strftime("%Y-%m-%dT%H:%M", time.gmtime(t)) for t in (before, time.time())
    )
    assert second["state"] == "CollectiveTimeout: rank 2 is silent"
    assert (third["state"], third["ended"]) == ("running", None)


def test_the_last_256_operations_are_kept():
    mine = Recorder("world", 0, 1)
    for number in range(1000):
        mine.begin(number, "barrier").end()
    assert [record.number for record in mine.records] == list(range(1000 - 256, 1000))


def test_recording_costs_little():
    mine = Recorder("world", 0, 1)

    def recorded(number):
        mine.begin(number, "barrier").end()

    seconds = {recorded: [], int: []}
    for call in 200 * [*seconds]:
        began = time.perf_counter()
        for number in range(100):
            call(number)
        seconds[call].append(time.perf_counter() - began)
    # 0.9 us where it was measured, 10 times as much as a call that does nothing.
    assert min(seconds[recorded]) < 50 * min(seconds[int])


def test_nothing_is_written_before_install(monkeypatch, tmp_path):
    monkeypatch.setattr(recorder, "_process", None)
    monkeypatch.chdir(tmp_path)
    assert recorder.write("a test") is None
    assert not list(tmp_path.iterdir())


def test_write_makes_one_file_for_all_communicators_of_the_process(installed, caplog):
    world, part = Recorder("world", 3, 8), Recorder("part", 1, 2)
    world.begin(1, "split").end()
    part.begin(1, "barrier")
    path = recorder.write("a test")
    assert path == installed / "rank-3.json"
    facts = json.loads(path.read_text())
    assert (facts["rank"], facts["size"], facts["reason"]) == (3, 8, "a test")
    named = {one["name"]: one for one in facts["communicators"]}
    assert named["part"]["operations"][0]["operation"] == "barrier"
    assert any("in test_write_makes_one_file" in "".join(s) for s in facts["threads"].values())
    assert str(path) in caplog.text
    recorder.write("another test")
    assert [file.name for file in installed.iterdir()] == ["rank-3.json"]


def test_a_file_that_cannot_be_written_is_logged_and_no_error(installed, caplog):
    installed.parent.joinpath("records").write_text("a file where the folder should be")
    assert recorder.write("a test") is None
    assert "[3/8] no flight record" in caplog.text


def test_values_of_any_kind_are_written():
    mine = Recorder("world", 0, 1)
    mine.begin(1, "shared_empty", {"shape": (np.int64(3), (2.5, None)), "op": ["a", np.int8(1)]})
    (facts,) = json.loads(json.dumps(mine.facts()))["operations"]
    assert facts["shape"] == ["3", ["2.5", None]]


def late(comm):
    """Let rank 1 not come to a barrier."""
    comm.barrier()
    if comm.rank == 0:
        comm.barrier(timeout=0.1)


def last_words(comm, error):
    """Return how the communicator refuses a call after an error."""
    with pytest.raises(error):
        late(comm)
    with pytest.raises(CollectiveError) as refusal:
        comm.barrier()
    return str(refusal.value)


@pytest.mark.parametrize("shared", [False, True])
def test_a_record_that_cannot_be_written_hides_no_timeout(installed, monkeypatch, caplog, shared):
    def everything(process, reason):
        raise TypeError("nobody can write this")

    def check(comm):
        return last_words(comm, CollectiveTimeout) if comm.rank == 0 else late(comm)

    monkeypatch.setattr(recorder, "_everything", everything)
    said = inprocess.run_ranks(2, check, settings=inprocess.world_settings(shared))[0]
    assert "since barrier failed: CollectiveTimeout" in said
    assert "no flight record: nobody can write this" in caplog.text


@pytest.mark.parametrize("shared", [False, True])
def test_ctrl_c_while_records_are_written_leaves_no_communicator_open(monkeypatch, shared):
    def interrupted(reason):
        raise KeyboardInterrupt

    def check(comm):
        return last_words(comm, KeyboardInterrupt) if comm.rank == 0 else late(comm)

    monkeypatch.setattr(recorder, "write", interrupted)
    said = inprocess.run_ranks(2, check, settings=inprocess.world_settings(shared))[0]
    assert "since barrier failed: CollectiveTimeout" in said


def test_sigusr2_writes_the_file_also_while_a_lock_of_the_log_is_held(installed):
    for handler in recorder.logging.getLogger().handlers:
        handler.acquire()
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0)  # the handler runs between two lines of the main thread
    finally:
        for handler in recorder.logging.getLogger().handlers:
            handler.release()
    path = installed / "rank-3.json"
    wait_for(path.exists)
    assert json.loads(path.read_text())["reason"] == "SIGUSR2"


def test_a_handler_of_the_program_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(recorder, "_process", None)
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
    try:
        recorder.install(0, 1, str(tmp_path))
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for(lambda: seen)
        assert not list(tmp_path.iterdir())
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_install_outside_the_main_thread_leaves_the_signal_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(recorder, "_process", None)
    before = signal.getsignal(signal.SIGUSR2)
    thread = threading.Thread(target=recorder.install, args=(0, 1, str(tmp_path)))
    thread.start()
    thread.join(LIMIT)
    assert signal.getsignal(signal.SIGUSR2) is before
    assert recorder.write("a test") == tmp_path / "rank-0.json"


def test_sigusr2_shows_where_the_main_thread_waits(tmp_path):
    text = f"""
        import os, signal, threading
        from collectives.tracing import recorder
        recorder.install(0, 1, {str(tmp_path)!r})
        def a_long_wait():
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            while not os.path.exists({str(tmp_path / "rank-0.json")!r}):
                threading.Event().wait(0.01)
        a_long_wait()
    """
    assert run([sys.executable, "-c", textwrap.dedent(text)], timeout=30).status == 0
    facts = json.loads((tmp_path / "rank-0.json").read_text())
    (stack,) = [s for name, s in facts["threads"].items() if name.startswith("MainThread")]
    assert "in a_long_wait" in "".join(stack)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_JOB_ID": "4711", "PMIX_NAMESPACE": "x"}, "4711"),
        ({"PMIX_NAMESPACE": "prterun-vm-117@1"}, "prterun-vm-117-1"),
        ({"PMIX_NAMESPACE": "../../etc"}, "..-..-etc"),
        ({}, str(os.getppid())),
    ],
)
def test_the_ranks_of_a_job_write_to_one_folder(environ, name):
    assert default_directory(environ, 2) == f"unisono-recorder-{name}"


def test_a_world_of_one_without_a_launcher_has_a_folder_of_its_own():
    assert default_directory({}, 1) == f"unisono-recorder-{os.getpid()}"


class TestBoard:
    """Three ranks of one node that share 384 bytes."""

    @pytest.fixture
    def ranks(self):
        entries = np.zeros(3, control_block.STATUS_ENTRY)
        names = [f"rank {rank}" for rank in range(3)]
        return [
            (StatusBoard(entries, rank, names), Recorder("world", rank, 3)) for rank in range(3)
        ]

    @staticmethod
    def enter(rank, number, operation):
        notes, recorded = rank
        record = recorded.begin(number, operation)
        notes.enter(record)
        return record

    def leave(self, rank, number, operation):
        record = self.enter(rank, number, operation)
        record.end()
        rank[0].leave(record)

    def test_it_names_those_who_have_not_come_and_what_they_last_did(self, ranks):
        self.leave(ranks[1], 11, "barrier")
        self.enter(ranks[0], 12, "allreduce")
        told = ranks[0][0].missing()
        words = r"rank 1 left barrier #11 at test_recorder.py:\d+ \d+ s ago, "
        assert re.fullmatch(words + "rank 2 has called nothing yet", told), told

    def test_a_rank_that_is_still_in_an_earlier_operation(self, ranks):
        self.enter(ranks[0], 12, "allreduce")
        self.enter(ranks[1], 11, "gather")
        self.leave(ranks[2], 12, "allreduce")
        words = r"rank 1 has been in gather #11 at test_recorder.py:\d+ for \d+ s"
        assert re.fullmatch(words, ranks[0][0].missing())

    def test_a_rank_that_compiles_before_the_operation_or_inside(self, ranks):
        for rank in ranks[:2]:
            self.enter(rank, 12, "allreduce")
        for board, _ in ranks[1:]:
            board.note_preparation(time.monotonic() - 5)
        words = r"rank 1 has compiled loops for \d+ s, rank 2 has compiled loops for \d+ s"
        assert re.fullmatch(words, ranks[0][0].missing())
        for board, _ in ranks[1:]:
            board.note_preparation(0.0)
        assert ranks[0][0].missing() == "rank 2 has called nothing yet"

    def test_a_rank_that_has_compiled_inside_the_operation_and_left_it_is_not_missing(self, ranks):
        for rank in ranks:
            self.enter(rank, 12, "allreduce")
        self.leave(ranks[1], 12, "allreduce")
        ranks[1][0].note_preparation(time.monotonic())
        assert ranks[0][0].missing() == ""

    def test_nobody_is_missing_when_all_have_come(self, ranks):
        for rank in ranks:
            self.enter(rank, 5, "barrier")
        assert ranks[0][0].missing() == ""

    def test_a_long_name_is_cut(self, ranks):
        self.leave(ranks[1], 1, "x" * 500)
        self.enter(ranks[0], 2, "barrier")
        assert "rank 1 left " + "x" * 100 in ranks[0][0].missing()
        assert "rank 2 has called nothing" in ranks[0][0].missing()
