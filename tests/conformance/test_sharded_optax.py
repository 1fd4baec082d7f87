"""Sharded state of Optax transformations: as without sharding, in a P-th of the memory."""

from __future__ import annotations

import math
import tempfile

import numpy as np
import pytest

import collectives as cc
import strategies
from conftest import UNDER_MPI
from inprocess import run_ranks
from requirements import installed
from strategies.checkpoint import Saver, Slice

jax, optax = installed("jax"), installed("optax")
from strategies.jax import sharded_transformation  # noqa: E402  (needs JAX)

jnp = jax.numpy

STEPS = 5
SHAPES = {"w": (6, 4), "layer": {"wide": (2, 9), "b": (7,)}, "one": (1, 1), "n": (), "none": (0, 3)}
HALVES = {"w": "bfloat16"}


@pytest.fixture(params=["compiled", "not compiled"])
def compiled(request, world):
    """Ranks that are threads share a device, on which JAX makes ordered calls one by one."""
    if request.param == "compiled":
        if not UNDER_MPI and world.size > 1:
            pytest.skip("compiled programs of several ranks need a process for each")
        return jax.jit
    return lambda function: function


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the check for elementwise transformations, which compiles for a second per rank."""
    monkeypatch.setattr(sharded_transformation, "_check_elementwise", lambda *_: None)


def tree_of(*seed, dtypes=()):
    random = np.random.default_rng(seed)

    def array(path, shape):
        dtype = dict(dtypes).get(path[0].key, "float32")
        return jnp.asarray(1 + random.standard_normal(shape), dtype)

    return jax.tree_util.tree_map_with_path(
        array, SHAPES, is_leaf=lambda node: isinstance(node, tuple)
    )


def starts():
    return tree_of(3)


def masked(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


KINDS = {
    "momentum": lambda: optax.sgd(0.1, 0.9, nesterov=True),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1, mask=masked),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 4)),
    "by label": lambda: optax.multi_transform(
        {"fast": optax.adam(0.1), "slow": optax.sgd(0.01, 0.9)},
        {"w": "fast", "layer": {"wide": "slow", "b": "fast"}} | dict.fromkeys(
            ["one", "n", "none"], "slow"
        ),
    ),
}  # fmt: skip


class Training:
    """Parameters and a distributed transformation."""

    def __init__(self, comm, kind, compiled=lambda function: function, **options):
        self.tx = strategies.DistributedOptimizer(KINDS[kind](), comm=comm, **options)
        self.params = starts()
        self.state = compiled(self.tx.init)(self.params)
        self.update = compiled(self.tx.update)

    def step(self, rank, step, dtypes=(), **told):
        gradients = tree_of(17, rank, step, dtypes=dtypes)
        updates, self.state = self.update(gradients, self.state, self.params, **told)
        # Errors of a compiled step belong to this one.
        self.params = jax.block_until_ready(optax.apply_updates(self.params, updates))

    def things(self):
        is_whole = not hasattr(self.tx, "to_slices")
        state = self.state if is_whole else self.tx.to_slices(self.state, self.params)
        return {"params": self.params, "state": state}

    def restore(self, checkpoints):
        saver = Saver(checkpoints, **self.things())
        saver.restore()
        self.params, self.state = saver["params"], saver["state"]
        if hasattr(self.tx, "from_slices"):
            self.state = self.tx.from_slices(self.state)


def assert_alike(comm, own, whole):
    for x, exact in zip(jax.tree.leaves(own.params), jax.tree.leaves(whole.params), strict=True):
        # Sums of `size` float32 numbers in another order, in 5 steps; Adam divides by means down
        # to a tenth of them.
        np.testing.assert_allclose(x, exact, rtol=0, atol=STEPS * comm.size * 10 * 2.0**-22)
        everyones = comm.allgather(np.asarray(x)[np.newaxis])
        np.testing.assert_array_equal(everyones, np.broadcast_to(x, everyones.shape))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_those_without_sharding(comm, compiled, kind):
    whole = Training(comm, kind, compiled)
    own = Training(comm, kind, compiled, shard_state=True)
    for step in range(STEPS):
        whole.step(comm.rank, step)
        own.step(comm.rank, step)
    assert_alike(comm, own, whole)


OPTIONS = {
    "clipped": {"clip_global_norm": 1.0}, "sum": {"op": cc.SUM},
    "split": {"gradient_predivide_factor": 2.0}, "passes": {"backward_passes_per_step": 2},
    "examples": {}, "compared": {"compare_every": 2},
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("options", OPTIONS)
def test_options_are_those_without_sharding(comm, compiled, options):
    told = {"examples": 3 + comm.rank} if options == "examples" else {}
    whole = Training(comm, "adam", compiled, **OPTIONS[options])
    own = Training(comm, "adam", compiled, shard_state=True, **OPTIONS[options])
    for step in range(STEPS):
        whole.step(comm.rank, step, **told)
        own.step(comm.rank, step, **told)
    assert_alike(comm, own, whole)


@pytest.mark.usefixtures("unchecked")
def test_updates_keep_their_dtype(comm, compiled):
    """Of bfloat16 gradients, to which the decay adds float32 parameters."""
    whole = Training(comm, "adamw", compiled)
    own = Training(comm, "adamw", compiled, shard_state=True)
    for step in range(2):
        whole.step(0, step, HALVES)
        own.step(0, step, HALVES)
    gradients = tree_of(1, dtypes=HALVES)
    kinds = [jax.tree.map(lambda x: str(x.dtype), x.update(gradients, x.state, x.params)[0])
             for x in (own, whole)]  # fmt: skip
    assert kinds[0] == kinds[1]
    assert_alike(comm, own, whole)


@pytest.mark.usefixtures("unchecked")
def test_each_rank_holds_a_part_of_the_state(comm, compiled):
    own = Training(comm, "adam", compiled, shard_state=True)
    own.step(comm.rank, 0)
    assert int(own.state.rank) == comm.rank
    slices = [x for x in jax.tree.leaves(own.things()["state"]) if isinstance(x, Slice)]
    every = comm.allgather(np.array([sum(x.array.nbytes for x in slices)]))
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(own.params) if x.ndim]
    assert every.sum() == 2 * 4 * sum(sizes)
    # A part of each of four arrays more or less, along their longest axis.
    assert every.max() <= every.sum() / comm.size + 2 * 4 * (4 + 2 + 1 + 1)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", ["momentum", "injected"])
def test_a_checkpoint_resumes_with_fewer_ranks_and_without_sharding(comm, kind):
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    options = {"backward_passes_per_step": 2} if kind == "momentum" else {}
    first = Training(comm, kind, shard_state=True, **options)
    for step in range(2):
        first.step(comm.rank, step)
    with strategies.CheckpointManager(folder, comm=comm, sharded=True) as checkpoints:
        Saver(checkpoints, **first.things()).save(2)

    def resumed(some, **sharded):
        """All ranks of a group go on with the gradients of rank 0."""
        own = Training(some, kind, **options, **sharded)
        with strategies.CheckpointManager(folder, comm=some, sharded=True) as checkpoints:
            own.restore(checkpoints)
        for step in range(2, STEPS):
            own.step(0, step)
        return own

    same, alone = resumed(comm, shard_state=True), resumed(comm)
    half = comm.split(comm.rank * 2 // comm.size)
    fewer = resumed(half, shard_state=True)
    half.close()
    for other in (alone, fewer):
        assert_alike(comm, same, other)


@pytest.mark.usefixtures("unchecked")
def test_a_checkpoint_without_sharding_is_cut(comm):
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    whole = Training(comm, "adam")
    own = Training(comm, "adam", shard_state=True)
    whole.step(comm.rank, 0)
    with strategies.CheckpointManager(folder, comm=comm, sharded=True) as checkpoints:
        Saver(checkpoints, **whole.things()).save(1)
        own.restore(checkpoints)
    for step in range(1, STEPS):
        whole.step(comm.rank, step)
        own.step(comm.rank, step)
    assert_alike(comm, own, whole)


ERRORS = (ValueError, cc.MismatchError, jax.errors.JaxRuntimeError)


@pytest.mark.usefixtures("unchecked")
def test_the_state_of_another_rank_is_an_error_on_all(comm, compiled):
    own = Training(comm, "adam", compiled, shard_state=True)
    state = own.state
    if comm.rank == comm.size - 1:
        own.state = state._replace(rank=state.rank + 1)
    words = f"expected the state of rank {comm.size - 1}, from init or from_slices, got that of"
    with pytest.raises(ERRORS, match=words):
        own.step(comm.rank, 0)
    own.state, own.params = state, starts()
    own.step(comm.rank, 0)
    assert np.isfinite(own.params["w"]).all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.several
def test_other_parameters_or_rates_of_a_rank_are_an_error_on_all(comm, compiled):
    odd = comm.rank == comm.size - 1
    own = Training(comm, "injected", compiled, shard_state=True)
    start = own.params
    own.params = jax.tree.map(lambda x: x + odd, start)
    with pytest.raises(
        ERRORS, match=rf"parameters, \['layer'\]\['b'\]: .* on rank {comm.size - 1}"
    ):
        own.step(0, 0)
    own.params = start
    own.state = Training(comm, "injected", compiled, shard_state=True).state
    own.step(0, 0)
    own.state.inner.hyperparams["b1"] = jnp.float32(0.5 if odd else 0.9)
    with pytest.raises(ERRORS, match=rf"hyperparams\['b1'\] is .* on rank {comm.size - 1}"):
        own.step(0, 1)


@pytest.mark.usefixtures("unchecked")
def test_an_update_needs_the_parameters(comm):
    own = Training(comm, "momentum", shard_state=True)
    with pytest.raises(ValueError, match=r"expected update\(gradients, state, params\), got no pa"):
        own.tx.update(own.params, own.state)
    own.step(comm.rank, 0)


REFUSED = {
    "clipped": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        r"got chain, which updates elements by other elements, \['layer'\]\['b'\]; clip_global",
    ),
    "clipped passes": (
        lambda: optax.MultiSteps(optax.clip_by_global_norm(1.0), 4), "got MultiSteps, which updates"
    ),
    "lars": (lambda: optax.lars(0.1), "which updates elements by other elements"),
    "noise": (lambda: optax.add_noise(0.1, 0.1, 1), "got add_noise, which updates"),
    "finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 5), "got apply_if_finite, which upd"),
    "central": (lambda: optax.centralize(), r"got centralize, which updates .* \['layer'\]\['wide"),
    "factored": (
        lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        r"got scale_by_factored_rms, which has state for several elements, state.v_row\['one'\]",
    ),
    "lbfgs": (lambda: optax.lbfgs(), "which has state for several elements"),
    "line search": (
        lambda: optax.scale_by_backtracking_linesearch(5),
        "which raises TypeError for a part of each parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_transformations_that_are_not_elementwise_are_refused(case):
    make, words = REFUSED[case]

    def check(comm):
        tx = strategies.DistributedOptimizer(make(), comm=comm, shard_state=True)
        with pytest.raises(ValueError, match=words):
            tx.init(starts())

    run_ranks(1, check)


ACCEPTED = {
    **KINDS,
    "chain": lambda: optax.chain(optax.zero_nans(), optax.clip(1.0), optax.lion(0.1)),
    "passes": lambda: optax.MultiSteps(optax.rmsprop(0.1), 4),
    "plateau": lambda: optax.contrib.reduce_on_plateau(),
    "averaged": lambda: optax.contrib.schedule_free_sgd(0.1),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_elementwise_transformations_are_accepted(kind):
    def check(comm):
        tx = strategies.DistributedOptimizer(ACCEPTED[kind](), comm=comm, shard_state=True)
        jax.jit(tx.init)(starts())

    run_ranks(1, check)
