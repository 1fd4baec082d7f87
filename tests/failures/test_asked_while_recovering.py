"""The batch system asks a job to stop while those that live recover, and spare ranks come in."""

import pytest
from elastic_jobs import of_kind, start
from victims import needs_fault_tolerance

from pairwise import also


@pytest.fixture(scope="module", autouse=True)
def _fault_tolerant_mpi():
    needs_fault_tolerance()


# A thing is asked for its state in commits and saves, and given it as ranks go on.
PROGRAM = """
    import os, signal
    from strategies.checkpoint import Saver
    from strategies.session import TrainingSession, hooks
    what, folder = sys.argv[1:]

    class Thing:
        asked_for = 0  # its state, since the signal

        def state_dict(self):
            Thing.asked_for += preemption.asked
            dies_at = {"in the commit": 1, "in the save": 2}.get(what)
            if comm.rank == 1 and Thing.asked_for == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return {}

        def load_state_dict(self, loaded):
            if state.number > 0 and what in ("recovery", f"joining of {comm.rank}"):
                os.kill(os.getpid(), signal.SIGUSR1)

    things = {"weights": weights, "thing": Thing()}
    state = elastic.State(comm, step=0, **things)

    def step(session):
        if what.startswith("in the") and session.step == 7 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        weights[:] += state.comm.allreduce(np.ones(1000))

    def train(state):
        with (
            strategies.CheckpointManager(folder, state.comm) as manager,
            TrainingSession(
                Saver(manager, **things), state=state, commit_steps=5, save_steps=5,
                hooks=[hooks.StopAtStep(20)], preemption=preemption) as session,
        ):
            while not session.should_stop():
                session.run(step, session)

    with elastic.Preemption() as preemption:
        elastic.run_elastic(train, state, max_ranks=3)
    print("was not asked", flush=True)
"""


@pytest.mark.parametrize("what", ["joining of 3", also("recovery")])
def test_who_is_asked_while_ranks_recover_leaves_with_what_is_saved_once(tmp_path, what):
    fault = "step=12,rank=1,kind=kill"
    result, told = start(tmp_path, PROGRAM, fault, what, tmp_path / "saved", size=5)
    assert result.status == 85, result
    assert "was not asked" not in result.stdout
    assert [event["rank"] for event in of_kind(told, "admitted")] == [3]
    assert {(event["rank"], event["step"]) for event in of_kind(told, "left")} == {
        (0, 10), (2, 10), (3, 10)
    }  # fmt: skip
    assert sorted(line["step"] for line in of_kind(told, "saved")) == sorted([0, 5, 10] * 3)
    assert {event["rank"] for event in of_kind(told, "end")} == {0, 2, 3, 4}


@pytest.mark.parametrize("when", ["in the save", also("in the commit")])
def test_others_leave_though_the_rank_that_was_asked_dies_as_it_is_saved(tmp_path, when):
    """Nobody else has got the signal; the steps until then are in memory before they are saved."""
    result, told = start(tmp_path, PROGRAM, "", when, tmp_path / "saved", size=5)
    assert result.status == 85, result
    assert "was not asked" not in result.stdout
    last = 8 if when == "in the save" else 5
    assert {(event["rank"], event["step"]) for event in of_kind(told, "left")} == {
        (0, last), (2, last), (3, last)
    }  # fmt: skip
    names = {path.name for path in (tmp_path / "saved").glob("step-*")}
    assert names == {"step-000000", "step-000005", *({"step-000008"} if last == 8 else ())}
    assert {event["rank"] for event in of_kind(told, "end")} == {0, 2, 3, 4}
