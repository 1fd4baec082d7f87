"""Checkpoints of one version of all ps tasks, which write their parts while workers push."""

import errno
import os
import shutil
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from calls import folder_of, in_thread, until

import collectives as cc
import strategies
from served import LIMIT, opened, training
from strategies.checkpoint import Saver, checkpoint
from strategies.core import atomic_io
from strategies.errors import (
    AbortedError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    ResourceExhaustedError,
)
from strategies.parameter_server import ParameterServerStrategy
from strategies.parameter_server.server import PARAMETERS
from strategies.session import TrainingSession, hooks

PUSHES = 24


def made(server, *, parts=3, optimizer=None, **options):
    """A strategy with a table in parts, a vector and a scalar, which are equal at any time."""
    strategy = ParameterServerStrategy(
        server,
        optimizer or strategies.SGD(1.0),
        partitioner=lambda shape, dtype: [parts] + [1] * (len(shape) - 1),
        **options,
    )
    strategy.variable(np.zeros((7, 2)), name="table")
    strategy.variable(np.zeros(3), name="vector")
    strategy.variable(np.zeros(()), name="scalar")
    return strategy


def push(strategy):
    ones = [(np.ones(v.shape), v) for v in strategy.variables.values()]
    strategy.apply_gradients(strategy.optimizer, ones)


def one_version(tensors, prefix=""):
    """Check that every push is in all parts or in none; return the number of pushes."""
    values = [tensors[f"{prefix}variable/{name}"] for name in ("table", "vector", "scalar")]
    numbers = {float(n) for value in values for n in np.ravel(value)}
    steps = {
        int(n)
        for name, counts in tensors.items()
        if "optimizer/step/" in name or name == f"{prefix}updates"
        for n in counts
    }
    assert len(numbers) == len(steps) == 1, tensors
    return steps.pop()


def steps_in(folder):
    return [name for name in sorted(os.listdir(folder)) if name not in (".lock", "latest")]


@pytest.mark.several
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("optimizer", [strategies.SGD(1.0), strategies.Adam(0.1)])
def test_all_parts_are_of_one_version_while_workers_push(comm, background, synchronous, optimizer):
    folder = folder_of(comm)
    with opened(comm) as server:
        strategy = made(server, optimizer=optimizer, synchronous=synchronous)
        if not training(server):
            return
        pushes = in_thread(lambda: [push(strategy) for _ in range(PUSHES)])
        if strategy.is_chief:
            with strategies.CheckpointManager(
                folder, sharded=True, background=background, keep=9
            ) as manager:
                saver = Saver(manager, model=strategy, epoch=3)
                for step in range(1, 5):
                    saver.save(step)
                    one_version(strategy.state_dict())
        pushes.result(3 * LIMIT)
        server.cluster.workers.barrier()
        if not strategy.is_chief:
            return
        total = PUSHES * (1 if synchronous else server.cluster.workers.size)
        assert one_version(strategy.state_dict()) == total
        found = [checkpoint.restore(folder, step=step) for step in range(1, 5)]
        counts = [one_version(one.tensors, "model/") for one in found]
        assert counts == sorted(counts)
        servers = len(server.cluster.ranks_of("ps"))
        files = [f"ps-{n:05d}.safetensors" for n in range(servers)]
        for one in found:
            names = ["manifest.json", *files, "rank-00000.safetensors"]
            assert sorted(os.listdir(one.path)) == names
        shutil.rmtree(folder)


@pytest.mark.several
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("ps", "parts"), [(1, 1), (1, 2), (2, 5)])
def test_any_saver_restores_it_on_any_number_of_ps_tasks(comm, sharded, ps, parts):
    folder = folder_of(comm)
    with opened(comm) as server:
        first = made(server)
        pushes = comm.allreduce(int(training(server)), op=cc.SUM)
        if training(server):
            push(first)
            server.cluster.workers.barrier()
            if first.is_chief:
                with strategies.CheckpointManager(folder, sharded=True) as manager:
                    Saver(manager, model=first, epoch=3).save(7)
    comm.barrier()
    with opened(comm, ps=min(ps, comm.size - 1)) as server:
        second = made(server, parts=parts)
        if not training(server):
            return
        if second.is_chief:
            with strategies.CheckpointManager(folder, sharded=sharded) as manager:
                saver = Saver(manager, model=second, epoch=0)
                assert (saver.restore(), saver["epoch"]) == (7, 3)
        server.cluster.workers.barrier()
        second.pull()
        values = {float(n) for v in second.variables.values() for n in v.value.flat}
        assert values == {-float(pushes)}
        server.cluster.workers.barrier()


