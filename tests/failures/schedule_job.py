"""One rank of a job whose ranks are killed and paused as a schedule says (`kill_schedules.py`).

    python tests/failures/schedule_job.py DIRECTORY        under `mpirun --with-ft ulfm`

Every function in `POINTS` is wrapped. Before its n-th call in a phase the rank reports to the
socket of the runner, and then kills itself, or continues and is killed or paused from outside some
milliseconds later.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np

import collectives as cc
import strategies
from collectives.transport import failure_detector, liveness, mpi_messages, ulfm
from strategies import elastic
from strategies.checkpoint import Saver, checkpoint
from strategies.elastic import commit_buffers, elastic_group, elastic_state
from strategies.session import TrainingSession

ROWS = 36
COMMIT_STEPS, SAVE_STEPS = 2, 4

# Functions before whose calls a rank may be killed; "start" and "step" are calls of this program.
POINTS = {
    "begin": (elastic_group.ElasticGroup, "begin"),
    "meet": (elastic_group.ElasticGroup, "meet"),
    "leave": (elastic_group.ElasticGroup, "leave"),
    "after": (elastic_group.ElasticGroup, "next_attempt"),
    "place": (elastic_group.ElasticGroup, "place"),
    "go_on": (elastic_state.State, "resume"),
    "commit": (elastic_state.State, "commit"),
    "hand_on": (commit_buffers.DoubleBuffer, "send_to"),
    "turn": (commit_buffers.DoubleBuffer, "swap"),
    "shrunk": (elastic_group, "shrink"),
    "meeting": (ulfm, "rendezvous"),
    "form": (ulfm, "shrink_and_make"),
    "agree": (ulfm, "agree"),
    "revoke": (ulfm, "revoke"),
    "made": (mpi_messages.MpiEndpoint, "__init__"),
    "write": (checkpoint, "write_shard"),
    "allreduce": (cc.Communicator, "allreduce"),
    "barrier": (cc.Communicator, "barrier"),
    "allgather": (cc.Communicator, "allgather_object"),
    "broadcast": (cc.Communicator, "broadcast"),
    "group": (cc.Communicator, "group"),
    "stay": (failure_detector.FailureDetector, "serve_until_exit"),
    "end": (liveness, "fire_soon"),
}

# A phase begins with the first call of a function, and lasts until the end of the program.
PHASES = {"start": None, "failure": "after", "last": "leave"}


class Schedule:
    """The events of this rank, and how often it has reached each point in each phase."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.facts = json.loads((directory / "schedule.json").read_text())
        self.events = [
            (number, event)
            for number, event in enumerate(self.facts["events"])
            if event["rank"] == rank
        ]
        self._calls = {
            phase: dict.fromkeys([*POINTS, "start", "step", "finalize"], 0) for phase in PHASES
        }
        self._phases = {"start"}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._address = str(directory / "runner")
        self.tell("here", rank)

    def tell(self, what: str, number: int) -> None:
        """Report to the runner."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.sendto(f"{what} {number} {os.getpid()}".encode(), self._address)

    def reach(self, point: str) -> None:
        """Count a call, and trigger the events that are due."""
        self._phases |= {phase for phase, first in PHASES.items() if first == point}
        for phase in self._phases:
            self._calls[phase][point] += 1
        for number, event in self.events:
            phase = event["phase"]
            if event["point"] == point and event["call"] == self._calls[phase][point]:
                self._happen(number, event)

    def _happen(self, number: int, event: dict[str, object]) -> None:
        self.tell("event", number)
        if event["kind"] == "kill" and not event["delay"]:
            os.kill(os.getpid(), signal.SIGKILL)


def watch(schedule: Schedule) -> None:
    """Count the calls of all points."""

    def watched(point, function):
        def call(*args, **kwargs):
            schedule.reach(point)
            result = function(*args, **kwargs)
            if point == "stay":  # the last call of Python before MPI_Finalize
                schedule.reach("finalize")
            return result

        return call

    for point, (owner, name) in POINTS.items():
        setattr(owner, name, watched(point, getattr(owner, name)))


def main(directory: Path) -> None:
    number = int(os.environ["OMPI_COMM_WORLD_RANK"])
    stacks = (directory / f"stacks-{number}").open("w")
    faulthandler.register(signal.SIGXCPU, file=stacks)  # SIGUSR2 is that of flight records
    comm = cc.init()
    # MPI's own start does not outlive a rank. As a function, so that `watch` counts later barriers.
    cc.Communicator.barrier(comm)
    schedule = Schedule(directory, number)
    watch(schedule)
    schedule.reach("start")
    rows = strategies.input.ShardedInput(
        range(ROWS), lambda row: (row,), rank=comm.rank, size=comm.size, policy="file", seed=1
    )
    things = {
        "used": np.zeros(ROWS, int),
        "sums": np.zeros(8, int),
        "rng": np.random.default_rng(0),
        "rows": rows,
    }
    kept = elastic.State(comm, step=0, fewest=comm.size, **things)

    def train_step() -> bool:
        """Use a row of each rank; return whether there was one."""
        schedule.reach("step")
        time.sleep(0.002)
        every = np.zeros(ROWS + 8, int)
        row = next(rows, None)
        if row is not None:
            every[row] = 1
        every[ROWS:] = things["rng"].integers(1 << 30, size=8)
        every = kept.comm.allreduce(every, op=cc.SUM)
        if not every[:ROWS].any():
            return False
        things["used"][:] += every[:ROWS]
        things["sums"][:] += every[ROWS:]
        return True

    def begin() -> int:
        comm = kept.comm
        if kept["step"] == 0:  # seeded by place, so that jobs of equal size have equal sums
            things["rng"].bit_generator.state = np.random.PCG64(comm.rank).state
        return min(kept["fewest"], comm.size)

    def train(kept: elastic.State) -> str:
        fewest = begin()
        for step in range(kept["step"] + 1, ROWS + 2):
            if not train_step():
                break
            if step % COMMIT_STEPS == 0:
                kept.commit(step=step, fewest=fewest)
        kept.commit(step=step, fewest=fewest)
        return "trained"

    def train_in_session(kept: elastic.State) -> str:
        with (
            strategies.CheckpointManager(directory / "saved", kept.comm) as manager,
            TrainingSession(
                Saver(manager, **things), state=kept, restore=False,
                commit_steps=COMMIT_STEPS, save_steps=SAVE_STEPS,
            ) as session,
        ):  # fmt: skip
            session.update(fewest=begin())
            while not session.should_stop():
                if not session.run(train_step):
                    session.request_stop()
        return "trained"

    told = elastic.run_elastic(
        train_in_session if schedule.facts["session"] else train,
        kept,
        max_ranks=schedule.facts["trained"],
    )
    assert told in ("trained", None), told
    used = things["used"]
    print(
        f"rank {number}: rows {used.min()} to {used.max()}, fewest {kept['fewest']}, "
        f"sums {things['sums'].tolist()}, size {kept.comm.size}",
        flush=True,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
