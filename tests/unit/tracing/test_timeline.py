"""The file of a timeline: what is in it, whatever becomes of the process and of the disk."""

import json
import logging
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from calls import LIMIT, until

from collectives.tracing import timeline
from collectives.tracing.timeline import timeline_span


@pytest.fixture(autouse=True)
def _ended(monkeypatch):
    monkeypatch.setattr(timeline, "_LONG", 10**12)  # no short span of a busy machine is a long one
    yield
    timeline.stop()


def slices(path):
    """What a complete file says, but for facts about the process."""
    return [event for event in json.loads(path.read_text()) if event.get("ph") in ("X", "B", "E")]


def test_spans_are_slices_of_their_thread_one_inside_of_the_other(tmp_path):
    @timeline_span("step")
    def step():
        with timeline_span('in "quotes"'):
            time.sleep(0.001)

    path = tmp_path / "rank-3.json"
    timeline.start(path, 3)
    before = time.monotonic_ns() / 1000
    step()
    other = threading.Thread(target=step, name="loader")
    other.start()
    other.join()
    after = time.monotonic_ns() / 1000
    timeline.stop()

    inner, outer, *others = slices(path)
    assert (inner["name"], outer["name"]) == ('in "quotes"', "step")
    assert {event["cat"] for event in (inner, outer, *others)} == {"span"}
    assert before <= outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] <= after
    assert inner["dur"] >= 1000  # us
    assert {(event["pid"], event["tid"]) for event in (inner, outer)} == {(3, 0)}
    assert [(event["pid"], event["tid"]) for event in others] == [(3, 1)] * 2
    facts = [event for event in json.loads(path.read_text()) if event.get("ph") == "M"]
    names = {event["tid"]: event["args"]["name"] for event in facts if "tid" in event}
    assert names == {0: threading.main_thread().name, 1: "loader"}


def test_a_span_costs_nothing_else_where_there_is_no_timeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with timeline_span("forward"), pytest.raises(KeyError), timeline_span("backward"):
        raise KeyError
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="expected a name, got 7"), timeline_span(7):
        pass


def test_a_span_that_fails_is_a_slice_as_well(tmp_path):
    own = timeline.start(tmp_path / "rank-0.json", 0)
    with pytest.raises(KeyError), timeline_span("forward"):
        raise KeyError
    timeline.stop()
    assert [event["name"] for event in slices(own.path)] == ["forward"]


def test_the_file_is_readable_before_it_ends_and_says_what_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "rank-0.json"
    timeline.start(path, 0)
    with timeline_span("epoch"):
        with timeline_span("step"):
            pass
        monkeypatch.setattr(timeline, "_LONG", 1000)  # ns
        until(lambda: '"B"' in path.read_text())  # written by the timeline's thread
        lines = path.read_text().splitlines()
        assert lines[0] == "["
        events = [json.loads(line.rstrip(",")) for line in lines[1:]]
        begun = [event["name"] for event in events if event["ph"] == "B"]
        assert begun == ["epoch"]
    timeline.stop()
    begin, end = (e for e in slices(path) if e["ph"] in "BE")
    assert (begin["ph"], end["ph"]) == ("B", "E")
    assert begin["ts"] < end["ts"]
    assert begin["tid"] == end["tid"]


def test_a_full_disk_is_logged_once_and_no_error(caplog):
    own = timeline.start(Path("/dev/full"), 5)
    for _ in range(3):
        with timeline_span("step"):
            pass
        own.flush()
    timeline.stop()
    assert caplog.text.count("the timeline ends here") == 1
    assert "[rank 5]" in caplog.text
    assert "No space left" in caplog.text


def test_what_a_slow_disk_does_not_take_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "_MOST_BYTES", 2000)
    monkeypatch.setattr(timeline, "_EVERY", LIMIT)
    path = tmp_path / "rank-0.json"
    timeline.start(path, 0)
    for _ in range(100):
        with timeline_span("step"):
            pass
    timeline.stop()
    events = json.loads(path.read_text())
    (left_out,) = (event["args"]["lines"] for event in events if event.get("name") == "left_out")
    assert len(slices(path)) + left_out == 100
    assert 0 < left_out < 100


def test_a_forked_child_writes_nothing(tmp_path):
    path = tmp_path / "rank-0.json"
    timeline.start(path, 0)
    with timeline_span("parent"):
        child = os.fork()
        if child == 0:
            try:
                with timeline_span("child"):
                    pass
                timeline.stop()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    timeline.stop()
    # It may have been open when the file was written, and have an end of its own.
    assert [event["name"] for event in slices(path) if event["ph"] != "E"] == ["parent"]


def test_a_slice_costs_little(tmp_path, caplog):
    timeline.start(tmp_path / "rank-0.json", 0)
    seconds = {timeline_span: [], nullcontext: []}
    for span in 20 * [*seconds]:
        began = time.perf_counter()
        for _ in range(200):
            with span("step"):
                pass
        seconds[span].append(time.perf_counter() - began)
    timeline.stop()
    # 4 us where it was measured, 10 times as much as a block that does nothing.
    assert min(seconds[timeline_span]) < 50 * min(seconds[nullcontext])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
