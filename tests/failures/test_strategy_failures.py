"""Replicas on ranks that are killed, each in an mpirun of its own."""

import re

import pytest
from victims import FAULT_TOLERANT, needs_fault_tolerance

from launcher import mpirun, written

PROGRAM = """
    import os, signal, time
    import numpy as np
    import collectives as cc
    import strategies

    comm = cc.init()
    devices = [f"/cpu:{i}" for i in range(DEVICES)]
    strategy = strategies.STRATEGY(comm=comm, devices=devices)
    w = strategy.variable(np.zeros(1000), name="w")
    optimizer = strategies.SGD(0.1)
    steps = 0

    def train_step():
        me = strategies.get_replica_context().replica_id_in_sync_group
        if steps == 3 and me == DEVICES:  # the first replica of rank 1
            time.sleep(0.5)  # others may still be in the step before, and would fail there
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.apply_gradients(optimizer, [(np.ones(1000), w)])

    try:
        while True:
            strategy.run(train_step)
            steps += 1
    except cc.PeerFailure as error:
        print(f"rank {comm.rank} knew after {steps} steps: {error}", flush=True)
"""


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("strategy", ["MirroredStrategy", "CentralStorageStrategy"])
@pytest.mark.parametrize("memory", [{}, {"UNISONO_SHARED_MEMORY": "off"}], ids=["node", "messages"])
def test_a_killed_rank_is_known_to_the_replicas_of_all_others(tmp_path, strategy, devices, memory):
    needs_fault_tolerance()
    text = PROGRAM.replace("DEVICES", str(devices)).replace("STRATEGY", strategy)
    result = mpirun(3, written(tmp_path, text), timeout=60, options=FAULT_TOLERANT, **memory)
    for rank in (0, 2):
        told = rf"rank {rank} knew after 3 steps: \w+: rank 1 .*died"
        assert re.search(told, result.stdout), result


def test_an_exception_in_one_replica_ends_the_job_with_its_traceback(tmp_path):
    text = """
        import collectives as cc
        import strategies
        strategy = strategies.MirroredStrategy(["/cpu:0", "/cpu:1"])  # of two ranks: 4 replicas
        assert strategy.num_replicas_in_sync == 4

        def bad_step():
            me = strategies.get_replica_context().replica_id_in_sync_group
            if me == 3:
                raise KeyError("on replica 3")
            strategies.get_replica_context().all_reduce("sum", 1)

        strategy.run(bad_step)
    """
    result = mpirun(2, written(tmp_path, text), timeout=60)
    assert result.status != 0
    assert "KeyError: 'on replica 3'" in result.stderr
    assert "in bad_step" in result.stderr
    assert "CollectiveTimeout" not in result.stderr
