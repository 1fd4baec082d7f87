"""`python -m strategies submit`: writes and submits a batch script for Slurm.

The script does the same as `slurm/train.sbatch`, without a checkout: it starts the ranks by
`mpirun` or `srun`, forwards signals to them, and requeues the job if they exit with status 85.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strategies import errors
from strategies.core.validation import integer

__all__ = ["Job", "script_of", "submit"]

# Slurm's formats: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]].
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)

_HEAD = """\
#!/usr/bin/env bash
# {title}, written by `python -m strategies submit`
# nodes x ranks x GPUs: {nodes} x {ranks} x {gpus}; `module load` what the site needs below
#
{options}
set -euo pipefail

name=submit
fail() {{
    printf '%s: %s\\n' "$name" "$*" >&2
    exit 2
}}

: "${{SLURM_JOB_ID:?submit: no job here, submit this file with sbatch}}"
cd "$SLURM_SUBMIT_DIR"
python={python}
program={program}
[[ -x $python ]] || fail "no Python at '$python' on this node"
[[ -f $program ]] || fail "no program at '$program' on this node"
launcher={launcher}
read -ra launcher <<<"${{UNISONO_LAUNCHER:-$launcher}}"
[[ ${{launcher[0]}} != mpirun ]] || launcher[0]={mpirun} ||
    fail "no mpirun on PATH. Load the MPI module before sbatch, or above"
read -ra options <<<"${{UNISONO_MPIRUN_OPTIONS:-{mpirun_options}}}"
export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"

arguments=({arguments})
again=({again})
if ((${{SLURM_RESTART_COUNT:-0}} > 0)) && [[ " ${{arguments[*]-}} " != *" ${{again[0]-}} "* ]]; then
    arguments+=(${{again[@]+"${{again[@]}}"}})
fi

"""

# The end of slurm/train.sbatch, verbatim (tests/unit/cluster/test_slurm_submission.py).
_BODY = """\
[[ -z ${SLURM_HET_SIZE:-} || ${launcher[*]} == *" --het-group="* ]] ||
    fail "ranks would start in the first of $SLURM_HET_SIZE parts of this job, expected" \\
        "UNISONO_LAUNCHER='srun --mpi=pmix --het-group=0,1', got '${launcher[*]}'"

# Slurm sends SIGTERM to a preempted job, on all nodes but this one. The ranks there receive it as
# well, but a daemon of Open MPI that receives it would end the job, with status 0. mpirun starts
# ranks with no signal blocked.
if env --block-signal=TERM true 2>/dev/null; then
    export PRTE_MCA_prte_launch_agent="${PRTE_MCA_prte_launch_agent:-env --block-signal=TERM prted}"
fi
preempted() { [[ $(scontrol --oneliner show job "$SLURM_JOB_ID") == *" PreemptTime="[0-9]* ]]; }

printf '%s: job %s, nodes %s (%s), ranks %s, launcher %s, program %s%s\\n' "$name" \\
    "$SLURM_JOB_ID" "$SLURM_JOB_NUM_NODES" "$SLURM_JOB_NODELIST" "$SLURM_NTASKS" \\
    "${launcher[*]}" "$program" "${SLURM_RESTART_COUNT:+, restart $SLURM_RESTART_COUNT}"

