"""Checkpoints in the background: copied first, one at a time, errors handed over."""

import errno
import gc
import os
import threading
import time

import numpy as np
import pytest
from checkpoint_samples import assert_same_bits, leftovers, steps, tensors_of

from strategies import errors
from strategies.checkpoint import checkpoint
from strategies.checkpoint.async_writer import AsyncWriter
from strategies.checkpoint.checkpoint_manager import CheckpointManager
from strategies.core import atomic_io

DEADLINE = 20  # seconds until a thread that should come has not


class Gate:
    """Holds whoever writes a manifest until it is opened."""

    def __init__(self, monkeypatch, error=None):
        self.reached, self._open, self._error = threading.Event(), threading.Event(), error
        real = atomic_io.write_file

        def write_file(path, data):
            if path.name == "manifest.json":
                self.reached.set()
                assert self._open.wait(DEADLINE)
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
            real(path, data)

        monkeypatch.setattr(atomic_io, "write_file", write_file)

    def open(self):
        self._open.set()


def full():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_program_goes_on_while_its_copy_is_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with CheckpointManager(tmp_path, background=True) as manager:
        for seed in (1, 2):
            tensors = tensors_of(seed)
            path = manager.save(tensors, step=seed)
            assert gate.reached.wait(DEADLINE)
            if seed == 1:
                assert not path.exists()
            for array in tensors.values():
                array[...] = 0
            gate.open()
        assert manager.restore_or_none().step == 2  # waits for it
    for seed in (1, 2):
        assert_same_bits(checkpoint.restore(tmp_path, step=seed).tensors, tensors_of(seed))


def test_arrays_may_change_their_shapes_between_saves(tmp_path):
    with CheckpointManager(tmp_path, background=True) as manager:
        for step in range(1, 4):
            manager.save({"w": np.full(step, step), str(step): np.ones(2)}, step=step)
        manager.wait()
        found = checkpoint.restore(tmp_path)
    assert found.tensors["w"].tolist() == [3, 3, 3]
    assert list(found.tensors) == ["w", "3"]


@pytest.mark.parametrize("call", ["save", "wait", "latest", "restore_or_none", "close"])
def test_an_error_is_raised_by_the_next_call_once(tmp_path, monkeypatch, call):
    gate = Gate(monkeypatch, full())
    gate.open()
    manager = CheckpointManager(tmp_path, background=True)
    manager.save({"w": np.ones(3)}, step=1)
    with pytest.raises(errors.ResourceExhaustedError, match="no space left.*step-000001"):
        manager.save({}, step=2) if call == "save" else getattr(manager, call)()
    assert steps(tmp_path) == []
    assert leftovers(tmp_path) == []
    manager.save({"w": np.ones(3)}, step=2)
    manager.close()
    manager.close()
    assert steps(tmp_path) == [2]


def test_what_cannot_be_saved_is_told_at_once(tmp_path):
    with CheckpointManager(tmp_path, background=True) as manager:
        with pytest.raises(errors.InvalidArgumentError, match="unsupported"):
            manager.save({"w": np.array([object()])}, step=1)
        manager.save({}, step=2)
        with (
            CheckpointManager(tmp_path, background=True) as other,
            pytest.raises(errors.FailedPreconditionError, match="another writer"),
        ):
            other.save({}, step=3)


def save_in_a_block(folder, error=None):
    with CheckpointManager(folder, background=True) as manager:
        manager.save({}, step=1)
        if error is not None:
            raise error


def test_an_error_that_ends_the_block_is_not_hidden(tmp_path, monkeypatch, caplog):
    Gate(monkeypatch, full()).open()
    with pytest.raises(KeyError, match="mine"):
        save_in_a_block(tmp_path, KeyError("mine"))
    assert "no space left" in caplog.text
    Gate(monkeypatch, full()).open()
    with pytest.raises(errors.ResourceExhaustedError):
        save_in_a_block(tmp_path)


def test_a_forgotten_manager_keeps_others_out_until_it_has_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    manager = CheckpointManager(tmp_path, background=True)
    manager.save({}, step=1)
    assert gate.reached.wait(DEADLINE)
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("unisono-checkpoint")]
    del manager
    gc.collect()
    with pytest.raises(errors.FailedPreconditionError, match="another writer"):
        CheckpointManager(tmp_path).save({}, step=2)
    gate.open()
    thread.join(DEADLINE)
    assert steps(tmp_path) == [1]


def test_a_copy_that_does_not_fit_in_memory_says_so(tmp_path, monkeypatch):
    def empty_like(array):
        raise MemoryError

    with CheckpointManager(tmp_path, background=True) as manager:
        monkeypatch.setattr(np, "empty_like", empty_like)
        with pytest.raises(errors.ResourceExhaustedError, match="24 bytes.*tensor: w.*without"):
            manager.save({"w": np.ones(3)}, step=1)
        monkeypatch.undo()
        manager.save({"w": np.ones(3)}, step=1)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("awaited", [False, True])
def test_the_work_leaves_the_core_to_the_program_unless_it_is_awaited(awaited):
    rests, done = [], threading.Event()

    def work():
        give_up = time.perf_counter() + DEADLINE
        # It is awaited at some time; then a pause is short, if this thread has a core.
        while len(rests) < 4 or (awaited and rests[-1] > 0.02 and time.perf_counter() < give_up):
            began = time.perf_counter()
            while time.perf_counter() - began < 0.01:
                pass
            ended = time.perf_counter()
            background.throttle()
            rests.append(time.perf_counter() - ended)
        done.set()

    background = AsyncWriter()
    background.start(work)
    if not awaited:
        assert done.wait(DEADLINE)
    background.finish()
    if awaited:
        assert rests[-1] < 0.02
    else:
        assert min(rests) >= 0.03


def test_a_large_array_is_written_with_rests(tmp_path, monkeypatch):
    rests = []
    monkeypatch.setattr(AsyncWriter, "throttle", lambda self: rests.append(1))
    with CheckpointManager(tmp_path, background=True) as manager:
        manager.save({"w": np.ones(3 << 20, np.uint8)}, step=1)
    assert len(rests) >= 3
    CheckpointManager(tmp_path).save({"w": np.ones(3 << 20, np.uint8)}, step=2)
    assert len(rests) == 3, "nothing rests that the program waits for"
