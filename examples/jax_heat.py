"""Heat in a square plate: the rows are divided among the ranks, and one program does all steps.

    mpirun -np 4 python examples/jax_heat.py
    mpirun -np 4 python examples/jax_heat.py --picture heat.png    # needs matplotlib

The upper edge of the plate stays hot, and the other edges stay cold. In each step a rank exchanges
its first and last row with its neighbours, inside `jax.jit`. The result is independent of the
number of ranks.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import collectives as cc
from strategies.jax import allreduce, sendrecv

HOT = 100.0


def main() -> None:
    """Compute the temperatures, and report them on rank 0."""
    options = parse_arguments()
    comm = cc.init()
    rows = np.array_split(np.arange(options.size), comm.size)[comm.rank]
    plate = jnp.zeros((len(rows), options.size))
    plate, change = jax.jit(lambda plate: diffuse(plate, comm, options.steps))(plate)
    whole = comm.gather(np.asarray(plate))
    if whole is None:
        return
    middle = whole[options.size // 2, options.size // 2]
    print(f"{comm.size} ranks, {options.steps} steps: {middle:.4f} degrees in the middle, ", end="")
    print(f"last change {change:.2e}")
    if options.picture:
        from matplotlib import image

        image.imsave(options.picture, whole, cmap="inferno")


def diffuse(plate: jax.Array, comm: cc.Communicator, steps: int) -> tuple[jax.Array, jax.Array]:
    """Return this rank's rows after some steps, and the largest change of the last step."""
    below = comm.rank + 1 if comm.rank + 1 < comm.size else None
    above = comm.rank - 1 if comm.rank else None

    def step(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        plate, _ = state
        first = sendrecv(plate[-1], below, above, comm=comm)
        last = sendrecv(plate[0], above, below, comm=comm)
        if above is None:
            first = jnp.full_like(first, HOT)
        padded = jnp.pad(jnp.vstack([first, plate, last]), ((0, 0), (1, 1)))
        middle = padded[1:-1, 1:-1]
        neighbours = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        change = 0.25 * neighbours - middle
        return plate + change, jnp.abs(change).max()

    plate, change = jax.lax.fori_loop(0, steps, step, (plate, jnp.zeros(())))
    return plate, allreduce(change, op=cc.MAX, comm=comm)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=64, help="rows and columns of the plate")
    parser.add_argument("--steps", type=int, default=2000, help="steps in time")
    parser.add_argument("--picture", help="file for a picture of the temperatures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
