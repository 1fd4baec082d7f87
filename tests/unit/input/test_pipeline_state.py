"""Pipelines that go on inside an epoch, with the batches that an undisturbed run has there."""

import json
import threading

import numpy as np
import pytest

import collectives as cc
import strategies
from inprocess import run_ranks
from strategies.checkpoint import Saver
from strategies.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    UnavailableError,
)
from strategies.input import (
    ReaderRoundRobin,
    ShardedInput,
    batch,
    batch_join,
    csv_batches,
    maybe_batch,
    shuffle_batch,
)
from strategies.input.producers import preload
from strategies.session import TrainingSession, hooks


@pytest.fixture
def files(tmp_path):
    paths = []
    for number in range(3):
        path = tmp_path / f"{number}.csv"
        path.write_text("".join(f"{number * 100 + row},{row}\n" for row in range(40)))
        paths.append(str(path))
    return paths


def rows(files, **options):
    settings = {"batch_size": 7, "seed": 3, "min_after_dequeue": 30, "num_epochs": 2} | options
    return csv_batches(files, [np.int32(0), np.int32(0)], **settings)


OPTIONS = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "with a rest": {"allow_smaller_final_batch": True, "num_epochs": 1},
    "two threads": {"num_threads": 2},
    "three threads": {"num_threads": 3, "allow_smaller_final_batch": True},
    "two threads in order": {"num_threads": 2, "shuffle": False},
    "more threads than files": {"num_threads": 5, "num_epochs": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("taken", [0, 1, 11])
def test_csv_batches_go_on_as_undisturbed(files, options, taken):
    with rows(files, **options) as batches:
        whole = [b[0].tolist() for b in batches]
    with rows(files, **options) as batches:
        for _ in range(taken):
            next(batches)
        state = json.loads(json.dumps(batches.state()))
    with rows(files, **options) as batches:
        batches.resume(state)
        assert [b[0].tolist() for b in batches] == whole[taken:]
    with rows(files, **options) as batches:  # also where some have been taken
        for _ in range(min(taken, 1)):
            next(batches)
        batches.resume(state)
        assert batches.state() == state
        assert [b[0].tolist() for b in batches] == whole[taken:]


def test_a_saver_takes_pipelines(files, tmp_path):
    folder = tmp_path / "run"
    with rows(files) as batches, strategies.CheckpointManager(folder) as manager:
        for _ in range(5):
            next(batches)
        Saver(manager, input=batches, step=5).save(5)
        expected = [b[0].tolist() for b in batches]
    with rows(files) as batches, strategies.CheckpointManager(folder) as manager:
        assert Saver(manager, input=batches, step=0).restore() == 5
        assert [b[0].tolist() for b in batches] == expected
    assert len(expected) > 20


def test_shuffle_batch_goes_on(files):
    def made():
        return shuffle_batch(
            preload(range(50), num_epochs=1, shuffle=False), 4, capacity=30, min_after_dequeue=20,
            seed=5,
        )  # fmt: skip

    with made() as batches:
        whole = [b.tolist() for b in batches]
    with made() as batches:
        batches.resume({"batches": [6]})
        assert [b.tolist() for b in batches] == whole[6:]


def test_what_comes_in_another_order_another_time_has_no_state(files):
    for options in ({"num_threads": 2, "seed": None}, {"seed": None}):
        with (
            rows(files, **options) as batches,
            pytest.raises(FailedPreconditionError, match="seed"),
        ):
            batches.state()


def test_states_that_do_not_fit(files):
    with rows(files) as batches:
        for bad in ({}, {"batches": 3}, {"batches": [-1]}, {"batches": ["1"]}, {"batches": [True]}):
            with pytest.raises(InvalidArgumentError, match="not the state"):
                batches.resume(bad)
        with pytest.raises(InvalidArgumentError, match="expected 1, got 2"):
            batches.resume({"batches": [1, 1]})
        for readers in ([2], 2, [1, 1], ["1"]):
            with pytest.raises(InvalidArgumentError, match="threads in the state, expected 1"):
                batches.resume({"batches": [1], "readers": readers})
        next(batches)
        next(batches)
        with pytest.raises(FailedPreconditionError, match="at most 1 batches taken before, got 2"):
            batches.resume({"batches": [1]})


def uneven(tmp_path):
    """Files of many reads, of one, and of no row; with the rows of all of them."""
    paths, everything = [], []
    for number, count in enumerate([900, 3, 0, 300, 0, 1, 513, 256]):
        path = tmp_path / f"uneven{number}.csv"
        mine = [number * 1000 + row for row in range(count)]
        path.write_text("".join(f"{row},0\n" for row in mine))
        paths.append(str(path))
        everything += mine
    return paths, everything


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_several_readers_give_each_row_once_over_a_restore(tmp_path, num_threads, shuffle):
    paths, everything = uneven(tmp_path)
    options = {
        "num_threads": num_threads, "shuffle": shuffle, "num_epochs": 1, "batch_size": 32,
        "allow_smaller_final_batch": True,
    }  # fmt: skip

    def flat(batches):
        return [row for batch in batches for row in batch[0].tolist()]

    with rows(paths, **options) as batches:
        whole = flat(batches)
    with rows(paths, **options) as batches:
        used = flat(next(batches) for _ in range(20))
        state = json.loads(json.dumps(batches.state()))
    assert state == {"batches": [20], "readers": [num_threads]}
    with rows(paths, **options) as batches:
        batches.resume(state)
        rest = flat(batches)
    assert sorted(used + rest) == everything
    assert used + rest == whole


def held_back(values, slow):
    """Reads values; a slow one lets the others run ahead first, if they can."""
    left = iter(values)

    def read():
        for value in left:
            if slow is not None:
                slow.wait(0.05)  # nobody sets it
            return value
        raise OutOfRangeError("no more")

    return read


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_functions_hand_over_by_turns_whichever_is_slow(slow):
    """The rounds: a and b and c, then those that have more."""
    sources, event = [["a1", "a2"], ["b1"], ["c1", "c2", "c3", "c4"]], threading.Event()
    reads = [held_back(s, event if i == slow else None) for i, s in enumerate(sources)]
    with batch_join(reads, 1, turns=ReaderRoundRobin(3)) as batches:
        assert [b[0] for b in batches] == ["a1", "b1", "c1", "a2", "c2", "c3", "c4"]
        assert batches.state() == {"batches": [7], "readers": [3]}


def test_who_waits_for_a_turn_ends_with_the_pipeline():
    blocked, threads = threading.Event(), set(threading.enumerate())

    def endless():
        return 1

    def fails():
        blocked.wait(10)
        raise ValueError("no such sensor")

    with batch_join([endless, fails], 1, turns=ReaderRoundRobin(2)) as batches:
        next(batches)  # the first of `endless`; its next turn comes after that of `fails`
        blocked.set()
        with pytest.raises(ValueError, match="sensor"):
            list(batches)
    with batch_join([endless, lambda: 2], 1, turns=ReaderRoundRobin(2), capacity=1) as batches:
        next(batches)  # and then the end of the block, where one waits for the other
    assert set(threading.enumerate()) <= threads


def test_turns_are_for_as_many_functions_that_differ():
    def read():
        return 1

    for reads in ([read, read], [read]):
        with pytest.raises(ValueError, match="different functions, expected 2, got 1"):
            batch_join(reads, 1, turns=ReaderRoundRobin(2))


EPOCHS = 3


def train(files, folder, comm=None, last_step=None):
    """Add up rows in an order that counts, a step for each batch, a pipeline for each epoch."""
    own = files if comm is None else files[comm.rank :: comm.size]
    seen, position = np.zeros(1), {"epoch": 0, "input": None}
    manager = strategies.CheckpointManager(folder, comm)
    saver = Saver(manager, seen=seen, rng=np.random.default_rng(1), **position)
    around = [] if last_step is None else [hooks.StopAtStep(last_step)]

    def step(batch):
        total = batch[0].sum() if comm is None else comm.allreduce(batch[0].sum(), op=cc.SUM)
        seen[0] = seen[0] * 0.75 + total + saver["rng"].random()

    with manager, TrainingSession(saver, save_steps=4, hooks=around) as session:
        for epoch in range(session["epoch"], EPOCHS):
            with rows(own, seed=epoch, num_epochs=1, min_after_dequeue=20) as batches:
                if session["input"] is not None:
                    batches.resume(session["input"], comm)
                session.update(epoch=epoch, input=batches)
                for batch in batches:
                    session.run(step, batch)
                    if session.should_stop():
                        return session.step, seen.tobytes()
            session.update(epoch=epoch + 1, input=None)
        return session.step, seen.tobytes()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("stop", [1, 5, 17])
def test_a_session_goes_on_inside_an_epoch(files, tmp_path, size, stop):
    """In the first epoch, after a save, at its end, and in the second: with the same bits."""

    def run(folder, last_step=None):
        if size == 1:
            return [train(files, tmp_path / folder, None, last_step)]
        return run_ranks(size, lambda comm: train(files, tmp_path / folder, comm, last_step))

    whole = run("whole")
    assert whole[0][0] > 2 * 5
    last = min(stop, whole[0][0] - 2)
    assert [step for step, _ in run("stopped", last)] == [last] * size
    assert run("stopped") == whole


@pytest.mark.parametrize("failing", [2, 6])  # before a checkpoint has the pipeline, and after
def test_after_a_failure_a_pipeline_does_not_go_back(files, tmp_path, failing):
    def train_all(session):
        def step(batch):
            if session.step == failing:
                raise UnavailableError("a machine does not answer")

        with rows(files) as batches, session:
            session.update(input=batches)
            for batch in batches:
                session.run(step, batch)

    with strategies.CheckpointManager(tmp_path / "run") as manager:
        session = TrainingSession(Saver(manager, input=None), save_steps=4)
        with pytest.raises(FailedPreconditionError, match="pipeline"):
            train_all(session)
        assert manager.restore_or_none().step == failing // 4 * 4


FILES = {f"file{i}": [f"file{i}:{row}" for row in range(5 + i)] for i in range(6)}


def sharded(comm, policy):
    return ShardedInput(
        list(FILES), FILES.get, rank=comm.rank, size=comm.size, policy=policy, seed=2, num_epochs=2
    )


@pytest.mark.parametrize("policy", ["file", "data"])
@pytest.mark.parametrize("later", [1, 2, 3])
@pytest.mark.parametrize("kept", ["0123456789", "1378"], ids=["all rows", "some rows"])
def test_sharded_input_goes_on_with_any_number_of_ranks(policy, later, kept):
    everything = sorted([row for rows in FILES.values() for row in rows if row[-1] in kept] * 2)

    def make(comm, **options):
        records = sharded(comm, policy)
        if len(kept) == 10:
            return batch(records, 3, **options)
        return maybe_batch(records, lambda row: row[-1] in kept, 3, **options)

    def first(comm):
        with make(comm) as batches:
            used = [row for _ in range(1 + comm.rank) for row in next(batches)]
            return used, batches.state(comm)

    used, states = zip(*run_ranks(2, first), strict=True)
    assert states[0] == states[1]
    state = json.loads(json.dumps(states[0]))

    def second(comm):
        batches = make(comm, allow_smaller_final_batch=True)
        batches.resume(state, comm)
        with batches:
            rest = [row for rows in batches for row in rows]
            with pytest.raises(FailedPreconditionError, match="open"):
                batches.resume(state, comm)
        return rest

    rest = run_ranks(later, second)
    assert sorted([row for rows in (*used, *rest) for row in rows]) == everything


def test_sharded_input_is_read_by_one_thread():
    records = ShardedInput(["a"], {"a": [1]}.get, rank=0, size=1)
    with pytest.raises(ValueError, match="num_threads=1"):
        batch(records, 2, num_threads=2)
    with pytest.raises(ValueError, match="no enqueue_many"):
        maybe_batch(records, bool, 2, enqueue_many=True)