def addresses(strategy):
    """The addresses of the ps tasks, for a test that sends a change to only some of them."""
    name = strategy.shared_name
    return [
        strategy.service.open(PARAMETERS, {}, name=name, task=task)[0]
        for task in strategy.cluster.ranks_of("ps")
    ]


def request(strategy, place, operation, change, parts, values):
    """Send a worker's change to one ps."""
    told = {
        "worker": strategy.cluster.comm.rank, "version": 0, "examples": None, "parts": parts,
        "change": change, "as": None, "values_as": None,
    }  # fmt: skip
    strategy.service.request(place, operation, told, values)


def in_thread_until_taken(strategy, call):
    """Start a save in a thread, and wait until it has asked all ps tasks to catch up."""
    asked = threading.Event()
    ask = strategy.service.ask

    def noted(questions):
        request = ask(questions)
        if questions and questions[0].operation == "snapshot_take":
            asked.set()
        return request

    strategy.service.ask = noted
    running = in_thread(call)
    assert asked.wait(LIMIT)
    strategy.service.ask = ask
    return running


@pytest.mark.several
def test_a_push_that_has_reached_one_ps_is_awaited_on_the_others(comm):
    folder = folder_of(comm)
    with opened(comm) as server:
        strategy = ParameterServerStrategy(
            server, strategies.SGD(1.0), partitioner=lambda shape, dtype: [2]
        )
        strategy.variable(np.zeros(2), name="w")
        servers = len(server.cluster.ranks_of("ps"))
        if not strategy.is_chief or servers == 1:
            return
        first, second = addresses(strategy)
        send = partial(request, strategy, operation="push", parts=[[0, False, None]])
        with strategies.CheckpointManager(folder, sharded=True) as manager:
            saver = Saver(manager, model=strategy)
            send(first, change=1, values=[np.ones(1)])
            save = in_thread_until_taken(strategy, partial(saver.save, 1))
            send(second, change=1, values=[np.ones(1)])
            save.result(LIMIT)
            found = manager.restore_or_none().tensors
            assert found["model/variable/w"].tolist() == [-1, -1]
            assert found["model/updates"].tolist() == [1, 1]
            # The other way round: the ps that is held last has made it.
            send(second, change=2, values=[np.ones(1)])
            state = in_thread_until_taken(strategy, strategy.state_dict)
            send(first, change=2, values=[np.ones(1)])
            assert state.result(LIMIT)["variable/w"].tolist() == [-2, -2]
        shutil.rmtree(folder)


def fails_there(strategy, first, second):
    with pytest.raises(InvalidArgumentError, match="given twice"):
        request(strategy, second, "push", 1, [[0, False, None]] * 2, [np.ones(1)] * 2)


def never_arrives(strategy, first, second):
    strategy.timeout = 0.2


def another_round(strategy, first, second):
    # As after a worker whose last push has reached one ps alone.
    request(strategy, second, "assign", 1, [], [])


PARTIAL = [
    (fails_there, False, AbortedError, r"a change of tasks \[2\] has failed on this ps"),
    (never_arrives, False, DeadlineExceededError, r"; changes of tasks \[2\] are missing"),
    (another_round, True, AbortedError, r"got 1 on /job:ps/task:0, 0 on /job:ps/task:1"),
]


