"""The slurm.conf of a private Slurm: two nodes on one machine, everything in one directory."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

NODES = ("n1", "n2")
CPUS = 4  # per node, pretended (config_overrides): a job gets no more ranks than these
GRACE_SECONDS = 60  # what a job has until one of the partition `urgent` takes its place
GPUS = 2  # per node, claimed: Slurm counts them, and nobody computes on them
NULL = os.makedev(1, 3)  # the device numbers of /dev/null

TEMPLATE = """\
ClusterName=unisono
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CredType=cred/munge
{listen}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
GresTypes=gpu
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={directory}/slurmctld.pid
StateSaveLocation={directory}/state
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdSpoolDir={directory}/spool.%n
TmpFS={directory}/spool.%n
NodeName=n1 NodeHostname={hosts[0]} NodeAddr=127.0.0.1 Port={ports[1]} {what}
NodeName=n2 NodeHostname={hosts[1]} NodeAddr=127.0.0.1 Port={ports[2]} {what}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=preempt_send_user_signal
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=10 State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=n1,n2 MaxTime=10 State=UP PriorityTier=2
"""


def write(directory: Path, namespaces: bool) -> None:
    """Write slurm.conf, and the hosts file that is mounted where there are namespaces."""
    host = socket.gethostname().split(".")[0]
    (directory / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
    # A slurmd that listens on the loopback alone has to find its node's name in the hosts file.
    listen = "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny" if namespaces else ""
    text = TEMPLATE.format(
        host=host,
        grace=GRACE_SECONDS,
        hosts=NODES if namespaces else (host, host),
        listen=listen,
        directory=directory,
        ports=_free_ports(3),
        what=f"CPUs={CPUS} RealMemory=1000 Gres=gpu:{GPUS}",
    )
    (directory / "slurm.conf").write_text(text)
    for number in range(GPUS):
        # A device, else Slurm counts it but leaves it out of CUDA_VISIBLE_DEVICES.
        os.mknod(directory / f"gpu{number}", stat.S_IFCHR | 0o600, NULL)
    (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-{GPUS - 1}]\n")


def _free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
