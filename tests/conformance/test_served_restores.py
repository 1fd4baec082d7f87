"""Restores of checkpoints by ps tasks, each of which reads its parts from the files."""

import os
import shutil
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from calls import folder_of

import strategies
from served import opened, training
from strategies.checkpoint import Saver, checkpoint
from strategies.errors import (
    CancelledError,
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from strategies.parameter_server import ParameterServerStrategy, restore_server
from strategies.parameter_server.server import PARAMETERS
from strategies.session import TrainingSession

VARIABLES = {
    "table": np.zeros((7, 2), np.float32),
    "rows": np.zeros((5, 3)),
    "half": np.zeros(4, np.float16),
    "brain": np.zeros((3, 2), ml_dtypes.bfloat16),
    "one": np.zeros((1, 2)),
    "scalar": np.zeros(()),
}


def made(server, *, parts, optimizer=None, variables=VARIABLES, **options):
    """A strategy with variables of several shapes and dtypes; workers have no copy of "rows"."""
    strategy = ParameterServerStrategy(
        server,
        optimizer or strategies.SGD(0.5),
        partitioner=lambda shape, dtype: [min(parts, shape[0])] + [1] * (len(shape) - 1),
        **options,
    )
    for name, value in variables.items():
        strategy.variable(value, name=name, resident=name != "rows")
    return strategy


def push(strategy, size=1.0):
    pairs = []
    for variable in strategy.variables.values():
        gradient = size * np.arange(1, 1 + np.prod(variable.shape)).reshape(variable.shape)
        if variable.name == "rows":
            gradient = strategies.Rows([3, 1], gradient[:2].astype(variable.dtype))
        else:
            gradient = gradient.astype(variable.dtype)
        pairs.append((gradient, variable))
    strategy.apply_gradients(strategy.optimizer, pairs)


def manager(folder, sharded=True):
    return strategies.CheckpointManager(folder, sharded=sharded)


def saved(comm, folder, *, ps, sharded, **options):
    """Train and save on a number of ps tasks."""
    with opened(comm, ps=min(ps, comm.size - 1)) as server:
        strategy = made(server, **options)
        if strategy.is_chief:
            for size in (1.0, 3.0):
                push(strategy, size)
            with manager(folder, sharded) as checkpoints:
                Saver(checkpoints, model=strategy, epoch=3).save(7)


def bits(arrays):
    return {name: (x.dtype.name, x.shape, x.tobytes()) for name, x in arrays.items()}


def restored(comm, folder, *, ps, sharded, **options):
    """Restore on a number of ps tasks; the chief returns all that can be seen of it."""
    with opened(comm, ps=min(ps, comm.size - 1)) as server:
        strategy = made(server, **options)
        if not training(server):
            return None
        if strategy.is_chief:
            push(strategy, 9.0)
            with manager(folder, sharded) as checkpoints:
                saver = Saver(checkpoints, model=strategy, epoch=0)
                strategy.state_dict = None  # restoring gathers nothing
                assert (saver.restore(), saver["epoch"]) == (7, 3)
                del strategy.state_dict
        server.cluster.workers.barrier()
        strategy.pull()
        values = {v.name: v.value for v in strategy.variables.values() if v.resident}
        seen = [bits(values)]
        server.cluster.workers.barrier()
        if strategy.is_chief:
            seen += [bits(strategy.state_dict()), strategy.reports()]
            push(strategy)  # slots and steps go on
            seen += [bits(strategy.state_dict()), strategy.reports(), strategy.last_push]
        server.cluster.workers.barrier()
        return seen


@pytest.mark.several
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("before", [(1, 1), (1, 3), (2, 2), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("now", [(1, 1), (1, 2), (2, 1), (2, 3), (3, 3)])
@pytest.mark.parametrize("optimizer", [strategies.SGD(0.5), strategies.Adam(0.1)])
def test_ps_tasks_restore_what_the_chief_would_send(comm, sharded, before, now, optimizer):
    folder = folder_of(comm)
    saved(comm, folder, ps=before[0], parts=before[1], sharded=sharded, optimizer=optimizer)
    comm.barrier()
    options = {"ps": now[0], "parts": now[1], "optimizer": optimizer}
    by_parts, whole = (restored(comm, folder, sharded=way, **options) for way in (True, False))
    assert by_parts == whole
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


def test_the_chief_reads_only_counts_and_scalars(world, monkeypatch):
    real, asked = checkpoint.read_boxes, []

    def read_boxes(path, plan, boxes):
        asked.extend(boxes)
        return real(path, plan, boxes)

    def run(comm):
        if comm.size == 1:
            return
        folder = folder_of(comm)
        saved(comm, folder, ps=2, parts=2, sharded=False)
        comm.barrier()
        restored(comm, folder, ps=2, parts=2, sharded=True)
        if comm.rank == min(2, comm.size - 1):  # the chief
            counts = {f"model/optimizer/step/{name}" for name in VARIABLES}
            assert set(asked) == {*counts, "model/updates", "model/variable/scalar"}

    monkeypatch.setattr(checkpoint, "read_boxes", read_boxes)
    world.run(run)


def damaged(folder, monkeypatch):
    # An element of "table" in the last file, which the last ps alone reads.
    file = max(Path(folder).glob("step-000007/ps-*"))
    data = file.read_bytes()
    value = np.float32(-2 * 14).tobytes()
    assert value in data
    file.write_bytes(data.replace(value, np.float32(5).tobytes(), 1))


def cut(folder, monkeypatch):
    file = max(Path(folder).glob("step-000007/ps-*"))
    file.write_bytes(file.read_bytes()[:-1])


def missing(folder, monkeypatch):
    max(Path(folder).glob("step-000007/ps-*")).unlink()


def elsewhere(folder, monkeypatch):
    monkeypatch.setattr(restore_server, "resolve", lambda place: Path(place) / "absent")


def another(folder, monkeypatch):
    # As on a machine with a directory of its own.
    shutil.copytree(folder, f"{folder}-own")
    file = Path(f"{folder}-own/step-000007/manifest.json")
    with manager(f"{folder}-own") as checkpoints:
        checkpoints.save({"other": np.ones(2)}, step=7)
    assert file.exists()
    own = Path(f"{folder}-own/step-000007")
    monkeypatch.setattr(restore_server, "resolve", lambda place: own)


# Damage; the error, a text in it, and whether a ps finds it.
DAMAGES = [
    (damaged, DataLossError, "checksum differs", True),
    (cut, DataLossError, "wrong length", False),
    (missing, NotFoundError, "ps-00001", False),
    (elsewhere, NotFoundError, "absent", True),
    (another, FailedPreconditionError, "sees another checkpoint than the chief", True),
]


@pytest.mark.parametrize(("damage", "kind", "text", "on_ps"), DAMAGES)
def test_a_part_that_a_ps_cannot_read_leaves_all_variables_as_they_were(
    world, damage, kind, text, on_ps, monkeypatch
):
    def run(comm):
        if comm.size < 3:
            return
        folder = folder_of(comm)
        saved(comm, folder, ps=2, parts=2, sharded=True)
        comm.barrier()
        if comm.rank == 0:
            damage(folder, monkeypatch)
        comm.barrier()
        with opened(comm, ps=2) as server:
            strategy = made(server, parts=2)
            if strategy.is_chief:
                push(strategy)
                before = bits(strategy.state_dict())
                with manager(folder) as checkpoints:
                    saver = Saver(checkpoints, model=strategy, epoch=0)
                    with pytest.raises(kind, match=text) as caught:
                        saver.restore(Path(folder) / "step-000007")
                    assert ("(/job:ps/task:" in str(caught.value)) == on_ps
                    assert str(caught.value).startswith("restore: ")
                    assert saver["epoch"] == 0
                assert bits(strategy.state_dict()) == before
                push(strategy)  # and training continues
        comm.barrier()
        monkeypatch.undo()
        for place in {folder, f"{folder}-own"} if comm.rank == 0 else ():
            shutil.rmtree(place, ignore_errors=True)

    world.run(run)


# Options of the program that restores; a text in the error.
OTHERS = [
    ({"variables": {**VARIABLES, "more": np.zeros(2)}}, "has no 'variable/more'"),
    ({"variables": {"table": VARIABLES["table"]}}, "unknown names.*'variable/brain'"),
    ({"variables": {**VARIABLES, "table": np.zeros((2, 7))}}, r"expected float64 of shape \(2, 7"),
    ({"variables": {**VARIABLES, "half": np.zeros(4)}}, r"got float16 of shape \(4,\)"),
    ({"optimizer": strategies.Momentum(0.1, 0.9)}, "has no 'optimizer/momentum/table'"),
]


@pytest.mark.several
@pytest.mark.parametrize(("options", "text"), OTHERS)
def test_a_state_of_another_program_is_the_same_error_in_both_ways(comm, options, text):
    folder = folder_of(comm)
    saved(comm, folder, ps=2, parts=2, sharded=True)
    comm.barrier()
    with opened(comm) as server:
        strategy = made(server, parts=2, **options)
        if strategy.is_chief:
            before = bits(strategy.state_dict())
            errors = []
            for sharded in (True, False):
                with manager(folder, sharded) as checkpoints:
                    with pytest.raises(ValueError, match=text) as caught:
                        Saver(checkpoints, model=strategy).restore()
                    errors.append(str(caught.value))
            assert errors[0] == errors[1]
            assert bits(strategy.state_dict()) == before


@pytest.mark.several
def test_a_mismatch_of_another_object_is_found_before_the_ps_tasks_read(comm):
    folder = folder_of(comm)
    saved(comm, folder, ps=2, parts=2, sharded=True)
    comm.barrier()
    with opened(comm) as server:
        strategy = made(server, parts=2)
        if strategy.is_chief:
            with manager(folder) as checkpoints:
                for wrong in ({"epoch": strategy}, {"model": 3}, {"model": [strategy]}):
                    with pytest.raises(InvalidArgumentError, match="checkpoint and program differ"):
                        Saver(checkpoints, **wrong).restore()
                with pytest.raises(NotFoundError, match="does not hold 'net'"):
                    Saver(checkpoints, net=strategy, epoch=0).restore()
            assert {float(n) for v in strategy.variables.values() if v.resident
                    for n in v.value.flat} == {0.0}  # fmt: skip
            push(strategy)


@pytest.mark.several
@pytest.mark.parametrize("wrap", [lambda x: {"net": x, "step": 1}, lambda x: [1, (x,)]])
def test_a_strategy_in_a_container_is_written_and_read_by_its_ps_tasks(comm, wrap):
    folder = folder_of(comm)
    with opened(comm) as server:
        strategy = made(server, parts=2)
        if not strategy.is_chief:
            return
        push(strategy)
        before = bits(strategy.state_dict())
        model = wrap(strategy)
        with manager(folder) as checkpoints:
            more = np.arange(3.0)  # its name is like that of a part of the model
            saver = Saver(checkpoints, model=model, **{"model/more": more}, epoch=3)
            saver.save(1)
            more[:] = 7
            found = checkpoints.latest()
            servers = len(server.cluster.ranks_of("ps"))
            assert len(list(found.glob("ps-*"))) == servers
            push(strategy)
            strategy.load_state_dict = None  # the ps tasks read
            assert saver.restore() == 1
            assert (saver["model"], more.tolist()) == (model, [0, 1, 2])
        assert bits(strategy.state_dict()) == before
        shutil.rmtree(folder)


@pytest.mark.several
def test_a_restore_waits_for_no_gradients(comm):
    folder = folder_of(comm)
    with opened(comm) as server:
        strategy = made(server, parts=2)
        workers = server.cluster.workers
        if workers is None:
            with pytest.raises(FailedPreconditionError, match="a ps task serves others"):
                strategy.remote_restore()
            return
        if strategy.is_chief:
            with manager(folder) as checkpoints:
                saver = Saver(checkpoints, model=strategy)
                assert saver.restore() is None  # without a checkpoint
                saver.save(1)
                restores = [partial(saver.restore), partial(saver.restore, checkpoints.latest())]
                for restore in restores:
                    push(strategy)
                    assert restore() == 1
                    assert strategy.variables["scalar"].value == 0
            assert os.listdir(folder)
            shutil.rmtree(folder)
        workers.barrier()


def test_a_session_raises_the_error_of_a_ps_on_all_workers(world, monkeypatch):
    def run(comm):
        if comm.size < 3:
            return
        folder = folder_of(comm)
        saved(comm, folder, ps=2, parts=2, sharded=True)
        comm.barrier()
        if comm.rank == 0:
            damaged(folder, monkeypatch)
        comm.barrier()
        with opened(comm, ps=2) as server:
            strategy = made(server, parts=2)
            if training(server):
                with manager(folder) as checkpoints:
                    saver = Saver(checkpoints, model=strategy, epoch=0)
                    with (
                        pytest.raises(DataLossError, match=r"checksum.*\(/job:ps/task:1\)"),
                        TrainingSession(saver, server.cluster.workers, in_step=False),
                    ):
                        pass
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)

    world.run(run)


@pytest.mark.several
def test_a_restore_that_has_ended_loads_nothing(comm):
    with opened(comm) as server:
        strategy = made(server, parts=2)
        if not strategy.is_chief:
            return
        before = bits(strategy.state_dict())
        task = server.cluster.ranks_of("ps")[0]
        place, _ = strategy.service.open(PARAMETERS, {}, name=strategy.shared_name, task=task)
        told = {"restore": 0, "change": 1}
        strategy.service.disown(strategy.service.start(place, "restore", lambda answer: None, told))
        for operation in ("restore_read", "load"):
            with pytest.raises(CancelledError, match="restore: it has ended"):
                strategy.service.request(place, operation, told)
        assert bits(strategy.state_dict()) == before