@pytest.mark.several
@pytest.mark.parametrize(("other", "synchronous", "kind", "message"), PARTIAL)
def test_parts_of_different_versions_are_an_error(comm, other, synchronous, kind, message):
    folder = folder_of(comm)
    with opened(comm) as server:
        strategy = ParameterServerStrategy(
            server,
            strategies.SGD(1.0),
            partitioner=lambda shape, dtype: [2],
            synchronous=synchronous,
        )
        w = strategy.variable(np.zeros(2), name="w")
        servers = len(server.cluster.ranks_of("ps"))
        workers = server.cluster.workers
        if workers is None:
            return
        if not strategy.is_chief:
            strategy.leave()
        workers.barrier()
        if strategy.is_chief and servers > 1:
            first, second = addresses(strategy)
            request(strategy, first, "push", 1, [[0, False, None]], [np.ones(1)])
            other(strategy, first, second)
            with strategies.CheckpointManager(folder, sharded=True) as manager:
                saver = Saver(manager, model=strategy)
                for call in (partial(saver.save, 1), strategy.state_dict):
                    with pytest.raises(kind, match=message) as caught:
                        call()
                    assert "/job:ps/task:1" in str(caught.value)
                assert steps_in(folder) == []
                # Training goes on, and a state that is loaded makes the ps tasks equal again.
                strategy.timeout = LIMIT
                strategy.assign(w, np.zeros(2))
                strategy.load_state_dict(
                    {
                        "variable/w": np.zeros(2),
                        "optimizer/step/w": np.array([5]),
                        "updates": np.array([5]),
                    }
                )
                push(strategy)
                saver.save(6)
                found = manager.restore_or_none().tensors
                assert found["model/variable/w"].tolist() == [-1, -1]
                assert found["model/updates"].tolist() == [6, 6]
        workers.barrier()


@pytest.mark.parametrize("background", [False, True])
def test_a_part_that_a_ps_cannot_write_is_an_error_that_names_it(world, background, monkeypatch):
    real = atomic_io.new_file

    def new_file(path):
        if "ps-00000" in path.name and "000002" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path)

    monkeypatch.setattr(atomic_io, "new_file", new_file)

    def run(comm):
        if comm.size == 1:
            return
        folder = folder_of(comm)
        with opened(comm) as server:
            strategy = made(server)
            if not strategy.is_chief:
                return
            with strategies.CheckpointManager(
                folder, sharded=True, background=background
            ) as manager:
                saver = Saver(manager, model=strategy)
                saver.save(1)
                save = partial(saver.save, 2)
                if background:
                    save()
                    save = manager.wait
                with pytest.raises(ResourceExhaustedError, match="no space left") as caught:
                    save()
                assert "(/job:ps/task:0)" in str(caught.value)
                assert steps_in(folder) == ["step-000001"]
                push(strategy)
                saver.save(3)
                found = manager.restore_or_none()
                assert (found.step, one_version(found.tensors, "model/")) == (3, 1)
            shutil.rmtree(folder)

    world.run(run)


def test_training_goes_on_during_a_save_and_the_next_save_waits(world, monkeypatch):
    real = checkpoint.write_shard

    def write_shard(part, suffix, rank, given, job="rank", rest=None):
        if job == "ps":
            until((part.parent / "may-write").exists)
        return real(part, suffix, rank, given, job, rest)

    monkeypatch.setattr(checkpoint, "write_shard", write_shard)

    def run(comm):
        if comm.size == 1:
            return
        folder = folder_of(comm)
        with opened(comm) as server:
            strategy = made(server)
            if not strategy.is_chief:
                return
            with strategies.CheckpointManager(folder, sharded=True, background=True) as manager:
                saver = Saver(manager, model=strategy)
                push(strategy)
                saver.save(1000)
                for _ in range(3):
                    push(strategy)
                assert not any(name.startswith("step") for name in os.listdir(folder))
                second = in_thread(saver.save, 2000)
                (Path(folder) / "may-write").touch()
                second.result(LIMIT)
                manager.wait()
            counts = [
                one_version(checkpoint.restore(folder, step=step).tensors, "model/")
                for step in (1000, 2000)
            ]
            assert counts == [1, 4]
            shutil.rmtree(folder)

    world.run(run)


@pytest.mark.several
def test_several_tasks_may_save_at_once(comm):
    with opened(comm) as server:
        strategy = made(server)
        if not training(server):
            return
        workers = server.cluster.workers
        workers.barrier()
        for _ in range(10):
            push(strategy)
            one_version(strategy.state_dict())
        workers.barrier()
        assert one_version(strategy.state_dict()) == 10 * workers.size
        workers.barrier()


