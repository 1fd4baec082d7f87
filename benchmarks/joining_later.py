"""Can processes that a second mpirun starts join a job? A trial of the MPI library, to be repeated.

    python benchmarks/joining_later.py accept [--with-ft] [--within SECONDS]
    python benchmarks/joining_later.py join [--with-ft] [--within SECONDS]

Two mpiruns start one process each. By `accept` the first opens a port, whose name it writes to a
file, and the second connects to it; by `join` they have a socket between them, and give it to
`MPI_Comm_join`. Both should end up in one communicator of two, within 20 s; what is left of them
then is killed. docs/reliability.md has what was seen.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("how", choices=MEETINGS)
    parser.add_argument("--with-ft", action="store_true", help="under mpirun --with-ft ulfm")
    parser.add_argument("--within", type=float, default=20.0, help="seconds")
    parser.add_argument("--meet", nargs=2, metavar=("ROLE", "FILE"), help="what is started")
    options = parser.parse_args()
    if options.meet is not None:
        signal.setitimer(signal.ITIMER_REAL, options.within)  # also while MPI waits
        meet(options.how, options.meet[0] == "first", Path(options.meet[1]))
        return
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"
    fault_tolerant = ["--with-ft", "ulfm"] if options.with_ft else []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_end:
        jobs = {}
        for role in ("first", "second"):
            command = [
                mpirun, *fault_tolerant, "-np", "1", sys.executable, __file__, options.how,
                "--within", str(options.within), "--meet", role, f"{folder}/address",
            ]  # fmt: skip
            jobs[role] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
            at_end.callback(kill, jobs[role])  # Ctrl-C, too, leaves nothing behind
        # A process that has not joined ends by itself; its mpirun has as long again for that.
        give_up = time.monotonic() + 2 * options.within
        for role, job in jobs.items():
            said = output(job, give_up - time.monotonic())
            joined = "joined" if "joined: 2" in said else f"not joined within {options.within:g} s"
            print(f"{role} mpirun: {joined}, status {job.returncode}")


def output(job: subprocess.Popen[str], limit: float) -> str:
    """Wait for what a job prints; past the limit it is killed."""
    try:
        return job.communicate(timeout=max(0.0, limit))[0]
    except subprocess.TimeoutExpired:
        kill(job)
        return job.communicate()[0]


def kill(job: subprocess.Popen[str]) -> None:
    """End a job, and all that is in its process group; harmless where it has ended."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def meet(how: str, is_first: bool, address: Path) -> None:
    """Join the other process, in one of the two roles."""
    whole = MEETINGS[how](is_first, address).Merge(high=not is_first)
    print(f"joined: {whole.allreduce(1)}", flush=True)


def by_port(is_first: bool, address: Path):  # noqa: ANN201  (mpi4py is imported in the ranks)
    """Accept, or connect."""
    from mpi4py import MPI

    if is_first:
        port = MPI.Open_port()
        publish(address, port)
        return MPI.COMM_SELF.Accept(port)
    return MPI.COMM_SELF.Connect(published(address))


def by_socket(is_first: bool, address: Path):  # noqa: ANN201  (mpi4py is imported in the ranks)
    """Give MPI a socket between the two."""
    from mpi4py import MPI

    if is_first:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            publish(address, str(listener.getsockname()[1]))
            connection, _ = listener.accept()
    else:
        connection = socket.create_connection(("127.0.0.1", int(published(address))))
    return MPI.Comm.Join(connection.fileno())


def publish(address: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    address.with_suffix(".new").write_text(text)
    os.rename(address.with_suffix(".new"), address)


def published(address: Path) -> str:
    """Wait for it."""
    while not address.exists():
        time.sleep(0.05)
    return address.read_text()


MEETINGS = {"accept": by_port, "join": by_socket}


if __name__ == "__main__":
    main()
