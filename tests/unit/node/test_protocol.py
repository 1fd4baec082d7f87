"""Tests for the protocol of ranks that share memory: a model of it, in every order of its steps."""

from __future__ import annotations

import ast
import inspect
from itertools import product

import pytest

from collectives.node import flows, rounds
from pairwise import also
from protocol import ARM64, KINDS, X86_64, Wrong, explore, steps_of


def sequence(length):
    """Kinds of calls in which every sequence of so many kinds occurs, as short as possible.

    By prefixes: the longest chain of windows of which none is taken twice (de Bruijn).
    """
    kinds = list(KINDS)
    calls, taken = [kinds[0]] * length, {(kinds[0],) * length}
    while True:
        for kind in reversed(kinds):
            window = (*calls[len(calls) - length + 1 :], kind)
            if window not in taken:
                taken.add(window)
                calls.append(kind)
                break
        else:
            assert taken == set(product(kinds, repeat=length))
            return calls


def always(rank, put):
    return True


def never(rank, put):
    return False


def now_and_then(rank, put):
    return (rank + put) % 3 == 0


ORDERS = [
    pytest.param(X86_64, always, id="x86-64, streaming"),
    pytest.param(X86_64, now_and_then, id="x86-64, changing"),
    pytest.param(ARM64, never, id="ARM64"),
]


@pytest.mark.parametrize(("processor", "streams"), ORDERS)
def test_two_ranks_find_what_is_meant_for_them_in_every_order(processor, streams):
    assert explore(2, sequence(3), processor, streams) > 10_000


# Who changes streams as well.
@pytest.mark.parametrize(
    ("processor", "streams"), [also(*ORDERS[0].values), *ORDERS[1:]], ids=[o.id for o in ORDERS]
)
def test_three_ranks_find_what_is_meant_for_them_in_every_order(processor, streams, request):
    length = 3 if request.config.getoption("long") else 2
    assert explore(3, sequence(length), processor, streams) > 50_000


# What a kind of call does for each word. `reduce_scatter` and `shared` put nothing before READY and
# before either word, `flow` nothing before FILLED: their fences are those of the others, and not
# needed.
NEEDED = {
    ("wait", "FILLED"): list(KINDS),
    ("wait", "READY"): ["pipelined", "reduce_scatter", "shared"],
    ("release", "FILLED"): list(KINDS),
    ("release", "READY"): ["pipelined", "reduce_scatter", "shared"],
    ("fence", "FILLED"): ["one_shot", "pipelined", "reduce_scatter", "publish"],
    ("fence", "READY"): ["pipelined"],
    ("wait", "PARTS"): ["flow"],
    ("release", "PARTS"): ["flow"],
    ("fence", "PARTS"): ["flow"],
    ("fence", "change"): [""],
    ("slot", ""): [""],
    ("hash", ""): [""],
}


@pytest.mark.parametrize(
    "without", [(kind, *what) for what, kinds in NEEDED.items() for kind in kinds], ids=" ".join
)
def test_what_any_one_step_is_for(without):
    wrong = 0
    for order in ORDERS:
        try:
            explore(2, sequence(2), *order.values, without=without)
        except Wrong:
            wrong += 1
    assert wrong


def test_all_wait_for_each_other_without_a_word():
    with pytest.raises(Wrong, match="all wait for each other"):
        explore(2, sequence(2), X86_64, never, ("pipelined", "tell", "READY"))


def steps_written(kind):
    """Return what a kind of call in `rounds` says to the others, in the order of its text."""
    functions = {
        node.name: node
        for module in (rounds, flows)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.FunctionDef)
    }

    def follow(node):
        for child in ast.iter_child_nodes(node):
            yield from follow(child)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("wait", "tell"):
                yield name, ast.unparse(node.args[1]).removeprefix("w.")
            elif name == "wait_for":
                yield "wait", "PARTS"
            elif name in ("announce", "put", "agreed"):
                yield name, ""
            elif name in functions:
                yield from follow(functions[name])

    return list(follow(functions[kind]))


@pytest.mark.parametrize("kind", ["one_shot", "pipelined", "shared", "publish", "flow"])
def test_the_model_takes_the_steps_of_the_rounds(kind):
    """Up to the end of the first turn; parts of slots, which have several sizes, count once."""

    def once(steps):
        return [step for step, before in zip(steps, [None, *steps], strict=False) if step != before]

    written = once(steps_written(kind))
    assert once(steps_of(kind))[: len(written)] == written
