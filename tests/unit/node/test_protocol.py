"""Tests for the protocol of ranks that share memory: a model of it, in every order of its steps."""

import ast
import inspect
import io
import re
import tokenize
from itertools import product

import pytest

from collectives.node import (
    copy_kernels,
    core_probe,
    reduce_kernels,
    slot_stores,
    store_autotuner,
    synchronization,
    tiles,
)
from pairwise import also
from protocol import ARM64, KINDS, OF_TWO, X86_64, Wrong, explore, steps_of


def sequence(length, size=2):
    """Kinds of calls in which every sequence of so many kinds occurs, as short as possible.

    By prefixes: the longest chain of windows of which none is taken twice (de Bruijn).
    """
    kinds = [kind for kind in KINDS if size == 2 or kind not in OF_TWO]
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
    assert explore(3, sequence(length, 3), processor, streams) > 50_000


# What a kind of call does for each flag. `reduce_scatter` and `shared` store nothing before `ready`
# and before either flag, `pipelined_copy` nothing before `filled`: their fences are those of the
# others, and not needed.
NEEDED = {
    ("wait", "filled"): list(KINDS),
    ("wait", "ready"): ["pipelined", "elsewhere", "reduce_scatter", "shared"],
    ("release", "filled"): list(KINDS),
    ("release", "ready"): ["pipelined", "elsewhere", "reduce_scatter", "shared"],
    ("fence", "filled"): [
        "one_shot",
        "pipelined",
        "direct",
        "elsewhere",
        "reduce_scatter",
        "one_shot_copy",
    ],
    ("fence", "ready"): ["pipelined", "elsewhere"],
    ("wait", "parts"): ["pipelined_copy"],
    ("release", "parts"): ["pipelined_copy"],
    ("fence", "parts"): ["pipelined_copy"],
    ("fence", "change"): [""],
    ("fence", "results"): ["shared"],
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
        explore(2, sequence(2), X86_64, never, ("pipelined", "tell", "ready"))


MODULES = [
    store_autotuner, copy_kernels, synchronization, core_probe, reduce_kernels, slot_stores, tiles
]  # fmt: skip

# What gives the address of shared memory, or orders stores there.
REACHES_OTHERS = {"header", "slot", "fence", "store_fence_full", "next_round", "table[rank]"}


def cited(module):
    """Return the steps of the model that each line of a module cites."""
    lines = {}
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(module)).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = re.findall(r"\[([a-z ]+)\]", token.string)
    return lines


CITED = {module: cited(module) for module in MODULES}
FUNCTIONS = {
    node.name: (module, node)
    for module in MODULES
    for node in ast.parse(inspect.getsource(module)).body
    if isinstance(node, ast.FunctionDef)
}


def follow(module, node, is_cited=False):
    """Yield the steps that are cited below a node, in the order of the text.

    Where one function calls another, first those in there, then that of the call's line.
    """
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    here = []
    if (isinstance(node, ast.Call) and name in FUNCTIONS) or name in REACHES_OTHERS:
        here = CITED[module].get(node.lineno, [])
        # The place of the own slot is not a step, but what is stored there.
        arguments = set(map(ast.unparse, node.args)) if isinstance(node, ast.Call) else set()
        is_cited = is_cited or bool(here or arguments & {"me", "block.rank"})
        assert is_cited or name not in REACHES_OTHERS, f"{module.__name__}:{node.lineno}: {name}"
    for child in ast.iter_child_nodes(node):
        yield from follow(module, child, is_cited)
    if isinstance(node, ast.Call) and name in FUNCTIONS:
        within, function = FUNCTIONS[name]
        yield from (step for part in function.body for step in follow(within, part, is_cited))
    yield from here


def once(steps):
    """Leave out a step, or two, that repeat what comes just before: branches, parts of slots."""
    kept = []
    for step in steps:
        kept.append(step)
        for n in (1, 2):
            if kept[-n:] == kept[-2 * n : -n]:
                del kept[-n:]
    return kept


# With what the second turn of the model begins.
NEXT = {
    "one_shot": [],
    "pipelined": ["all filled"],
    "shared": [],
    "one_shot_copy": [],
    "pipelined_copy": ["fence"],
}


@pytest.mark.parametrize("kind", NEXT)
def test_the_rounds_take_the_steps_of_the_model(kind):
    """Up to the end of the first turn, in the order of the text."""
    written = once(follow(reduce_kernels, ast.parse(f"{kind}(0)", mode="eval").body))
    modelled = once(steps_of(kind))
    assert written == modelled[: len(written)]
    assert modelled[len(written) :][:1] == NEXT[kind]


def test_two_ranks_that_meet_before_take_the_steps_of_the_model():
    """In the text: the meeting, what they do where not both are in place, and where they are."""
    written = once(follow(reduce_kernels, ast.parse("direct(0)", mode="eval").body))
    direct, elsewhere = once(steps_of("direct")), once(steps_of("elsewhere"))
    met = direct.index("times") + 1
    turn = direct[met : direct.index("read") + 1]
    assert written[-len(turn) :] == turn
    assert written[: -len(turn)] == elsewhere[: len(written) - len(turn)]
    assert written[:met] == direct[:met]
    assert written[-len(turn) - 1] == "results"  # that is a whole turn, too


def test_no_step_is_in_the_code_or_in_the_model_alone():
    in_code = {step for lines in CITED.values() for steps in lines.values() for step in steps}
    assert in_code == {step for kind in KINDS for step in steps_of(kind)}
