"""A private Slurm of two nodes on this machine, in one temporary directory.

    test --- sbatch, scontrol --> slurmctld --> slurmd n1, slurmd n2     (munged signs messages)
      `----- pipe --> supervisor, the parent of all daemons

Nothing of the system is changed. The supervisor ends the daemons and the jobs when the context is
left or the tests die. Where namespaces are allowed, the processes are in one of their own, the
daemons listen on the loopback alone, and each node has its own host name and /dev/shm, so that MPI
sees two machines. Elsewhere (many containers) both nodes bear the name of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import configuration
from configuration import NODES

from limits import Limit

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo", "srun", "scancel")
BOOT_SECONDS = 60.0  # takes 1 to 3 s
COMMAND_SECONDS = 30.0
SUPERVISOR = Path(__file__).with_name("supervisor.py")
STOP_SECONDS = 15.0
POLL_SECONDS = 0.1
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
}
# Variables of an outer job, MPI or test run, which must not reach ours.
FOREIGN = ("SLURM", "SBATCH_", "SRUN_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "UNISONO_")
NAMESPACES = ("--pid", "--fork", "--mount-proc")
T = TypeVar("T")


class Ending(NamedTuple):
    """How a job ended: Slurm's word for it, and the status as a shell counts it (128 + signal)."""

    state: str
    exit_code: int


