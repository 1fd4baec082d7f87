"""Sessions of several ranks: all stop, save, fail and leave at the same step."""

import contextlib
import signal
import threading
import time

import numpy as np
import pytest
from calls import folder_of, status_of

import collectives as cc
import strategies
from strategies import errors
from strategies.checkpoint import Saver, checkpoint
from strategies.elastic import Preemption
from strategies.session import TrainingSession, hooks


def parts(comm, folder=None):
    """Weights, a manager and a saver of all ranks."""
    weights = np.zeros(2)
    folder = folder_of(comm) if folder is None else folder
    checkpoints = strategies.CheckpointManager(folder, comm, keep=50)
    return weights, checkpoints, Saver(checkpoints, weights=weights)


def steps_in(folder):
    return [int(path.name.removeprefix("step-")) for path in checkpoint.list_steps(folder)]


def test_one_rank_stops_all_at_the_same_step(comm):
    with TrainingSession(comm=comm) as session:
        while not session.should_stop():
            session.run(comm.allreduce, 1.0, op=cc.SUM)
            if session.step == 3 and comm.rank == comm.size - 1:
                session.request_stop()
    assert comm.allgather_object(session.step) == [4] * comm.size


def test_all_go_on_where_they_were_saved(comm):
    folder = folder_of(comm)
    for last in (3, 5):
        weights, checkpoints, saver = parts(comm, folder)
        around = [hooks.StopAtStep(last)]
        with checkpoints, TrainingSession(saver, save_steps=2, hooks=around) as session:
            assert weights.tolist() == [session.step] * 2
            while not session.should_stop():
                session.run(weights.__iadd__, comm.allreduce(np.ones(2)))
        assert weights.tolist() == [last] * 2
    assert steps_in(folder) == [0, 2, 3, 5]


@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("grace", [None, 1e6])
def test_any_rank_may_be_asked_and_all_leave_after_one_step(comm, rank, grace):
    weights, checkpoints, saver = parts(comm)
    preemption = Preemption(signals=(), grace_seconds=grace)
    session = TrainingSession(saver, preemption=preemption)

    def step():
        weights.__iadd__(comm.allreduce(np.ones(2)))
        if session.step == 2 and comm.rank == rank % comm.size:
            preemption.request()
        if session.step == 5:
            preemption.grace_seconds = 0  # it is over, however fast the steps are

    def program():
        with preemption, checkpoints, session:
            while not session.should_stop():
                session.run(step)

    assert status_of(program) == 85
    (steps,) = {*comm.allgather_object(session.step)}
    assert steps == (3 if grace is None else 6)
    assert checkpoints.latest().name == f"step-{steps:06d}"
    assert weights.tolist() == [steps] * 2


@pytest.mark.parametrize("kind", [ValueError, errors.OutOfRangeError, errors.UnavailableError])
@pytest.mark.parametrize("where", ["step", "hook"])
def test_an_error_of_one_rank_is_one_of_all(world, kind, where):
    """Also where the others do not talk to each other in a step; that is how the input ends."""

    class Raises(hooks.Hook):
        def __init__(self, comm):
            self.comm = comm

        def after_run(self, session, values):
            if session.step == 3 and self.comm.rank == self.comm.size - 1 and where == "hook":
                raise kind("the third")

    def run(comm):
        caught = []

        def step():
            if session.step == 2 and comm.rank == comm.size - 1 and where == "step":
                raise kind("the third")

        with TrainingSession(comm=comm, hooks=[Raises(comm)]) as session:
            while not caught:
                try:
                    session.run(step)
                except kind as error:
                    caught.append(error)
        assert "the third" in str(caught[0])
        assert comm.allgather_object(session.step) == [2] * comm.size
        assert comm.allreduce(1.0, op=cc.SUM) == comm.size

    world.run(run)


def test_after_a_failure_of_one_rank_all_go_back(comm):
    weights, checkpoints, saver = parts(comm)
    failures = iter([errors.AbortedError("lost against another one")])

    def step():
        weights.__iadd__(comm.allreduce(np.ones(2)))
        if session.step == 3 and comm.rank == comm.size - 1:
            for error in failures:
                raise error

    around = [hooks.StopAtStep(5)]
    with checkpoints, TrainingSession(saver, save_steps=2, hooks=around) as session:
        while not session.should_stop():
            session.run(step)
    assert weights.tolist() == [5, 5]
    assert session.step == 5


