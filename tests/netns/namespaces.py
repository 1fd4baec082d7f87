"""Several machines on this one: network namespaces, joined by a switch of shaped links.

    m1 --- eth0 ====== port1 ---.
    m2 --- eth0 ====== port2 ---+--- switch          subnet 10.77.0.0/24, m1 is 10.77.0.1
    m3 --- eth0 ====== port3 ---'

The first process of the cluster lives in process, mount and network namespaces of its own and
reads a pipe from the tests. When the tests close it, or die in whatever way, that process ends,
and with it the kernel removes everything: all processes, mounts, namespaces and links. Nothing is
ever written where the rest of the machine could see it.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import launcher

__all__ = ["NamespaceCluster", "why_not"]

SUBNET = "10.77.0.0/24"
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount")
MOUNTED = "/run/machines/environment"
SET_UP = Path(__file__).with_name("set_up.sh")
SET_UP_SECONDS = 30.0  # takes 0.2 s for four machines
COMMAND_SECONDS = 10.0

# The most bytes that TCP hands to a link in one piece. A shaped link would cut what is longer than
# its burst into packets, for which the cores are too slow.
MOST_BYTES, SHAPED_BYTES = 65536, 9000


def why_not() -> str | None:
    """Say what is missing here for a cluster, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"there is no {', '.join(absent)} (Debian: iproute2, util-linux, mount)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    version = subprocess.run([launcher.mpirun_path(), "--version"], capture_output=True, text=True)
    if "Open MPI" not in version.stdout:
        return "the machines are started by Open MPI's mpirun, and this is another MPI"
    try:
        with NamespaceCluster(1) as cluster:
            cluster.shape("1gbit")
    except RuntimeError as error:
        return f"namespaces are not allowed: {error}"
    return None


class NamespaceCluster:
    """`machines` machines m1, m2, ... ; a context manager.

    Every machine has a network interface, a host name and a /dev/shm of its own; files and cores
    are shared.

    Args:
        machines: how many.
        environment: the folder of the Python environment whose mpirun and interpreter run.

    Example:
        with NamespaceCluster(2) as cluster:
            print(cluster.run(2, "train.py", timeout=60, shape="1gbit").stdout)
    """

    def __init__(self, machines: int, environment: Path = Path(sys.prefix)) -> None:
        self._environment = environment
        self.names = [f"m{number + 1}" for number in range(machines)]
        self._keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> NamespaceCluster:
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
             "sh", SET_UP, SUBNET.removesuffix("0/24"), self._environment, *self.names],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which then leave this context
        )  # fmt: skip
        said = ""
        assert self._keeper.stdout is not None
        while not said.endswith("ready\n"):
            if not select.select([self._keeper.stdout], [], [], SET_UP_SECONDS)[0]:
                said += f"not ready after {SET_UP_SECONDS:g} s"
            elif line := os.read(self._keeper.stdout.fileno(), 4096).decode():
                said += line
                continue
            self.__exit__()
            raise RuntimeError(f"cluster: cannot start: {said.strip()}")
        return self

    def __exit__(self, *error: object) -> None:
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()
        self._keeper = None

    def run(
        self, ranks_per_machine: int | Sequence[int], *program: str | Path, timeout: float,
        shape: str | None = None, by: str = "slot", options: tuple[str, ...] = (), **extra: str,
    ) -> launcher.Result:  # fmt: skip
        """Run `python program...` under one mpirun on all machines.

        Args:
            ranks_per_machine: how many, the same everywhere or for each machine.
            *program: a script and its arguments.
            timeout: seconds, after which everything that was started is killed.
            shape: the rate of every link in either direction, as tc writes it ("1gbit"); None
                leaves the links as fast as memory.
            by: "slot" fills one machine after the other, "node" deals the ranks out in turn.
            options: further ones of mpirun.
            **extra: variables for the environment of the ranks.
        """
        self.shape(shape)
        ranks = ranks_per_machine
        counts = [ranks] * len(self.names) if isinstance(ranks, int) else ranks
        hosts = [f"{name}:{count}" for name, count in zip(self.names, counts, strict=True)]
        python = str(self._environment / "bin" / "python")
        command = [
            launcher.mpirun_path(python).replace(str(self._environment), MOUNTED),
            "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", "/run/machines/enter",
            "--prtemca", "oob_tcp_if_include", SUBNET,
            "--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self",
            "--mca", "btl_tcp_if_include", SUBNET,
            "--host", ",".join(hosts),
            "--map-by", f"{by}:oversubscribe", "--bind-to", "none",
            *options, "-np", str(sum(counts)), python, *map(str, program),
        ]  # fmt: skip
        # Processes of their own number space: the end of the first one is the end of all.
        contained = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = ["/run/machines/enter", self.names[0], shlex.join(command)]
        inside = [*self._inside(), *contained, *enter]
        return launcher.run(inside, timeout=timeout, **extra)

    def shape(self, rate: str | None) -> None:
        """Limit every link to a rate in either direction, or lift the limit."""
        most = MOST_BYTES if rate is None else SHAPED_BYTES
        for number, name in enumerate(self.names):
            self._command("ip", "-n", name, "link", "set", "eth0", "gso_max_size", str(most))
            for where, device in ((["-n", name], "eth0"), ([], f"port{number + 1}")):
                self._command("tc", *where, "qdisc", "replace", "dev", device, "root", *_line(rate))

    def connect(self, machine: str, connected: bool) -> None:
        """Plug a machine's cable into the switch, or pull it."""
        port = f"port{self.names.index(machine) + 1}"
        self._command("ip", "link", "set", port, "up" if connected else "down")

    def sent_bytes(self, machine: str) -> int:
        """Return how many bytes a machine has put on its link until now."""
        shown = self._command("ip", "-n", machine, "-s", "link", "show", "eth0")
        found = re.search(r"TX:.*\n\s*(\d+)", shown)
        assert found, shown
        return int(found[1])

    def _inside(self) -> list[str]:
        assert self._keeper is not None, "the cluster is not running"
        of = f"/proc/{self._keeper.pid}/ns"
        return ["nsenter", f"--mount={of}/mnt", f"--net={of}/net", f"--pid={of}/pid_for_children"]

    def _command(self, *command: str) -> str:
        done = launcher.run([*self._inside(), *command], timeout=COMMAND_SECONDS)
        if done.status != 0:
            raise RuntimeError(f"{' '.join(command)}: status {done.status}: {done.stderr.strip()}")
        return done.stdout


def _line(rate: str | None) -> list[str]:
    """Return the queueing discipline of one direction of a link, such as "100mbit" or "1gbit"."""
    if rate is None:
        return ["pfifo_fast"]
    # Tokens of the time by which the kernel's timer is late are lost beyond the burst: at 1 Gbit/s
    # 16 KiB keep 93 to 95 % of it on four lines at once that share two cores, and 64 KiB take their
    # time; 10 KiB keep 90 %. As many bytes pass at once after a pause, of which a real line gives
    # away none. 4 KiB do for 100 Mbit/s. 50 ms is the queue of a switch, after which packets are
    # dropped.
    burst = "4kb" if rate.endswith("mbit") and int(rate.removesuffix("mbit")) <= 100 else "16kb"
    return ["tbf", "rate", rate, "burst", burst, "latency", "50ms"]
