"""All-reduce of float32 inside `jax.jit` against the same call from Python and by `io_callback`.

    python benchmarks/jax_ops.py [--ranks 2] [--rounds 2] [--optax] [--json file]

Inside `jax.jit`: microseconds per turn of a `fori_loop`, less those of the same loop with an
addition in place of the call. "plan" is `plan_allreduce` called from Python, "plain" is
`allreduce(x, out=y)` on NumPy arrays, "io_callback" an ordered callback around the plan, also in a
`fori_loop`. Turns, near and far: `turns.py`.

With `--optax` the cases are compiled steps of SGD by Optax with the 161 gradients of ResNet-50:
"step" averages them over the ranks, "alone" does not, and "by callback" averages them by the same
transformation, not compiled, in an `io_callback`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from shapes import resnet50
from turns import TURNS, Handover, Turn, arguments, bound, known_jobs, measure

SIZES = [8, 4 << 10, 1 << 20]
CALLS = 64  # turns of a loop
REPEATS = 5  # of a loop in a turn, of which the fastest counts

WAYS = ("jit", "plan", "plain", "io_callback", "empty loop")
STEPS = ("step", "alone", "by callback")


def main() -> None:
    """Run the job and print the tables."""
    parser = arguments(__doc__, rounds=2)
    parser.add_argument("--optax", action="store_true", help="measure steps of Optax")
    options = parser.parse_args()
    if options.worker:
        (optax_worker if options.optax else worker)(options)
        return
    jobs = {"default": known_jobs()["default"]}
    measured = measure(options, jobs, __file__, *["--optax"] * options.optax)
    tables = measured.tables(combine, f"{options.ranks} ranks")
    for state, table in tables.items():
        ways = STEPS if options.optax else WAYS
        print(f"{state}, microseconds")
        print("   bytes " + " ".join(f"{way:>11}" for way in ways))
        for row in table["rows"]:
            times = " ".join(f"{row['times'][way]:11.1f}" for way in ways)
            print(f"{row['bytes']:8} {times}")
    measured.write(options.json, ranks=options.ranks, states=tables)


def combine(turns: list[Turn]) -> dict[str, Any]:
    """Join what the turns of one size have measured."""
    times = {way: statistics.median(turn.times[way] for turn in turns) for way in turns[0].times}
    return {"bytes": turns[0].what, "times": times}


def worker(options: argparse.Namespace) -> None:
    """Measure every size on this rank; rank 0 prints."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import io_callback
    from mpi4py import MPI

    import collectives as cc
    import strategies.jax as sj

    comm, world = cc.init(), MPI.COMM_WORLD
    # Before JAX starts its threads, which share the core of their rank.
    bound(world, options.cores)
    handover = Handover(world)
    found = []
    for nbytes in SIZES:
        x = np.ones(nbytes // 4, np.float32)
        y = np.empty_like(x)
        plan = comm.plan_allreduce(np.ones_like(x), op=cc.SUM)
        # JAX calls back in a thread of its own.
        own = comm.split(0, comm.rank)
        assert own is not None
        given = np.ones_like(x)
        inner = own.plan_allreduce(given, op=cc.SUM)

        def on_the_host(z: Any, given: Any = given, plan: Any = inner) -> Any:
            np.copyto(given, z)
            return plan()

        def callback(z: Any, call: Any = on_the_host) -> Any:
            return io_callback(call, jax.ShapeDtypeStruct(z.shape, z.dtype), z, ordered=True)

        loops = {
            "jit": looped(lambda z: sj.allreduce(z, op=cc.SUM, comm=comm)),
            "io_callback": looped(callback),
            "empty loop": looped(lambda z: z + 1),
        }
        z = jnp.asarray(x)
        ways: dict[str, Callable[[], Any]] = {
            name: lambda loop=loop, z=z: loop(z).block_until_ready() for name, loop in loops.items()
        }
        ways["plan"] = lambda plan=plan: [plan() for _ in range(CALLS)]
        ways["plain"] = lambda x=x, y=y: [comm.allreduce(x, op=cc.SUM, out=y) for _ in range(CALLS)]
        for call in ways.values():
            call()  # compiles
        for _ in range(TURNS):
            before = handover.rate()
            times = {name: 1e6 * seconds(world, call) / CALLS for name, call in ways.items()}
            times["jit"] -= times["empty loop"]
            times["io_callback"] -= times["empty loop"]
            found.append((nbytes, (before, handover.rate()), times))
    if comm.rank == 0:
        print(json.dumps(found))


def optax_worker(options: argparse.Namespace) -> None:
    """Measure steps of Optax on this rank; rank 0 prints."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.experimental import io_callback
    from mpi4py import MPI

    import collectives as cc
    import strategies

    comm, world = cc.init(), MPI.COMM_WORLD
    bound(world, options.cores)
    handover = Handover(world)
    rng = np.random.default_rng(comm.rank)
    gradients = [jnp.asarray(rng.standard_normal(s, dtype=np.float32)) for s in resnet50()]
    alone = optax.sgd(0.1)
    ours, inner = (strategies.DistributedOptimizer(alone, compare="nothing") for _ in range(2))

    def by_callback(g: Any, s: Any) -> Any:
        shapes = jax.eval_shape(lambda: g)
        return io_callback(lambda g: inner.update(g, s)[0], shapes, g, ordered=True), s

    state = alone.init(gradients)
    steps = {
        "step": jax.jit(lambda g: ours.update(g, state)[0]),
        "alone": jax.jit(lambda g: alone.update(g, state)[0]),
        "by callback": jax.jit(lambda g: by_callback(g, state)[0]),
    }
    ways = {name: lambda s=s: jax.block_until_ready(s(gradients)) for name, s in steps.items()}
    for call in ways.values():
        call()  # compiles
    found = []
    for _ in range(TURNS):
        before = handover.rate()
        times = {name: 1e6 * seconds(world, call) for name, call in ways.items()}
        found.append((sum(g.nbytes for g in gradients), (before, handover.rate()), times))
    if comm.rank == 0:
        print(json.dumps(found))


def looped(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Compile a loop of calls whose results are the next operands."""
    import jax

    return jax.jit(lambda z: jax.lax.fori_loop(0, CALLS, lambda _, z: function(z) * 0.5, z))


def seconds(world: Any, call: Callable[[], Any]) -> float:
    """Return the slowest rank's seconds; the fastest of some."""
    took = []
    for _ in range(REPEATS):
        world.Barrier()
        began = time.perf_counter()
        call()
        took.append(max(world.allgather(time.perf_counter() - began)))
    return min(took)


if __name__ == "__main__":
    main()
