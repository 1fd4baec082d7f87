"""By which names errors and flight records call what users know of `strategies`."""

from __future__ import annotations

import numpy as np
import pytest

import inprocess
import strategies
from collectives.calls.group import Group
from collectives.tracing import call_sites
from requirements import installed


@pytest.fixture
def entries(monkeypatch):
    """The entries of all operations that are begun."""
    found = set()
    package = {"__name__": "collectives.somewhere", "begin": Group.begin, "found": found}
    package["current_origin"] = call_sites.current_origin
    exec(
        "def recorded(*args, **options):\n"
        "    found.add(current_origin().entry)\n"
        "    return begin(*args, **options)\n",
        package,
    )
    monkeypatch.setattr(Group, "begin", package["recorded"])
    return found


def entries_of(entries, prepare):
    """The entries in the step that `prepare(comm)` returns, after two steps."""

    def check(comm):
        step = prepare(comm)
        step()
        step()
        entries.clear()
        step()
        comm.close()
        return set(entries)

    (found,) = inprocess.run_ranks(1, check)
    return found


def test_an_optimizer_of_arrays_has_the_name_of_its_function(entries):
    def prepare(comm):
        optimizer = strategies.DistributedOptimizer(strategies.SGD(0.1), comm=comm)
        pair = np.ones(3), np.ones(3)
        return lambda: optimizer.apply_gradients([pair])

    assert entries_of(entries, prepare) == {"DistributedOptimizer.apply_gradients"}


def test_a_transformation_of_optax_has_it_also_in_a_compiled_program(entries):
    jax, optax = installed("jax"), installed("optax")

    for compiled in (False, True):
        for passes in (1, 2):

            def prepare(comm, compiled=compiled, passes=passes):
                tx = strategies.DistributedOptimizer(
                    optax.sgd(0.1), comm=comm, backward_passes_per_step=passes
                )
                update = jax.jit(tx.update) if compiled else tx.update
                params = {"w": jax.numpy.ones(3)}

                def step():
                    state = tx.init(params)
                    for _ in range(passes):
                        _, state = jax.block_until_ready(update(params, state, params))

                return step

            assert entries_of(entries, prepare) == {"DistributedOptimizer.update"}


@pytest.mark.parametrize("overlap", [False, True])
def test_an_optimizer_of_pytorch_has_it_also_in_the_backward_pass(entries, overlap):
    torch = installed("torch")

    def prepare(comm):
        model = torch.nn.Linear(3, 2)
        optimizer = strategies.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), comm=comm, overlap=overlap
        )

        def step():
            optimizer.zero_grad()
            model(torch.ones(3)).sum().backward()
            optimizer.step()

        return step

    backward = {"DistributedOptimizer"} if overlap else set()
    assert entries_of(entries, prepare) == {"DistributedOptimizer.step"} | backward


def test_a_process_group_has_the_name_of_its_module(entries):
    torch = installed("torch")
    from strategies.torch.backend import UnisonoGroup

    def prepare(comm):
        group = UnisonoGroup(comm, torch.distributed.HashStore(), 20.0)
        return lambda: group.broadcast([torch.ones(3)]).wait()

    assert entries_of(entries, prepare) == {"torch.distributed.broadcast"}


def test_what_has_no_other_name_keeps_its_own():
    package = {"__name__": "strategies.somewhere", "origin": call_sites.current_origin}
    exec(
        "class Plain:\n"
        "    def call(self):\n"
        "        return origin().entry\n"
        "    def __call__(self):\n"
        "        return origin().entry\n"
        "class Other(Plain): pass\n"
        "def function():\n"
        "    return origin().entry\n",
        package,
    )
    plain, other, function = package["Plain"](), package["Other"](), package["function"]
    assert (plain.call(), plain(), function()) == ("Plain.call", "Plain", "function")
    assert call_sites.known_as("Known")(package["Other"]) is package["Other"]
    assert call_sites.known_as("known.function")(function) is function
    assert (plain.call(), plain()) == ("Plain.call", "Plain")
    assert (other.call(), other(), function()) == ("Known.call", "Known", "known.function")
