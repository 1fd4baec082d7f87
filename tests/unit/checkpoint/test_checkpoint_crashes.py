"""Checkpoints when the writer dies, the disk fills up, or two want to write."""

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_samples import SHARD, assert_same_bits, leftovers, steps

from inprocess import run_ranks, world_settings
from pairwise import also
from strategies import errors
from strategies.checkpoint import Slice, checkpoint, shards
from strategies.checkpoint.checkpoint_manager import CheckpointManager
from strategies.core import atomic_io

WRITE = os.write


class FileLayer:
    """Counts the calls that change files; at call number `stop`, does `act` instead."""

    names = ("mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "chmod")

    def __init__(self, stop=None, act=None):
        self.stop, self.act, self.trace, self._lock = stop, act, [], threading.Lock()
        self.real = {name: getattr(os, name) for name in self.names}

    def _count(self, name, call, args):
        with self._lock:  # ranks may be threads
            number = len(self.trace)
            self.trace.append((name, self._subject(args[0])))
        if number == self.stop:
            self.act(call, args)

    @staticmethod
    def _subject(argument):
        if isinstance(argument, int):
            return os.readlink(f"/proc/self/fd/{argument}")
        return str(argument)

    def __enter__(self):
        tempfile.gettempdir()  # its first call in a process writes a file

        def counted(name, real):
            def call(*args, **kwargs):
                if name == "open" and not args[1] & (os.O_CREAT | os.O_TRUNC):
                    return real(*args, **kwargs)
                self._count(name, real, args)
                return real(*args, **kwargs)

            return call

        for name, real in self.real.items():
            setattr(os, name, counted(name, real))
        return self

    def __exit__(self, *exc_info):
        for name, real in self.real.items():
            setattr(os, name, real)


def die(call, args):
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(call, args):
    """Do half of a write, then die."""
    if call is WRITE:  # by ranks as threads another call may have come first
        call(args[0], args[1][: len(args[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


# name: (steps that are there, keep, step to save)
SCENES = {
    "first": ([], 5, 1),
    "next": ([1, 2, 3], 2, 4),
    "same step": ([7], 5, 7),
    "same step, several": ([6, 7], 1, 7),
    "going back": ([5, 6], 2, 2),
}


def small(seed):
    return {"w": np.full((2, 3), seed, np.float32), "b": np.full(5, seed, ml_dtypes.bfloat16)}


def set_up(directory, scene):
    old, _, _ = SCENES[scene]
    directory.mkdir(parents=True, exist_ok=True)
    for step in old:
        checkpoint.save(directory, small(step), step=step, keep=9)
    if scene == "next":  # what an earlier crash may have left
        (directory / ".tmp-step-000004").mkdir(parents=True)
        (directory / ".tmp-step-000004" / "rank-00001.safetensors").write_text("half")
        (directory / ".tmp-latest").write_text("half")


def save_new(directory, scene):
    _, keep, step = SCENES[scene]
    return checkpoint.save(directory, small(1000), step=step, keep=keep)


def save_behind(directory, scene):
    """The same in the background: what is saved may change at once."""
    _, keep, step = SCENES[scene]
    with CheckpointManager(directory, keep=keep, background=True) as manager:
        tensors = small(1000)
        path = manager.save(tensors, step=step)
        tensors["w"][:] = -1
    return path


def save_sharded(directory, scene, background=False):
    """The same by two ranks, as threads: each has a row of w, and both have b."""
    _, keep, step = SCENES[scene]

    def run(comm):
        whole = small(1000)
        row = Slice(whole["w"][comm.rank : comm.rank + 1], (comm.rank, 0), (2, 3))
        with CheckpointManager(
            directory, comm, keep=keep, sharded=True, background=background
        ) as manager:
            return manager.save({"w": row, "b": whole["b"]}, step=step)

    return run_ranks(2, run, settings=world_settings(shared=False))[0]


def save_sharded_behind(directory, scene):
    """The same in the background."""
    return save_sharded(directory, scene, background=True)


def check_after_failure(directory, scene):
    """The newest is the old or the new one, bit-exact; the next save tidies up. Gives which."""
    old, keep, step = SCENES[scene]
    if not old and checkpoint.latest(directory) is None:
        result = "old"
    else:
        found = checkpoint.restore(directory)
        result = "new" if found.tensors["w"].flat[0] == 1000 else "old"
        assert found.step == (step if result == "new" else old[-1])
        assert_same_bits(found.tensors, small(1000 if result == "new" else old[-1]))
    for other in old:
        if other > step or (result == "old" and other != step):
            assert_same_bits(checkpoint.restore(directory, step=other).tensors, small(other))
    save_new(directory, scene)
    assert_same_bits(checkpoint.restore(directory).tensors, small(1000))
    assert leftovers(directory) == []
    lower = [other for other in old if other < step]
    higher = [other for other in old if other > step]
    assert steps(directory) == [*(lower[-(keep - 1) :] if keep > 1 else []), step, *higher]
    return result


def crash_everywhere(base, save=save_new, scenes=tuple(SCENES)):
    """Save in forked children that die at each call in turn; print what was seen."""
    for scene in scenes:
        set_up(base / "count" / scene, scene)
        with FileLayer() as layer:
            save(base / "count" / scene, scene)
        results = []
        for act in (die, die_half_way):
            for stop, (name, _) in enumerate(layer.trace):
                if act is die_half_way and name != "write":
                    continue
                directory = base / f"{scene} {act.__name__} {stop}"
                set_up(directory, scene)
                child = os.fork()
                if child == 0:
                    with FileLayer(stop, act):
                        save(directory, scene)
                    os._exit(1)
                status = os.waitpid(child, 0)[1]
                assert os.WIFSIGNALED(status), (scene, act, stop, status)
                assert os.WTERMSIG(status) == signal.SIGKILL
                try:
                    results.append(check_after_failure(directory, scene))
                except BaseException:
                    print(f"{scene}: {act.__name__} at call {stop}: {layer.trace[stop]}")
                    raise
        print(json.dumps([scene, [name for name, _ in layer.trace], results]))


@pytest.mark.parametrize(
    ("save", "scenes"),
    [
        ("save_new", list(SCENES)),
        ("save_behind", ["next", "same step"]),
        ("save_sharded", ["next"]),
        ("save_sharded_behind", ["same step"]),
        also("save_sharded", [scene for scene in SCENES if scene != "next"]),
        also("save_sharded_behind", [scene for scene in SCENES if scene != "same step"]),
    ],
)
def test_killed_at_every_file_call(tmp_path, save, scenes):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), save, *scenes],
        capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert [scene for scene, _, _ in seen] == scenes
    for scene, names, results in seen:
        # Paths of Python 3.10 do not look for os.mkdir when they make a folder.
        made = {"mkdir"} if sys.version_info >= (3, 11) else set()
        assert {"open", "write", "fsync", "rename"} | made <= set(names), scene
        assert {"old", "new"} == set(results), scene
        assert results.count("old") >= 10, scene


CODES = {
    errno.ENOSPC: errors.ResourceExhaustedError,
    errno.EIO: errors.DataLossError,
    errno.EACCES: errors.FailedPreconditionError,
}


@pytest.mark.parametrize(
    ("save", "scene", "code"),
    [
        *((save_new, scene, code) for scene in SCENES for code in CODES),
        also(save_behind, "next", errno.ENOSPC),
        (save_sharded, "next", errno.ENOSPC),
        (save_sharded_behind, "same step", errno.EIO),
        *(
            also(save, scene, code)
            for save in (save_behind, save_sharded, save_sharded_behind)
            for scene, code in (("first", errno.EIO), ("same step, several", errno.ENOSPC))
        ),
    ],
)
def test_an_error_at_every_file_call(tmp_path, save, scene, code):
    """Also in the background, and of two ranks: it is raised, and the newest is a whole one."""
    set_up(tmp_path / "count", scene)
    with FileLayer() as layer:
        save(tmp_path / "count", scene)

    def fail(call, args):
        raise OSError(code, os.strerror(code), str(args[0]))

    seen = []
    for stop, (name, subject) in enumerate(layer.trace):
        directory = tmp_path / str(stop)
        set_up(directory, scene)
        before = set(os.listdir(directory)) - {".lock"} - set(leftovers(directory))
        raised = None
        with FileLayer(stop, fail):
            try:
                save(directory, scene)
            except errors.OpError as error:
                raised = error
        # Pruning after the new checkpoint is there only warns.
        seen.append(raised is not None)
        if raised is not None:
            assert isinstance(raised, CODES[code]) or save is not save_new, (name, subject)
            assert str(directory) in str(raised), (name, subject)
            assert os.strerror(code).lower() in str(raised)
        now = set(os.listdir(directory)) - {".lock"}
        rubbish = set(leftovers(directory))
        lock = ".lock" in subject or name in ("unlink", "rmdir")
        if raised is not None and not lock and save is save_new:
            assert rubbish == set(), (name, subject)
        result = check_after_failure(directory, scene)
        assert result == "new" or raised is not None
        if result == "old" and save is save_new:
            assert now - rubbish == before, (name, subject)
    assert sum(seen) >= 10


def test_the_order_of_writing_and_syncing(tmp_path):
    with FileLayer() as layer:
        path = checkpoint.save(tmp_path, {"a": np.ones(3)}, step=1)
    part = str(tmp_path / ".tmp-step-000001")
    trace = [(name, subject) for name, subject in layer.trace if ".lock" not in subject]
    named = trace.index(("rename", part))
    for file in (f"{part}/{SHARD}", f"{part}/manifest.json"):
        assert ("fsync", file) in trace[:named]
    # The list of names in the new directory is durable before the directory gets its name,
    assert trace[:named].index(("fsync", part)) > max(
        i for i, (name, subject) in enumerate(trace[:named])
        if name in ("open", "write") and subject.startswith(part)
    )  # fmt: skip
    # and that name before anything else happens.
    assert trace[named + 1] == ("fsync", str(tmp_path))
    pointer = str(tmp_path / ".tmp-latest")
    assert ("fsync", pointer) in trace[:named]
    assert trace[named + 2 :] == [("rename", pointer), ("fsync", str(tmp_path))]
    assert path.name == "step-000001"


LIMITED = """
import resource, sys
import numpy as np
from strategies import errors
from strategies.checkpoint import checkpoint
directory, limit = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    checkpoint.save(directory, {"w": np.ones(50_000)}, step=2, metadata={"text": "x" * 20_000})
except errors.ResourceExhaustedError as error:
    print(error)
else:
    print("saved")
"""


@pytest.mark.parametrize("limit", [0, 1000, 300_000, 401_000])
def test_full_disk_leaves_old_checkpoints_and_no_rubbish(tmp_path, limit):
    checkpoint.save(tmp_path, small(1), step=1)
    before = sorted(os.listdir(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(limit)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if limit > 400_400:
        assert done.stdout == "saved\n"
        return
    assert "file too large" in done.stdout
    assert SHARD in done.stdout
    assert sorted(os.listdir(tmp_path)) == before
    assert_same_bits(checkpoint.restore(tmp_path).tensors, small(1))


def test_manifest_too_large_for_the_disk(tmp_path):
    checkpoint.save(tmp_path, small(1), step=1)
    before = sorted(os.listdir(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(errors.ResourceExhaustedError, match=r"manifest\.json"):
            checkpoint.save(tmp_path, {}, step=2, metadata={"text": "x" * 20_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(os.listdir(tmp_path)) == before
    assert checkpoint.restore(tmp_path).step == 1


def test_tensors_that_do_not_fit_in_memory(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {"w": np.ones(3)}, step=1)

    def empty(*args):
        raise MemoryError

    monkeypatch.setattr(shards.np, "empty", empty)
    with pytest.raises(errors.ResourceExhaustedError, match="24 bytes.*tensor: w"):
        checkpoint.restore(tmp_path)


def test_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, small(1), step=1)

    def interrupt(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, "sync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, small(2), step=2)
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step-000001"]
    checkpoint.save(tmp_path, small(2), step=2)


HOLDER = """
import sys
from pathlib import Path
from strategies.core import atomic_io
lock = atomic_io.DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_writer_is_told_and_death_releases(tmp_path):
    checkpoint.save(tmp_path, small(1), step=1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(errors.FailedPreconditionError, match=f"process {holder.pid} on "):
            checkpoint.save(tmp_path, small(2), step=2)
        assert checkpoint.restore(tmp_path).step == 1  # reading needs no lock
    finally:
        holder.kill()
        holder.communicate(timeout=30)
    checkpoint.save(tmp_path, small(2), step=2)


def test_locks_of_one_process_exclude_each_other_and_close_twice(tmp_path):
    first = atomic_io.DirectoryLock(tmp_path)
    with pytest.raises(errors.FailedPreconditionError, match=f"process {os.getpid()}"):
        atomic_io.DirectoryLock(tmp_path)
    first.close()
    first.close()
    with atomic_io.DirectoryLock(tmp_path):
        pass
    with contextlib.closing(atomic_io.DirectoryLock(tmp_path)):
        pass


def test_a_lock_that_outlives_the_modules_is_silent(tmp_path):
    text = (
        "import os, sys, pathlib; from strategies.core import atomic_io; "
        "os.kept = atomic_io.DirectoryLock(pathlib.Path(sys.argv[1]))"
    )
    for _ in range(2):  # the kernel releases it
        result = subprocess.run(
            [sys.executable, "-c", text, str(tmp_path)], capture_output=True, text=True, timeout=60
        )
        assert (result.returncode, result.stderr) == (0, "")


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch, caplog):
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(atomic_io.fcntl, "flock", flock)
    checkpoint.save(tmp_path, small(1), step=1)
    assert checkpoint.restore(tmp_path).step == 1
    assert "no locks" in caplog.text


if __name__ == "__main__":
    crash_everywhere(Path(sys.argv[1]), globals()[sys.argv[2]], sys.argv[3:])
