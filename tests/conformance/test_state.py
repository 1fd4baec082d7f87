"""Commits in memory: what is given back, on all ranks."""

import random
import tempfile

import numpy as np
import pytest

import collectives as cc
import strategies
from strategies import errors
from strategies.checkpoint import Saver
from strategies.checkpoint.boxes import Slice
from strategies.elastic import State
from strategies.input import ShardedInput
from strategies.session import TrainingSession, hooks


def test_everything_comes_back_as_it_was_at_the_last_commit(comm):
    weights = {"w": np.arange(6.0).reshape(2, 3), "b": np.zeros(0, np.float32)}
    variable = strategies.Variable([1.0, 2.0], name="v")
    optimizer = strategies.Momentum(0.1, 0.9)
    rng, other = np.random.default_rng(comm.rank), random.Random(comm.rank)
    state = State(
        comm, weights=weights, v=variable, optimizer=optimizer, rng=rng, other=other,
        step=0, words=["a", {"b": 1.5}],
    )  # fmt: skip
    assert state.number == -1
    with pytest.raises(errors.FailedPreconditionError, match="expected a commit before"):
        state.restore()
    for step in range(3):
        optimizer.apply_gradients([(np.ones((2, 3)), weights["w"])])
        state.commit(step=step + 1)
    kept = weights["w"].copy()
    slots = {name: np.array(x) for name, x in optimizer.state_dict().items()}
    numbers, others = rng.random(4), other.random()
    optimizer.apply_gradients([(np.ones((2, 3)), weights["w"])])
    variable.assign([7, 7])
    for _ in range(2):  # as often as one likes
        state.restore()
        assert state.number == 2
        assert state["step"] == 3
        assert state["words"] == ["a", {"b": 1.5}]
        assert (weights["w"] == kept).all()
        assert variable.value.tolist() == [1, 2]
        again = optimizer.state_dict()
        assert all(np.array_equal(again[name], slots[name]) for name in slots)
        assert (rng.random(4) == numbers).all()
        assert other.random() == others
        weights["w"] += 1  # changes nothing of what is kept


def test_a_session_commits_and_begins_where_the_state_is_else_at_the_newest_checkpoint(comm):
    """The second session is what `train` opens again after a death, the third another job."""
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    weights = np.zeros(3)
    state = State(comm, w=weights, key=0, step=0)

    def train(state, last, *, fails_at=None):
        def train_step():
            weights[:] += 1
            if session.step == fails_at:
                raise errors.AbortedError("once")
            session.update(key=session["key"] + 2)

        manager = strategies.CheckpointManager(folder, comm)
        saver = Saver(manager, w=weights, key=0)
        around = [hooks.StopAtStep(last)]
        with (
            manager,
            TrainingSession(
                saver, state=state, commit_steps=3, save_steps=5, hooks=around, retries=0
            ) as session,
        ):
            begun = session.step, session["key"], float(weights[0])
            while not session.should_stop():
                session.run(train_step)
        return begun

    with pytest.raises(errors.AbortedError):
        train(state, 20, fails_at=7)
    assert weights[0] == 8
    assert (state["step"], state["key"]) == (6, 12)
    state.resume(comm)
    assert train(state, 9) == (6, 12, 6)
    assert (state["step"], state["key"]) == (9, 18)
    with strategies.CheckpointManager(folder, comm) as manager:
        assert manager.restore_or_none().step == 9

    weights[:] = 0
    other = State(comm, w=weights, key=0, step=0)
    other.commit()  # as run_elastic does
    assert train(other, 9) == (9, 18, 9)
    assert (other["step"], other["key"]) == (9, 18)


def test_a_rank_without_a_commit_is_given_one_with_the_place_of_another(comm):
    """As after a death: the others keep their rows and generators, whatever each had used."""

    def things(rank, size):
        rng, other = np.random.default_rng(rank), random.Random(rank)
        rows = ShardedInput(range(40), lambda row: [row], rank=rank, size=size, policy="file")
        return {"rows": rows, "mixed": {"w": np.zeros((), np.float16), "rng": rng}, "o": other}

    own = things(comm.rank, comm.size)
    state = State(comm, **own, words=[], step=0)
    state.for_others = True
    own["mixed"]["w"][...] = 1.5
    own["mixed"]["rng"].random(comm.rank), own["o"].random()
    used = [next(own["rows"]) for _ in range(comm.rank % 3)]
    state.commit(words=["a", {"b": 1.5}], step=3)
    if comm.rank == comm.size - 1 and comm.size > 1:  # another process, in its place
        given = things(0, 1)
        state = State(comm, **given, words=None, step=0)
        state.resume(comm, {comm.size - 1: comm.size - 1})
    else:
        given = own
        state.resume(comm, {comm.size - 1: comm.size - 1} if comm.size > 1 else None)
    assert state.number == 0
    assert (state["step"], state["words"]) == (3, ["a", {"b": 1.5}])
    expected = things(comm.rank, comm.size)
    expected["mixed"]["rng"].random(comm.rank), expected["o"].random()
    assert given["mixed"]["w"] == 1.5
    assert given["mixed"]["rng"].random() == expected["mixed"]["rng"].random()
    assert given["o"].random() == expected["o"].random()
    assert used + list(given["rows"]) == list(expected["rows"])


