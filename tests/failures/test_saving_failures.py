"""A rank is killed while all write a checkpoint: the one before holds, and the next is written."""

import numpy as np
import pytest

import strategies
from launcher import mpirun, written
from pairwise import also

PROGRAM = """
import os, signal, sys
import numpy as np
import collectives as cc, strategies
from strategies.checkpoint import Slice

folder, victim, call, behind = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
comm = cc.init()


def rows(seed):
    own = np.full((2, 4), 10 * seed + comm.rank)
    return {"table": Slice(own, (2 * comm.rank, 0), (2 * comm.size, 4)), "all": np.full(3, seed)}


def die(*args):
    print(f"rank {comm.rank} dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


with strategies.CheckpointManager(folder, comm, sharded=True, background=behind) as manager:
    manager.save(rows(1), step=1)
    manager.wait()
    if comm.rank == victim:
        setattr(os, call, die)
    manager.save(rows(2), step=2)
"""


@pytest.mark.parametrize(
    ("victim", "call", "background"),
    [
        (1, "write", False),
        (0, "rename", True),
        also(1, "write", True),
        also(1, "fsync", False),
        also(1, "fsync", True),
        also(0, "fsync", False),
        also(0, "fsync", True),
        also(0, "rename", False),
    ],
)
def test_the_last_checkpoint_holds_and_the_next_is_written(tmp_path, victim, call, background):
    program, folder = written(tmp_path, PROGRAM), tmp_path / "run"
    result = mpirun(3, program, folder, victim, call, background, timeout=60)
    assert result.status != 0
    assert f"rank {victim} dies" in result.stdout
    with strategies.CheckpointManager(folder) as manager:
        found = manager.restore_or_none()
        assert found.step == 1
        assert found.tensors["table"].tolist() == [[10 + rank] * 4 for rank in (0, 0, 1, 1, 2, 2)]
        assert found.tensors["all"].tolist() == [1, 1, 1]
        manager.save({"all": np.zeros(3)}, step=2)
        assert manager.restore_or_none().step == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "latest", "step-000001", "step-000002",
    ]  # fmt: skip
