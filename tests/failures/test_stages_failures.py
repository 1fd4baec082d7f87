"""Pipelines whose rank is killed or stays away, each in an mpirun of its own."""

import re

import pytest
from test_peer_failure import (
    MESSAGES,
    _fault_tolerant_mpi,  # noqa: F401
    check_that_survivors_knew,
    program,
)
from victims import FAULT_TOLERANT

from launcher import mpirun
from requirements import installed

installed("torch")

PIPELINE = """
    import torch
    from strategies.model_parallel.torch import Stages

    stages = Stages([torch.nn.Linear(8, 8) for _ in range(3)], parts=4)
    x = torch.ones(8, 8)
    step = lambda: stages.step(x, x, torch.nn.functional.mse_loss)
    step()
"""


@pytest.mark.parametrize("memory", [{}, MESSAGES], ids=["shared", "messages"])
@pytest.mark.parametrize("direction", ["forward_hook", "full_backward_hook"])
def test_a_rank_killed_in_a_pass_is_known_to_its_neighbours(tmp_path, direction, memory):
    text = f"""
        if comm.rank == 1:
            stages.module.register_{direction}(lambda *_: die())
        survive(step)
    """
    job = program(tmp_path, PIPELINE, text)
    result = mpirun(3, job, options=FAULT_TOLERANT, timeout=200, **memory)
    check_that_survivors_knew(result, 3, 1, "(?:recv|isend|allgather)")


def test_a_rank_that_does_not_step_is_missing_after_the_timeout(tmp_path):
    text = """
        try:
            comm.barrier() if comm.rank == 1 else step()
        except cc.CollectiveTimeout as error:
            print(f"rank {comm.rank}: {error}", flush=True)
    """
    result = mpirun(3, program(tmp_path, PIPELINE, text), timeout=200, UNISONO_TIMEOUT="20")
    for rank, peer in ((0, 1), (2, 1)):
        told = rf"rank {rank}: recv: .*still waiting for rank {peer} to send an array"
        assert re.search(told, result.stdout), result
