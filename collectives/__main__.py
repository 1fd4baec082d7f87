"""`python -m collectives COMMAND`: look at, check, measure, tune and predict the collectives."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from collectives import world
from collectives.errors import LaunchError
from collectives.tools import arguments

if TYPE_CHECKING:
    from collectives import links, settings
    from collectives.simulation.cluster import Cluster

# The other modules are imported by the command that needs them: `explain` does without MPI.


def main(words: list[str] | None = None) -> int:
    """Run one command; returns the exit status, the same on all ranks."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["simulate"]:
        try:
            words = arguments.with_file(words)
        except (ImportError, OSError, ValueError) as error:
            return _refuse(error)
    options = arguments.parser().parse_args(words)
    try:
        status = _COMMANDS[options.command](options)
    except LaunchError as error:
        print(f"python -m collectives {options.command}: {error}", file=sys.stderr)
        return 1
    return status


def _info(options: argparse.Namespace) -> int:
    from collectives.tools import info

    comm = world.init()
    facts = info.gather_facts(comm)
    if comm.rank == 0:
        print(json.dumps(facts, indent=2) if options.json else info.table(facts))
    return 0


def _check(options: argparse.Namespace) -> int:
    from collectives.tools import check

    return check.run(options.limit, options.whole)


def _bench(options: argparse.Namespace) -> int:
    from collectives.tools import bench, units

    try:
        chosen = bench.Options(
            options.operation,
            units.sizes(options.sizes),
            options.dtype,
            [peer for peer in options.peers.split(",") if peer],
            options.algorithm,
            options.through,
        )
    except ValueError as error:
        return _refuse(error)
    return bench.run(chosen, options.json, options.plot)


def _tune(options: argparse.Namespace) -> int:
    from collectives.tools import tune

    return tune.run(options.out, options.seconds)


def _timeline(options: argparse.Namespace) -> int:
    from collectives.tools import timeline

    return timeline.run(options.directory, options.out, options.plot)


def _errors(options: argparse.Namespace) -> int:
    from collectives.tools import errors

    return errors.run(options.words)


def _explain(options: argparse.Namespace) -> int:
    from collectives.algorithms.layout import Layout
    from collectives.tools import explain, plot, units

    try:
        configuration, known = _links(options)
        (nbytes,) = units.sizes(options.bytes)
        layout = Layout(options.ranks, options.nodes, known.machine)
        question = explain.Question(options.operation, nbytes)
        print(explain.table(question, layout, known, configuration.stores))
        if options.upto is None:
            return 0
        points = explain.curve(question, layout, options.upto)
        print(f"\n{explain.drawn(points)}\n{explain.rests_on(configuration, known)}")
        if options.plot is not None:
            if not plot.is_possible():
                raise ValueError("--plot needs matplotlib: pip install matplotlib")
            plot.draw_curve(f"{question}, {layout.per_node} ranks a node", points, options.plot)
    except (OSError, ValueError) as error:
        return _refuse(error)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from collectives.simulation.cluster import Cluster
    from collectives.tools import plot, simulate, units
    from collectives.tools.explain import Question

    try:
        _, known = _links(options)
        for name in ("nodes", *(["compute", "gradients"] if options.step else ["bytes"])):
            if getattr(options, name) is None:
                raise ValueError(f"simulate: --{name} is missing")
        cluster = Cluster(
            options.nodes * options.ranks, options.nodes, known.machine,
            nodes_per_switch=options.switch, oversubscription=options.oversubscribed,
            burst=options.burst, cores=options.cores, nodes_per_host=options.nodes_per_host,
            noise=options.noise, seed=options.seed, slow=dict(options.slow),
            deaths=dict(options.dead),
        )  # fmt: skip
        if options.picture is not None and not plot.is_possible():
            raise ValueError("--picture needs matplotlib: pip install matplotlib")
        if options.step:
            _simulate_step(options, cluster)
            return 0
        found = []
        for nbytes in units.sizes(options.bytes):
            question = Question(options.op, nbytes)
            found.append((nbytes, simulate.rows(question, cluster, options.within)))
            print(simulate.table(question, found[-1][1], cluster, known), flush=True)
        if options.picture is not None:
            name = simulate.title(options.op, cluster)
            plot.draw_sizes(name, simulate.drawable(found), options.picture)
    except (ImportError, OSError, ValueError) as error:
        return _refuse(error)
    return 0


def _simulate_step(options: argparse.Namespace, cluster: Cluster) -> None:
    from collectives.simulation.training import Compute
    from collectives.tools import plot, simulate_step, units

    if options.times is not None and options.spread:
        raise ValueError("simulate: expected --spread or --times, got both")
    measured = [] if options.times is None else simulate_step.times_of(options.times)
    share, factor = options.stragglers
    compute = Compute(options.compute, options.spread, share, factor, options.seed, measured)
    gradients = units.sizes(options.gradients)
    step = simulate_step.Step(compute, gradients, options.overlap, options.half)
    found = simulate_step.points(step, cluster, options.within)
    print(simulate_step.table(step, found))
    if options.picture is not None:
        curve = [(point.nodes, point.efficiency) for point in found]
        plot.draw_efficiency("a training step, simulated", curve, options.picture)


def _links(options: argparse.Namespace) -> tuple[settings.Settings, links.Links]:
    """Return the settings and links that `auto` would go by, or what the options say instead."""
    from collectives import links, settings, tuned

    configuration = settings.from_environment()
    if options.tuned is not None:
        configuration = replace(configuration, tuned=options.tuned)
    network = {}
    if options.latency is not None:
        network["alpha"] = options.latency
    if options.gigabits is not None:
        network["beta"] = 8e-9 / options.gigabits
    found = tuned.found(configuration)
    return configuration, links.overridden(found, {"network": network}, "options")


def _refuse(error: Exception) -> int:
    print(f"python -m collectives: {error}", file=sys.stderr)
    return 2


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "info": _info,
    "check": _check,
    "bench": _bench,
    "tune": _tune,
    "timeline": _timeline,
    "errors": _errors,
    "explain": _explain,
    "simulate": _simulate,
}


if __name__ == "__main__":
    sys.exit(main())