def test_a_session_goes_back_to_the_last_commit_after_an_error_that_passes(comm):
    weights, made = np.zeros(3), []
    state = State(comm, w=weights, step=0)
    with TrainingSession(
        state=state, commit_steps=4, hooks=[hooks.StopAtStep(10)], save_steps=None
    ) as session:

        def train_step():
            weights[:] += 1
            made.append(session.step)
            if made.count(6) == 1 and session.step == 6 and comm.rank == comm.size - 1:
                raise errors.UnavailableError("for a moment")

        while not session.should_stop():
            session.run(train_step)
    assert made == [*range(7), *range(4, 10)]
    assert weights.tolist() == [10] * 3
    assert state["step"] == 10


def test_a_session_wants_a_state_of_its_own_ranks_with_a_step(comm):
    told = "expected a state of the ranks that train in step that contains step"
    with pytest.raises(ValueError, match=told):
        TrainingSession(state=State(comm, w=np.zeros(1)))
    state, other = State(comm, step=0), comm.split(0)
    with pytest.raises(ValueError, match=told):
        TrainingSession(comm=other, state=state)
    with pytest.raises(ValueError, match=told):
        TrainingSession(state=state, in_step=False)
    other.close()


@pytest.mark.parametrize("nested", [False, True])
def test_a_pipeline_is_refused_with_the_way_that_works(nested):
    with strategies.input.batch(ShardedInput([1], lambda row: [row], rank=0, size=1), 1) as batches:
        thing = {"a": [batches]} if nested else batches
        name = "input/a/0" if nested else "input"
        told = rf"commit\(input=batches.state\(comm\)\).*resume.* got a pipeline \(name: {name}\)"
        with pytest.raises(ValueError, match=f"State: .*{told}"):
            State(input=thing)
        state = State(input=None)
        with pytest.raises(errors.InvalidArgumentError, match=f"commit: .*{told}"):
            state.commit(input=thing)
        state.commit(input=batches.state())
        state.restore()
        assert state["input"] == batches.state()


def test_fewer_ranks_go_on_and_no_row_is_lost_or_repeated(comm):
    files = range(23)
    rows = ShardedInput(
        files, lambda row: (row,), rank=comm.rank, size=comm.size, policy="file", seed=3
    )
    rng = np.random.default_rng(comm.rank)
    state = State(comm, rows=rows, rng=rng, step=0)
    used = [next(rows) for _ in range(2)]
    state.commit(step=1)
    expected = rng.random()
    rng.random()
    lost = [next(rows, None)]  # after the commit: comes again
    fewer = comm.split(0 if comm.rank < max(1, comm.size - 1) else None)
    if fewer is not None:
        state.resume(fewer)
        assert state.comm is fewer
        assert state["step"] == 1
        assert rng.random() == expected  # each rank keeps its own
        used += list(rows)
        state.commit(step=2)
        fewer.close()
    everything = sorted(row for rank in comm.allgather_object(used) for row in rank)
    assert everything == list(files), (everything, lost)


def test_who_had_not_heard_of_the_last_commit_goes_back_to_it_too(comm):
    weights = np.zeros(3)
    state = State(comm, weights=weights, step=0)
    state.commit()
    weights += 1
    state.commit(step=1)
    weights += 1
    broken = comm.barrier

    def barrier(*args, **kwargs):
        broken(*args, **kwargs)
        if comm.rank == comm.size - 1 and comm.size > 1:
            raise cc.PeerFailure("as if another rank had died right after")

    comm.barrier = barrier
    try:
        state.commit(step=2)
    except cc.PeerFailure:
        assert state.number == 1
    del comm.barrier
    weights += 1
    state.resume(comm)
    assert state.number == 2
    assert weights.tolist() == [2, 2, 2]
    assert state["step"] == 2


def test_an_error_of_one_rank_is_one_of_all_and_the_last_commit_stays(comm):
    state = State(comm, weights=np.zeros(3), step=0)
    state.commit(step=1)
    bad = {"step": object()} if comm.rank == comm.size - 1 else {"step": 2}
    with pytest.raises(errors.InvalidArgumentError, match="unsupported object"):
        state.commit(**bad)
    with pytest.raises(errors.InvalidArgumentError, match="unknown epoch, expected"):
        state.commit(epoch=2)
    state["weights"][:] = 5
    state.restore()
    assert state["weights"].tolist() == [0, 0, 0]
    assert state["step"] == 1
    state.commit(step=2)


def test_a_bit_that_has_changed_on_one_rank_is_found(comm):
    weights, rng = {"w": np.ones(1000), "b": np.ones(3)}, np.random.default_rng(comm.rank)
    state = State(comm, weights=weights, rng=rng)
    state.commit(verify=True)
    if comm.size == 1:
        return
    if comm.rank == comm.size - 1:
        weights["w"].view(np.uint8)[77] ^= 4
    with pytest.raises(cc.MismatchError, match=r"commit: ranks differ, weights/w: checksum"):
        state.commit(verify=True)
    state.restore()
    assert (weights["w"] == 1).all()
    state.commit(verify=True)


def test_what_this_rank_has_a_part_of_is_an_error(comm):
    part = Slice(np.ones(2), (2 * comm.rank,), (2 * comm.size,))
    words = r"would be lost with that rank, .*, got a part \(name: model/w\)"
    with pytest.raises(ValueError, match=f"State: .*{words}"):
        State(comm, model={"w": part})
    state = State(comm, model={"w": np.ones(2)})
    state.commit()
    with pytest.raises(errors.InvalidArgumentError, match=f"commit: .*{words}"):
        state.commit(model={"w": part})
    state.restore()
    assert state["model"]["w"].tolist() == [1, 1]
    state.commit(model={"w": np.zeros(2)})


def test_what_cannot_be_kept_is_an_error():
    for things in ({}, {"verify": 1}):
        with pytest.raises(ValueError, match="State: expected things by name"):
            State(None, **things)