@pytest.mark.several
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_session_saves_and_returns_to_a_sharded_checkpoint(comm, synchronous):
    folder = folder_of(comm)
    with opened(comm) as server:
        strategy = made(server, synchronous=synchronous)
        if not training(server):
            return
        failures = [4] if synchronous else []

        def step():
            if session.step in failures:
                failures.clear()
                raise AbortedError("a step that fails once")
            push(strategy)

        workers = server.cluster.workers

        def recover(error):
            workers.barrier()

        class Pull(hooks.Hook):
            def after_create(self, session):
                strategy.pull()

        with strategies.CheckpointManager(folder, sharded=True, background=True) as manager:
            saver = Saver(manager, model=strategy)
            with TrainingSession(
                saver, workers, in_step=synchronous, save_steps=3, recover=recover,
                hooks=[hooks.StopAtStep(8), Pull()],
            ) as session:  # fmt: skip
                while not session.should_stop():
                    session.run(step)
        if strategy.is_chief:
            last = checkpoint.restore(folder)
            count = one_version(last.tensors, "model/")
            assert count == (8 if synchronous else 8 * workers.size)
        workers.barrier()


@pytest.mark.several
def test_a_held_push_fails_when_the_ps_discards_its_variables(comm):
    with opened(comm) as server:
        strategy = made(server)
        if not strategy.is_chief:
            return
        place, *_ = addresses(strategy)
        told = {"snapshot": 0}
        strategy.service.start(place, "snapshot", lambda answer: None, told)
        strategy.service.request(place, "snapshot_hold", told)
        answered = Future()
        push = {"change": 1, "worker": comm.rank, "version": 0, "examples": None, "parts": []}
        strategy.service.start(place, "push", answered.set_result, push)
        strategy.reports()  # requests are handled in order: the push is held
        assert not answered.done()
        strategy.service.reset(task=place.task)
        assert isinstance(answered.result(LIMIT).error, CancelledError)


@pytest.mark.several
def test_a_round_that_others_complete_by_leaving_is_held(comm):
    with opened(comm) as server:
        strategy = made(server, synchronous=True)
        workers = server.cluster.workers
        if workers is None or workers.size == 1:
            return
        if strategy.is_chief:
            place, *_ = addresses(strategy)
            answered = Future()
            push = {"change": 1, "worker": comm.rank, "version": 0, "examples": None, "parts": []}
            strategy.service.start(place, "push", answered.set_result, push)
            told = {"snapshot": 0}
            snapshot = strategy.service.start(place, "snapshot", lambda answer: None, told)
            strategy.service.request(place, "snapshot_hold", told)
        workers.barrier()
        if not strategy.is_chief:
            strategy.leave()
            return
        until(lambda: strategy.reports()[0].members == (comm.rank,))
        assert (answered.done(), strategy.reports()[0].version) == (False, 0)
        strategy.service.disown(snapshot)
        assert answered.result(LIMIT).error is None
        assert strategy.reports()[0].version == 1


@pytest.mark.several
def test_a_ps_task_and_another_manager_do_not_ask(comm):
    folder = folder_of(comm)
    with opened(comm) as server:
        strategy = made(server)
        if training(server):
            server.cluster.workers.barrier()
        else:
            with pytest.raises(FailedPreconditionError, match="a ps task serves others"):
                strategy.remote_state()
        if strategy.is_chief:
            with strategies.CheckpointManager(Path(folder) / "whole") as manager:
                Saver(manager, model=strategy).save(1)
                assert manager.latest().joinpath("rank-00000.safetensors").exists()
                assert not list(manager.latest().glob("ps-*"))
            with strategies.CheckpointManager(Path(folder) / "wrong", sharded=True) as manager:
                with pytest.raises(OpError, match="bad step"):
                    Saver(manager, model=strategy).save(-1)
                push(strategy)  # nothing holds the ps tasks
        if training(server):
            server.cluster.workers.barrier()