def why_not() -> str | None:
    """Say what is missing here for a Slurm of our own, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]
    # By this name Slurm opens it for `srun --mpi=pmix`; the library's own package lacks it.
    if not any(any(Path("/usr").glob(f"{place}/libpmix.so")) for place in ("lib*", "lib/*")):
        absent.append("libpmix.so")
    if absent:
        return f"there is no {', '.join(absent)} (on Debian, .ci/packages installs Slurm)"
    if os.geteuid() != 0:
        return "a private Slurm needs root"
    return None


class SlurmCluster:
    """Two nodes, n1 and n2, with four pretended CPUs each; a context manager.

    Args:
        namespaces: whether to contain it in namespaces; default where these are allowed.

    Example:
        with SlurmCluster() as cluster:
            job = cluster.submit("job.sh", nodes=2, ntasks_per_node=2)
            print(cluster.wait(job, timeout=30), cluster.output(job))
    """

    def __init__(self, namespaces: bool | None = None) -> None:
        self.directory = Path()  # of the running cluster
        self.namespaces = namespaces_allowed() if namespaces is None else namespaces
        self._stack = contextlib.ExitStack()
        self._supervisor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SlurmCluster:
        reason = why_not()
        if reason is not None:
            raise RuntimeError(f"cluster: cannot start, {reason}")
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def submit(
        self,
        script: str | os.PathLike[str],
        *arguments: str | os.PathLike[str],
        cwd: str | os.PathLike[str] | None = None,
        env: dict[str, str] | None = None,
        **options: str | int | bool,
    ) -> int:
        """Call sbatch, return the number of the job.

        Args:
            script: the batch script.
            *arguments: those of the script.
            cwd: where sbatch is called; default the directory of the cluster.
            env: variables added to the environment of sbatch, which the job inherits.
            **options: long options of sbatch, ntasks_per_node=2 for --ntasks-per-node=2; True for
                one without a value.
        """
        options = {"output": f"{self.directory}/out/%j", **options}
        words = [
            "--" + name.replace("_", "-") + ("" if value is True else f"={value}")
            for name, value in options.items()
        ]
        reply = self.run("sbatch", "--parsable", *words, script, *arguments, cwd=cwd, env=env)
        return int(reply.strip().split(";")[0])

    def run(
        self,
        *command: str | os.PathLike[str],
        cwd: str | os.PathLike[str] | None = None,
        env: dict[str, str] | None = None,
    ) -> str:
        """Run a command of this Slurm (scancel, scontrol, sinfo, srun), return what it printed."""
        text = " ".join(str(word) for word in command)
        try:
            done = subprocess.run(
                command,
                cwd=cwd or self.directory,
                env=self.environment() | (env or {}),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
            )
        except subprocess.TimeoutExpired:
            problem = f"{text}: no end after {COMMAND_SECONDS:g} s"
            raise TimeoutError(f"{problem}\n{self.logs()}") from None
        if done.returncode != 0:
            said = done.stdout + done.stderr
            raise RuntimeError(f"{text}: status {done.returncode}\n{said}{self.logs()}")
        return done.stdout

    def field(self, job: int | str, name: str) -> str:
        """Return one field of what scontrol shows of a job."""
        text = self.run("scontrol", "show", "job", str(job))
        found = re.search(rf"(?:^|\s){name}=(.*?)(?:\s+\w+=|$)", text, re.MULTILINE)
        if found is None:
            raise KeyError(f"job {job}: scontrol shows no {name}, only\n{text}")
        return found[1]

    def wait(self, job: int | str, timeout: float) -> Ending:
        """Wait until the job, or task such as "7_2" of a job array, has ended.

        Raises:
            TimeoutError: not after timeout seconds; the text shows the job and the daemons' logs.
        """

        def ended() -> Ending | None:
            state = self.field(job, "JobState")
            if state not in ENDED:
                return None
            status, caught = map(int, self.field(job, "ExitCode").split(":"))
            return Ending(state, 128 + caught if caught else status)

        return self.until(f"the end of job {job}", ended, timeout, job)

    def wait_output(self, job: int, text: str, timeout: float) -> None:
        """Wait until the job has written text; raises TimeoutError as wait does."""
        what = f"{text!r} from job {job}"
        self.until(what, lambda: text in self.output(job) or None, timeout, job)

    def wait_field(self, job: int, name: str, value: str, timeout: float) -> None:
        """Wait until a field of the job has the value; raises TimeoutError as wait does."""
        what = f"{name}={value} of job {job}"
        self.until(what, lambda: self.field(job, name) == value or None, timeout, job)

    def output(self, job: int) -> str:
        """Return what the job has written until now (both streams, by default)."""
        path = Path(self.field(job, "StdOut"))
        return path.read_text(errors="replace") if path.exists() else ""

    def environment(self) -> dict[str, str]:
        """Return the environment for commands of this Slurm."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        return kept | {
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            # What a killed mpirun leaves behind is removed with the cluster.
            "TMPDIR": str(self.directory / "tmp"),
            "PATH": _search_path(),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def start_again(self, job: int) -> None:
        """Let a job that is back in the queue start at once, not after two minutes as usual.

        But not in the second in which it was ended: a node refuses what it was told then of a job.
        """
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def logs(self, lines: int = 15) -> str:
        """Return the ends of the daemons' logs."""
        parts = []
        for path in sorted((self.directory / "log").glob("*")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)

    def _start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="unisono-slurm-"))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.directory.chmod(0o711)  # munged insists that every user can reach its socket
        for name in ("log", "munge", "out", "spool.n1", "spool.n2", "state", "tmp"):
            (self.directory / name).mkdir()
        key = self.directory / "munge" / "key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)
        configuration.write(self.directory, self.namespaces)
        self._stack.callback(self._stop)
        with (self.directory / "log" / "supervisor").open("w") as log:
            self._supervisor = subprocess.Popen(
                self._supervisor_command(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=self.environment(),
                start_new_session=True,  # Ctrl-C is for the tests, which then leave this context
            )
        plan = {"directory": str(self.directory), "daemons": self._daemons()}
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.write(json.dumps(plan).encode() + b"\n")
        self._supervisor.stdin.flush()
        self.until("two idle nodes", self._idle, BOOT_SECONDS)

    def _stop(self) -> None:
        if self._supervisor is None:
            return
        assert self._supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait(STOP_SECONDS)

    def _supervisor_command(self) -> list[str]:
        command = [sys.executable, str(SUPERVISOR)]
        if not self.namespaces:
            return command
        mount = 'mount --bind hosts /etc/hosts && exec "$@"'  # seen by the cluster alone
        return ["unshare", *NAMESPACES, "--kill-child", "sh", "-c", mount, "sh", *command]

    def _daemons(self) -> list[dict[str, Any]]:
        munge = self.directory / "munge"
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        munged = ["munged", "--foreground", f"--socket={munge}/socket", *files]
        daemons: list[dict[str, Any]] = [
            {"name": "munged", "command": munged, "ready": f"{munge}/socket"},
            {"name": "slurmctld", "command": ["slurmctld", "-D"]},
        ]
        for node in NODES:
            command = ["slurmd", "-D", "-N", node]
            if self.namespaces:
                # A host name and a /dev/shm of its own, as another machine has.
                enter = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
                command = ["unshare", "--uts", "--mount", "sh", "-c", enter, node, *command]
            daemons.append({"name": f"slurmd.{node}", "command": command})
        return daemons

    def _idle(self) -> bool | None:
        assert self._supervisor is not None
        if self._supervisor.poll() is not None:
            raise RuntimeError(f"cluster: a daemon ended while starting\n{self.logs()}")
        try:
            states = self.run(
                "sinfo", "--noheader", "--format=%T", "--Node", "--partition=debug"
            ).split()
        except RuntimeError:  # slurmctld does not answer yet
            return None
        return states == ["idle"] * len(NODES) or None

    def until(
        self, what: str, probe: Callable[[], T | None], timeout: float, job: int | str = 0
    ) -> T:
        """Return what the probe says, once that is not None; raises TimeoutError as wait does."""
        limit = Limit(timeout)
        while (value := probe()) is None:
            if not limit.left():
                text = f"cluster: no {what} after {timeout:g} s"
                if job:
                    text += f"\n{self.run('scontrol', 'show', 'job', str(job))}\n{self.output(job)}"
                raise TimeoutError(f"{text}\n{self.logs()}")
            time.sleep(POLL_SECONDS)
        return value


def _search_path() -> str:
    """Return PATH with the folders of daemons, which an ordinary login may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin:/usr/sbin:/sbin"])


def namespaces_allowed() -> bool:
    """Tell whether processes and host names can be kept apart here."""
    try:
        probe = subprocess.run(["unshare", *NAMESPACES, "--uts", "true"], capture_output=True)
    except FileNotFoundError:
        return False
    return probe.returncode == 0
