"""The cluster that a step of a real Slurm is, started by srun and by mpirun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cluster import Ending, SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("machines")]

VENV = Path(sys.prefix)
JOB_SECONDS = 60.0

PROGRAM = """
import json, os, sys
import collectives as cc
import strategies

comm = cc.init() if sys.argv[1] == "mpirun" else None
resolver = strategies.cluster.SlurmClusterResolver({"ps": 1, "worker": 2}, comm=comm)
facts = [resolver.task_type, resolver.task_id, resolver.cluster_spec().as_dict()]
os.write(1, (json.dumps(facts) + "\\n").encode())
if comm is not None:
    with strategies.Cluster(resolver, comm) as cluster, strategies.Server(cluster) as server:
        if cluster.job == "ps":
            server.join(timeout=30)
"""

STARTERS = {
    "srun": "srun",
    "srun cyclic": "srun --distribution=cyclic",
    "mpirun": "mpirun --bind-to none -n $SLURM_NTASKS",
}
BLOCK = {"ps": ["n1:8888"], "worker": ["n1:8889", "n2:8888"]}
CYCLIC = {"ps": ["n1:8888"], "worker": ["n2:8888", "n1:8889"]}


@pytest.mark.parametrize("starter", STARTERS)
def test_every_task_knows_itself_and_the_others(
    slurm_cluster: SlurmCluster, tmp_path: Path, starter: str
) -> None:
    program, script = tmp_path / "program.py", tmp_path / "job.sh"
    program.write_text(PROGRAM)
    word = starter.split()[0]
    script.write_text(
        f"#!/bin/bash\nexport PATH='{VENV}/bin':$PATH\n"
        f"{STARTERS[starter]} '{VENV}/bin/python' '{program}' {word}\n"
    )
    job = slurm_cluster.submit(script, nodes=2, ntasks=3, cwd=tmp_path)
    ending = slurm_cluster.wait(job, JOB_SECONDS)
    output = slurm_cluster.output(job)
    assert ending == Ending("COMPLETED", 0), output
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    spec = CYCLIC if starter == "srun cyclic" else BLOCK
    assert sorted(lines) == [["ps", 0, spec], ["worker", 0, spec], ["worker", 1, spec]]
