"""Let several networks answer together, each on a rank of its own.

    mpirun -np 4 python examples/hyper_parameter_search.py
    mpirun --with-ft ulfm -np 4 python examples/ensemble_of_ranks.py

Rank 0 has the questions; each other rank is a member with one network. Every member has a queue of
questions and a queue of answers, which both live on rank 0, and rank 0 averages the answers that
arrive in time: a batch has one deadline for all members. A late or dead member causes one delay:
rank 0 does not wait for it again until an answer of it arrives.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time

import numpy as np
from ensemble import members

import collectives as cc
import strategies
from common.digits import DIGITS, PIXELS, Network, accuracy, load
from strategies.errors import CancelledError, DeadlineExceededError, OutOfRangeError


def main() -> None:
    """Ask, or answer."""
    options = parse_arguments()
    comm = cc.init()
    if comm.size == 1:
        raise SystemExit("an ensemble of ranks needs a rank for the questions and one per network")
    networks = members(options.networks)
    service = strategies.rpc.Service(comm)
    queues = [make_queues(service, rank) for rank in range(1, comm.size)]
    comm.barrier()
    if comm.rank == 0:
        ask(queues, options)
    else:
        print(f"member {comm.rank}: process {os.getpid()}", flush=True)
        answer(networks[(comm.rank - 1) % len(networks)], *queues[comm.rank - 1])
    service.close()
    with contextlib.suppress(cc.PeerFailure):  # members may have died
        comm.barrier()


def make_queues(service: strategies.rpc.Service, rank: int) -> tuple:
    """Make or find the two queues of a member: batches of images, and of probabilities."""

    def make(name: str, width: int) -> strategies.queues.FIFOQueue:
        return strategies.queues.shared_queue(
            strategies.queues.FIFOQueue, 8, ["int64", "float64"], None, service=service,
            shared_name=f"{name} of member {rank}",
        )  # fmt: skip

    return make("questions", PIXELS), make("answers", DIGITS)


def answer(network: Network, questions, answers) -> None:
    """Answer until there are no more questions."""
    while True:
        try:
            number, pixels = questions.dequeue()
            answers.enqueue((number, network.predict(pixels)))
        except (OutOfRangeError, CancelledError):  # closed, and nothing left
            return


def ask(queues: list, options: argparse.Namespace) -> None:
    """Put one batch after the other to all members, and average what comes."""
    pixels, digits = load("held out")
    silent: set[int] = set()
    hits = rows = 0
    for number in range(options.batches):
        chosen = np.arange(number * 32, (number + 1) * 32) % len(digits)
        for questions, _ in queues:
            if questions.size() < 8:  # one that does not take its questions gets no more
                questions.enqueue((number, pixels[chosen]))
        began = time.perf_counter()
        until = time.monotonic() + options.timeout  # later answers are not used
        answers = {}
        for member, (_, queue) in enumerate(queues, 1):
            found, heard = take(queue, number, 0 if member in silent else until)
            if found is not None:
                answers[member] = found
            if heard:
                silent.discard(member)
            else:
                silent.add(member)
        waited = 1000 * (time.perf_counter() - began)
        names = " ".join(map(str, answers)) or "none"
        print(f"batch {number}: answered by {names} within {waited:.0f} ms", flush=True)
        if answers:
            hits += accuracy(np.mean(list(answers.values()), axis=0), digits[chosen]) * 32
            rows += 32
        time.sleep(options.interval)
    for questions, queue in queues:
        questions.close()
        queue.close(cancel_pending_enqueues=True)  # late answers are not read any more
    print(f"accuracy of what was answered: {hits / max(rows, 1):.4f}", flush=True)


def take(queue, number: int, until: float) -> tuple[np.ndarray | None, bool]:
    """Return the answer to a question, None if it is not there in time; and whether any came."""
    heard = False
    while True:
        try:
            found, probabilities = queue.dequeue(timeout=max(until - time.monotonic(), 0.001))
        except DeadlineExceededError:
            return None, heard
        heard = True
        if found == number:  # else it comes too late, for an earlier question
            return probabilities, heard


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default="runs/search", help="folder of the networks")
    parser.add_argument("--batches", type=int, default=20, help="questions, of 32 digits each")
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between questions")
    parser.add_argument("--timeout", type=float, default=0.5, help="seconds to wait for a batch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
