"""Jobs whose ranks are killed at chosen and at random moments of `run_elastic`."""

import pytest
from kill_schedules import Event, Schedule, drawn, run
from victims import needs_fault_tolerance

from pairwise import also


@pytest.fixture(scope="module", autouse=True)
def _fault_tolerant_mpi():
    needs_fault_tolerance()


def killed(*events, trained=3, spares=0, session=False, memory="/dev/shm"):
    """Return a schedule of kills from inside, each (rank, phase, point, call)."""
    return Schedule(trained, spares, session, memory, [Event("kill", *event) for event in events])


# In the phase "failure" calls are counted from the first death on.
SCHEDULES = {
    "before the first call": killed((0, "start", "start", 1)),
    "before the first call of two": killed((1, "start", "begin", 1), trained=2),
    "spare ranks, in the first commit": killed(
        (1, "start", "barrier", 1), (3, "failure", "allgather", 3), trained=2, spares=2
    ),
    "two deaths before the first commit": killed(
        (0, "start", "start", 1), (2, "failure", "commit", 1), trained=4
    ),
    "just after a shrink": killed((1, "start", "step", 5), (0, "failure", "allreduce", 1)),
    "in a shrink, with a session": killed(
        (0, "start", "step", 6), (2, "failure", "agree", 1), session=True
    ),
    "while a spare rank is given its state": killed(
        (0, "start", "step", 5), (3, "failure", "hand_on", 1), spares=2
    ),
    # Open MPI makes no further communicator then, unless `shrink` releases its turn.
    "while survivors make their second communicator": killed(
        (0, "start", "barrier", 2),
        (3, "failure", "allgather", 1),
        (1, "failure", "made", 2),
        trained=4,
        spares=1,
        memory="off",
    ),
    "after all have returned": killed((2, "last", "stay", 1), (1, "start", "finalize", 1)),
}

MORE = ("in a shrink, with a session", "while a spare rank is given its state")


@pytest.mark.parametrize("when", [also(when) if when in MORE else when for when in SCHEDULES])
def test_the_surviving_ranks_end_with_the_right_state(tmp_path, when):
    outcome = run(SCHEDULES[when], tmp_path)
    assert not outcome.fault, f"{outcome}\n{(tmp_path / 'output').read_text()}"
    assert len(outcome.happened) == len(SCHEDULES[when].events), outcome


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
@pytest.mark.timeout(200)
def test_random_kills_leave_the_right_state(tmp_path, seed):
    outcome = run(drawn(seed), tmp_path)
    assert not outcome.fault, f"{outcome}\n{(tmp_path / 'output').read_text()}"