# --gpus and --gpus-per-task count the GPUs of the job or of a rank. The daemon of mpirun on another
# node is a step of one task, which would inherit these counts; a rank of srun would see its own GPU
# only. With --export=NONE neither would inherit this environment.
unset SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU
export SLURM_EXPORT_ENV=ALL
if [[ ${launcher[0]##*/} == srun ]]; then
    # A rank that fails ends the others, as with mpirun. srun since 22.05 reads SRUN_CPUS_PER_TASK,
    # and no longer SLURM_CPUS_PER_TASK.
    export SLURM_KILL_BAD_EXIT="${SLURM_KILL_BAD_EXIT:-1}" SRUN_CPUS_PER_TASK="$OMP_NUM_THREADS"
    ((${#options[@]} == 0)) ||
        fail "UNISONO_MPIRUN_OPTIONS is for mpirun, expected options of srun in UNISONO_LAUNCHER"
else
    [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || export SLURM_GPUS_PER_NODE="$SLURM_GPUS_ON_NODE"
    # The ranks are bound to no core: Slurm confines the job, and mpirun would count cores of the
    # machine that are not the job's.
    [[ "${launcher[*]} ${options[*]-}" =~ -bind-to|[Pp][Ee]= ]] || launcher+=(--bind-to none)
    options+=(-n "$SLURM_NTASKS")
fi

# Slurm sends its other signals to this shell alone. The launcher hands them on to every rank: USR1
# asks the ranks to stop, USR2 for flight records. A trap ends the `wait` that it interrupts, hence
# the loop below.
step=
signalled=0
asked=0
hand_on() {
    signalled=1
    [[ -z $step ]] || kill -"$1" "$step" || true
}
trap 'asked=1; hand_on USR1' USR1
trap 'hand_on USR2' USR2

# "+": for bash before 4.4 an empty array is an unset one.
"${launcher[@]}" ${options[@]+"${options[@]}"} "$python" "$program" \\
    ${arguments[@]+"${arguments[@]}"} &
step=$!

while true; do
    signalled=0
    status=0
    wait "$step" || status=$?
    ((signalled)) || break
done

# 85: the program stopped because it was asked to, and left a checkpoint to go on from.
if ((status == 85)) && { ((asked)) || preempted; }; then
    printf '%s: job %s stopped on request, back to the queue\\n' "$name" "$SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclass(frozen=True)
class Job:
    """A job to submit.

    Attributes:
        program: a Python file; the job runs in the directory of its submission.
        arguments: arguments of the program.
        nodes: number of nodes.
        ranks_per_node: number of ranks per node.
        gpus_per_node: number of GPUs per node, one rank for each.
        cpus_per_rank: cores, and threads of numerical libraries.
        time: limit in Slurm's format, such as "04:00:00"; None for the partition's.
        warning: seconds before the limit at which the ranks are asked to stop.
        again: further arguments of a requeued job, unless it has the first of them already.
        elastic: whether the surviving ranks resume when ranks die: `mpirun --with-ft ulfm`.
        launcher: command that starts the ranks: "mpirun", or "srun --mpi=pmix" with its options.
        options: further options of sbatch, such as "--partition=long".
    """

    program: Path
    arguments: Sequence[str] = ()
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    time: str | None = None
    warning: int = 120
    again: Sequence[str] = ("--resume",)
    options: Sequence[str] = ()
    elastic: bool = False
    launcher: str = "mpirun"


def script_of(job: Job) -> str:
    """Return the batch script of a job.

    Raises:
        InvalidArgumentError: the program is not a file, GPUs and ranks differ in number, or the
            launcher is invalid or cannot start an elastic job.
        ValueError: a number is not positive, or an option is invalid.
    """
    for name in ("nodes", "ranks_per_node", "cpus_per_rank", "warning"):
        integer("submit", name.replace("_", "-"), getattr(job, name))
    integer("submit", "gpus-per-node", job.gpus_per_node, least=0)
    if not job.program.is_file():
        raise errors.InvalidArgumentError(f"submit: no program, expected a file, got {job.program}")
    if job.gpus_per_node not in (0, job.ranks_per_node):
        raise errors.InvalidArgumentError(
            "submit: expected --gpus-per-node 0 or equal to --ranks-per-node, got "
            f"{job.gpus_per_node} and {job.ranks_per_node}"
        )
    starter = Path((job.launcher.split() or [""])[0]).name
    if starter not in ("mpirun", "mpiexec", "srun") or "\n" in job.launcher:
        raise errors.InvalidArgumentError(
            f"submit: expected --launcher mpirun or srun, and its options, got {job.launcher!r}"
        )
    if job.elastic and starter == "srun":
        raise errors.InvalidArgumentError(
            "submit: expected --launcher mpirun with --elastic, got srun"
        )
    options = {
        "job-name": re.sub(r"[^\w.-]", "-", job.program.stem),
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "cpus-per-task": job.cpus_per_rank,
        # A requeued job keeps its number, so it appends to the same file.
        "output": "%x-%j.out",
        "open-mode": "append",
        # To the batch shell alone, whose trap forwards it to mpirun.
        "signal": f"B:USR1@{job.warning}",
    }
    lines = [f"--{name}={value}" for name, value in options.items()] + ["--requeue"]
    lines += [f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []
    if job.time is not None and not _TIME.fullmatch(job.time):
        raise ValueError(
            "submit: bad --time, expected minutes or [days-]hours:minutes:seconds, got "
            f"{job.time!r}"
        )
    lines += [f"--time={job.time}"] if job.time else []
    for option in job.options:
        # A line break would end the directive, and the rest would run as a command.
        if not option.startswith("--") or "\n" in option:
            raise ValueError(
                f"submit: expected a long option of sbatch, such as --partition=long, got "
                f"{option!r}"
            )
    quoted = " ".join(map(shlex.quote, job.arguments))
    # An MPI library that is installed in a virtual environment has its mpirun there.
    beside = Path(sys.executable).parent / "mpirun"
    head = _HEAD.format(
        title=repr(str(job.program)),
        program=shlex.quote(str(job.program)),
        nodes=job.nodes,
        ranks=job.ranks_per_node,
        gpus=job.gpus_per_node,
        options="\n".join(f"#SBATCH {line}" for line in [*lines, *job.options]),
        launcher=shlex.quote(job.launcher),
        mpirun=shlex.quote(str(beside)) if beside.exists() else "$(type -P mpirun)",
        arguments=quoted,
        again=" ".join(map(shlex.quote, job.again)),
        python=shlex.quote(sys.executable),
        mpirun_options="--with-ft ulfm" if job.elastic else "",
    )
    return head + _BODY


def submit(job: Job) -> str:
    """Submit a job by `sbatch`, with the script on its stdin; return sbatch's output.

    Raises:
        NotFoundError: `sbatch` is not installed.
        FailedPreconditionError: Slurm rejects the job; gives the reason.
        InvalidArgumentError, ValueError: as `script_of`.
    """
    text = script_of(job)
    try:
        # By stdin, so that no file is left behind.
        done = subprocess.run(["sbatch"], input=text, text=True, capture_output=True, check=False)
    except FileNotFoundError:
        raise errors.NotFoundError(
            "submit: no sbatch here, expected a login node of Slurm. --dry-run prints the script"
        ) from None
    if done.returncode:
        raise errors.FailedPreconditionError(f"submit: sbatch refuses: {done.stderr.strip()}")
    return done.stdout
