"""Timelines of real jobs: a slow rank is named, a killed job leaves readable files."""

import json
import re
import sys
import textwrap

import pytest

from collectives.tools.timeline_files import read
from launcher import mpirun, run
from pairwise import also

# Rank 2 is slow, in step 4 for longer than crowded cores can have delayed others until then; then
# all ranks wait for rank 1, which kills them and itself once their files and its own say so.
KILLED = """
    import os, signal, sys, time
    import numpy as np
    import collectives as cc

    comm = cc.init()
    gradient = np.ones(1 << 16, np.float32)
    average = comm.plan_allreduce(gradient)
    began = time.monotonic()
    for step in range(5):
        with cc.timeline_span("forward"):
            if comm.rank == 2:
                time.sleep(0.05 if step != 4 else 1.0 + 2 * (time.monotonic() - began))
        average()
        comm.allreduce(gradient, algorithm="ring")
    everybody = comm.allgather_object(os.getpid())
    if comm.rank == 1:
        for rank, last in ((0, "barrier"), (1, "allgather_object"), (2, "barrier")):
            # A call that lasts is written by the timeline's thread.
            while f'"name":"{last}"' not in open(f"{sys.argv[1]}/rank-{rank}.json").read():
                time.sleep(0.01)
        for process in (everybody[0], everybody[2], everybody[1]):
            os.kill(process, signal.SIGKILL)
    comm.barrier()
"""


@pytest.fixture(scope="module", params=["/dev/shm", also("off")], ids=["shared", "messages"])
def killed(request, tmp_path_factory):
    """The folder with the files of a job that was killed."""
    place = tmp_path_factory.mktemp("timeline") / "of" / "a job"
    program = textwrap.dedent(KILLED)
    result = mpirun(
        3, "-c", program, place, UNISONO_TIMELINE=str(place), UNISONO_SHARED_MEMORY=request.param
    )
    assert result.status != 0
    assert "Traceback" not in result.stderr, result.stderr
    return place


def test_the_slow_rank_of_a_killed_job_is_named(killed):
    command = [sys.executable, "-m", "collectives", "timeline", str(killed)]
    result = run(command, timeout=60).checked()
    first = result.stdout.partition("who waited for whom\n")[2].splitlines()[0]
    found = re.fullmatch(
        r"for rank 2: (\S+) s in \d+ calls: rank \d (\S+) s, rank \d (\S+) s", first
    )
    assert found, result.stdout
    total, one, other = map(float, found.groups())
    assert total == pytest.approx(one + other, abs=0.002)
    assert min(one, other) > 0
    assert "while it was in 'forward'" in result.stdout
    merged = json.loads((killed / "timeline.json").read_text())
    assert {event["pid"] for event in merged if "pid" in event} == {0, 1, 2}
    assert min(event["ts"] for event in merged if "ts" in event) == 0


def test_what_ranks_did_when_the_job_was_killed_is_in_their_files(killed):
    ranks, _ = read(killed)
    assert sorted(ranks) == [0, 1, 2]
    for number in (0, 2):
        lines = (killed / f"rank-{number}.json").read_text().splitlines()
        assert lines[0] == "["
        begun = [json.loads(line.rstrip(",")) for line in lines[1:] if '"ph":"B"' in line]
        assert begun[-1]["name"] == "barrier"
        assert re.match(r"barrier #\d+ at <string>:\d+", begun[-1]["args"]["is"])
    planned = [
        [call.name for call in rank.calls.values()].count("planned allreduce")
        for rank in ranks.values()
    ]
    assert planned == [5, 5, 5]


REFUSED = """
    import os, sys
    import numpy as np
    import collectives as cc

    place = sys.argv[1]
    comm = cc.init()
    cc.stop_timeline()  # there is none

    # One rank cannot write.
    try:
        cc.start_timeline("/proc/nowhere" if comm.rank == 1 else place)
    except OSError as error:
        assert comm.rank == 1, error
    except cc.MismatchError as error:
        assert comm.rank == 0 and "refused on rank 1" in str(error), error
    else:
        raise AssertionError("it has begun")
    comm.barrier()

    cc.start_timeline(place)
    try:
        cc.start_timeline(place)
    except ValueError as error:
        assert "there is one already" in str(error), error
    part = comm.split(comm.rank % 2)
    request = comm.allreduce_async(np.ones(1 << 20))
    comm.barrier()
    request.wait()
    cc.stop_timeline()
    comm.barrier()
    cc.start_timeline(place + " 2")
    comm.barrier()
    cc.shutdown()  # ends it
    assert cc.init() is not comm
    cc.init().barrier()
"""


def test_a_timeline_begins_on_all_ranks_or_on_none_and_may_begin_again(tmp_path):
    place = tmp_path / "timeline"
    mpirun(2, "-c", textwrap.dedent(REFUSED), place).checked()
    for folder in (place, tmp_path / "timeline 2"):
        ranks, remarks = read(folder)
        assert not remarks
        assert sorted(ranks) == [0, 1]
        for rank in ranks.values():
            assert len(rank.clocks) == 2
            json.loads(rank.path.read_text())
    names = {call.name for call in ranks[0].calls.values()}
    assert names == {"barrier", "stop_timeline"}