def test_the_chief_alone_saves_for_ranks_in_step(comm):
    """As with synchronous parameter servers, whose chief can save all of the state."""
    folder = folder_of(comm)
    for last in (2, 4):
        weights = np.zeros(1)
        manager = strategies.CheckpointManager(folder)
        saver = Saver(manager, weights=weights)
        around = [hooks.StopAtStep(last)]
        with manager, TrainingSession(saver, comm, save_steps=1, hooks=around) as session:
            assert session.step == last - 2
            while not session.should_stop():
                session.run(weights.__iadd__, 1)
        comm.barrier()
    assert steps_in(folder) == [0, 1, 2, 3, 4]
    assert weights.tolist() == [4 if comm.rank == 0 else 2]


def test_ranks_that_are_not_in_step_wait_for_each_other_at_the_end_alone(comm):
    folder = folder_of(comm)
    weights = np.zeros(1)
    saver = Saver(strategies.CheckpointManager(folder), weights=weights)
    own = hooks.StopAtStep(3 + comm.rank)
    with saver.checkpoints, TrainingSession(
        saver, comm, in_step=False, save_steps=2, hooks=[own]
    ) as session:  # fmt: skip
        while not session.should_stop():
            session.run(lambda: weights.__iadd__(1))
    assert session.step == 3 + comm.rank
    assert steps_in(folder) == [0, 2, 3]


def test_ranks_that_are_not_in_step_are_told_by_a_note(comm):
    folder = folder_of(comm)
    saver = Saver(strategies.CheckpointManager(folder), weights=np.zeros(1))
    preemption = Preemption(comm, signals=())
    session = TrainingSession(saver, comm, in_step=False, preemption=preemption)

    def step():
        time.sleep(0.001)
        if session.step == 0 and comm.rank == 0 < comm.size - 1:
            comm.send(0, comm.size - 1)
        if session.step == 5 and comm.rank == comm.size - 1:
            if comm.rank > 0:
                comm.recv(0)  # the chief has made a step, which it saves
            preemption.request()

    def program():
        limit = time.monotonic() + 20
        with preemption, saver.checkpoints, session:
            while not session.should_stop():
                assert time.monotonic() < limit, "nobody has told this rank"
                session.run(step)

    assert status_of(program) == 85
    comm.barrier()
    assert len(steps_in(folder)) >= 2


def test_a_signal_that_is_listed_twice_gets_its_former_handler_back():
    before = signal.getsignal(signal.SIGUSR2)
    with Preemption(signals=(signal.SIGUSR2, signal.SIGUSR2)):
        pass
    assert signal.getsignal(signal.SIGUSR2) is before


def test_an_invalid_signal_leaves_no_handler_and_no_thread(comm):
    before = signal.getsignal(signal.SIGUSR2)
    preemption = Preemption(comm, signals=(signal.SIGUSR2, 999))
    is_main = threading.current_thread() is threading.main_thread()
    # Other threads handle no signals, so nothing is wrong there.
    refused = pytest.raises(ValueError, match="signal number out of range")
    with refused if is_main else contextlib.nullcontext(), preemption:
        pass
    comm.barrier()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert "unisono-preemption" not in [thread.name for thread in threading.enumerate()]


def test_a_rank_outside_of_the_session_leaves_as_well(comm):
    """As a ps does, which only serves, and may be the one that is asked."""
    last = comm.rank == comm.size - 1
    own = comm.split(int(last and comm.size > 1))
    preemption = Preemption(comm, signals=())

    def program():
        with preemption:
            if last:
                preemption.request()
            if comm.size == 1 or not last:
                train()

    def train():
        limit = time.monotonic() + 20
        with TrainingSession(comm=own, preemption=preemption) as session:
            while not session.should_stop():
                assert time.monotonic() < limit, "nobody has told this rank"
                session.run(own.barrier)

    assert status_of(program) == 85
    own.close()


def test_spare_replicas_are_asked_and_leave(comm):
    """Who stops first has left, so that nobody waits for its gradients; the others then end."""
    preemption = Preemption(comm, signals=())
    optimizer = strategies.SGD(1.0)
    seen = []

    def program():
        count = max(1, comm.size - 1)
        with preemption, strategies.SpareReplicaStrategy(count, comm=comm) as strategy:
            variable = strategy.variable(np.zeros(2), name="w")

            def step():
                assert time.monotonic() < limit, "nobody has told this rank"
                strategy.apply_gradients(optimizer, [(-np.ones(2), variable)])
                if strategy.local_step >= 5 and comm.rank == comm.size - 1:
                    preemption.request()

            with TrainingSession(
                comm=comm,
                in_step=False,
                global_step=lambda: strategy.local_step,
                preemption=preemption,
            ) as session:
                with contextlib.suppress(errors.OutOfRangeError):
                    while not session.should_stop():
                        session.run(step)
                strategy.close()
            seen.append((session.step, variable.value.tolist()))

    limit = time.monotonic() + 20
    assert status_of(program) == 85
    ((step, value),) = seen
    assert value == [step] * 2
    assert max(comm.allgather_object(step)) >= 5
