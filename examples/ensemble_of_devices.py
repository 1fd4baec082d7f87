"""Let several networks of one program answer together, each on a device of its own, in time.

    python examples/ensemble_of_devices.py
    python examples/ensemble_of_devices.py --slow 2

Every network is on one device of JAX, here one of 8 devices of the host, and has a thread. All are
asked at once, and the probabilities that have come at the deadline are averaged: a batch has one
deadline for all networks. One that is late is not asked again before it has answered.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

import strategies
from common.digits import Network, accuracy, load

MEMBERS, BATCH = 8, 32


def main() -> None:
    """Train the networks, ask them, and say who has answered."""
    options = parse_arguments()
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={MEMBERS}")
    import jax  # after the setting

    names = strategies.devices()
    assert len(names) >= jax.device_count() >= MEMBERS
    members = [Member(name, number, options) for number, name in enumerate(names[:MEMBERS])]
    pixels, digits = load("held out")
    for member in members:
        for rows in (pixels, pixels[:BATCH]):
            member.answer(rows)  # compiles
    one_by_one = timed(lambda: [member.answer(pixels) for member in members])
    alone = [accuracy(member.answer(pixels), digits) for member in members]
    with ThreadPoolExecutor(MEMBERS) as threads:
        all_at_once = timed(
            lambda: list(threads.map(lambda member: member.answer(pixels), members))
        )
        hits = [ask(number, members, threads, options) for number in range(options.batches)]
    print(f"all answers to {len(digits)} digits: {1000 * all_at_once:.1f} ms at once, "
          f"{1000 * one_by_one:.1f} ms one by one")  # fmt: skip
    print(f"accuracy alone: {min(alone):.4f} to {max(alone):.4f}")
    print(f"accuracy of what was answered in time: {np.mean(hits):.4f}")


class Member:
    """A network on a device."""

    def __init__(self, device: str, number: int, options: argparse.Namespace) -> None:
        self.number, self.slow, self.wait = number, number == options.slow, options.wait
        self.strategy = strategies.OneDeviceStrategy(device)
        network = Network.random(options.hidden, seed=number)
        network.train(rate=0.1, momentum=0.9, epochs=options.epochs, seed=100 * number)
        self.weights = {
            name: self.strategy.variable(value.astype(np.float32), name=name)
            for name, value in network.weights.items()
        }
        self.late: Future | None = None

    def answer(self, pixels: np.ndarray) -> np.ndarray:
        """Return the probability of each digit, shape (n, 10)."""
        time.sleep(self.wait)
        return np.asarray(self.strategy.run(self.forward, args=(pixels,)))

    def forward(self, pixels):
        """Compute it on this device."""
        w = {name: variable.value for name, variable in self.weights.items()}
        return compiled()(w, pixels.astype(np.float32))

    def answer_later(self, pixels: np.ndarray, begins: float) -> np.ndarray:
        """Answer, after this time if this is the network whose device is busy."""
        if self.slow:
            time.sleep(begins)
        return self.answer(pixels)


@functools.cache
def compiled():
    """Return the network, compiled; JAX keeps a program for each device."""
    import jax

    def network(w, pixels):
        hidden = jax.numpy.maximum(pixels @ w["w1"] + w["b1"], 0)
        return jax.nn.softmax(hidden @ w["w2"] + w["b2"])

    return jax.jit(network)


def ask(number: int, members: list[Member], threads: ThreadPoolExecutor, options) -> float:
    """Ask all that are free, and return how well those have answered that came in time."""
    pixels, digits = load("held out")
    chosen = np.arange(number * BATCH, (number + 1) * BATCH) % len(digits)
    began = time.perf_counter()
    asked = {}
    for member in members:
        if member.late is None or member.late.done():
            member.late = threads.submit(member.answer_later, pixels[chosen], 3 * options.deadline)
            asked[member.late] = member
    done, _ = wait(asked, timeout=options.deadline)
    took = time.perf_counter() - began
    names = " ".join(str(member.number) for future, member in asked.items() if future in done)
    print(f"batch {number}: answered by {names or 'none'} within {1000 * took:.0f} ms")
    time.sleep(options.interval)
    if not done:
        return 0.0
    return accuracy(np.mean([future.result() for future in done], axis=0), digits[chosen])


def timed(call) -> float:
    """Return the seconds of a call, the best of five."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=128, help="units of each network")
    parser.add_argument("--epochs", type=int, default=4, help="of training")
    parser.add_argument("--batches", type=int, default=7, help="questions, of 32 digits each")
    parser.add_argument("--deadline", type=float, default=0.1, help="seconds to wait for a batch")
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between questions")
    parser.add_argument("--wait", type=float, default=0.005, help="that a device takes beside")
    parser.add_argument("--slow", type=int, help="the network whose device is busy")
    return parser.parse_args()


if __name__ == "__main__":
    main()
