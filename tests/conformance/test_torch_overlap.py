"""Gradients of PyTorch reduced during the backward pass: the same bits as in the step."""

import contextlib
import functools
import threading
import time

import numpy as np
import pytest

import collectives as cc
import strategies
from requirements import installed
from strategies.averaging import bucket_copy
from strategies.errors import OpError

torch = installed("torch")

LAYERS = 4
STEPS = 8


def network(dtype=torch.float32):
    made = torch.Generator().manual_seed(1)
    layers = []
    for _ in range(LAYERS):
        layer = torch.nn.Linear(5, 5, dtype=dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=made, dtype=dtype))
        layers += [layer, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def batch(comm, step, rows=3):
    made = torch.Generator().manual_seed(100 * step + comm.rank)
    return torch.randn((rows, 5), generator=made)


def backward(model, x):
    model(x).square().mean().backward()


class Watched:
    """A communicator that notes which places in its buckets become ready by themselves."""

    def __init__(self, comm):
        self.comm = comm
        self.ready = []

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def plan_buckets(self, *args, **options):
        buckets = self.comm.plan_buckets(*args, **options)
        ready = buckets.ready

        def noted(index, value=None):
            self.ready.append(index)
            ready(index, value)

        buckets.ready = noted
        return buckets


class Twins:
    """Two models that train alike, one with overlap."""

    def __init__(self, comm, **options):
        self.comm = comm = Watched(comm)
        self.models = [network(), network()]
        self.optimizers = [
            strategies.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
                named_parameters=model.named_parameters(),
                comm=comm,
                overlap=overlap,
                bucket_bytes=64,  # so that there are several
                **options,
            )
            for model, overlap in zip(self.models, (False, True), strict=True)
        ]

    def each(self, act):
        """Let both do something; returns what it was with overlap."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            result = act(model, optimizer)
        return result

    def train(self, act):
        """Let both make steps alike; returns what each step was with overlap."""
        results = []
        for step in range(STEPS):
            results.append(self.each(functools.partial(act, step)))
            self.check()
        return results

    def check(self):
        """The same bits in both models, and on all ranks."""
        plain, early = ([p.detach().numpy() for p in m.parameters()] for m in self.models)
        for one, other in zip(plain, early, strict=True):
            np.testing.assert_array_equal(one, other)
            everyones = self.comm.allgather(other[np.newaxis])
            np.testing.assert_array_equal(everyones, np.broadcast_to(other, everyones.shape))


@contextlib.contextmanager
def overlapped(comm, **options):
    """Twins whose optimizers are closed at the end."""
    twins = Twins(comm, **options)
    yield twins
    for optimizer in twins.optimizers:
        optimizer.close()


def test_gradients_are_reduced_before_the_step(comm):
    with overlapped(comm) as twins:

        def one(step, model, optimizer):
            optimizer.zero_grad()
            twins.comm.ready.clear()
            backward(model, batch(comm, step))
            before = sorted(twins.comm.ready)
            optimizer.step()
            return before

        assert twins.train(one) == [list(range(2 * LAYERS))] * STEPS


def change_in_place(model, optimizer):
    for parameter in model.parameters():
        parameter.grad.clamp_(-0.1, 0.1)


def change_uncounted(model, optimizer):
    for parameter in model.parameters():
        parameter.grad.data.clamp_(-0.1, 0.1)


def change_by_numpy(model, optimizer):
    model[2].weight.grad.numpy()[1, 1] = 7.0


def replace_one(model, optimizer):
    model[0].weight.grad = torch.ones_like(model[0].weight)


def drop_one(model, optimizer):
    model[2].bias.grad = None


def second_pass(model, optimizer):
    backward(model, torch.ones((2, 5)))


def start_again(model, optimizer):
    optimizer.zero_grad()
    backward(model, torch.ones((2, 5)))


def start_again_in_place(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    backward(model, torch.ones((2, 5)))


def give_up(model, optimizer):
    optimizer.zero_grad()


def look_first(model, optimizer):
    optimizer.synchronize()
    change_in_place(model, optimizer)


def look_first_and_change_uncounted(model, optimizer):
    optimizer.synchronize()
    change_uncounted(model, optimizer)


ACTS = [
    change_in_place, change_uncounted, change_by_numpy, replace_one, drop_one, second_pass,
    start_again, start_again_in_place, give_up,
]  # fmt: skip


@pytest.mark.parametrize("to_none", [True, False], ids=["new memory", "zeroed"])
@pytest.mark.parametrize(
    ("act", "everywhere"),
    [
        *[(act, True) for act in ACTS],
        *[(act, False) for act in ACTS],
        (look_first, True),
        (look_first_and_change_uncounted, True),
    ],
    ids=lambda value: {True: "all ranks", False: "one rank"}.get(value) or value.__name__,
)
def test_what_happens_between_backward_and_step_counts(comm, act, everywhere, to_none):
    def one(step, model, optimizer):
        optimizer.zero_grad(set_to_none=to_none)
        backward(model, batch(comm, step))
        if step % 3 == 1 and (everywhere or comm.rank == 0):
            act(model, optimizer)
        optimizer.step()

    with overlapped(comm) as twins:
        twins.train(one)


def test_numbers_of_examples_may_change_and_be_zero(comm):
    def one(step, model, optimizer):
        rows = (4, 4, 2 + comm.rank, 4, 4, comm.rank and 4, 4, 4)[step]
        if step == 5 and comm.size == 1:
            return  # no rank would have an example
        optimizer.zero_grad()
        backward(model, batch(comm, step, rows))  # NaN where there are no rows
        optimizer.step(examples=rows)

    with overlapped(comm) as twins:
        twins.train(one)
        assert all(torch.isfinite(p).all() for p in twins.models[1].parameters())


def test_the_last_of_several_passes_overlaps(comm):
    with overlapped(comm, backward_passes_per_step=3) as twins:

        def one(step, model, optimizer):
            optimizer.zero_grad(set_to_none=bool(step % 2))
            seen = []
            for turn in range(3):
                twins.comm.ready.clear()
                backward(model, batch(comm, 3 * step + turn))
                seen.append(sorted(twins.comm.ready))
            optimizer.step()
            return seen

        assert twins.train(one) == [[[], [], list(range(2 * LAYERS))]] * STEPS


def test_a_step_after_each_of_several_passes_reduces_nothing_twice(comm):
    passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    with overlapped(comm, **passes) as twins:

        def one(step, model, optimizer):
            twins.comm.ready.clear()
            for turn in range(2):
                backward(model, batch(comm, 2 * step + turn))
                if turn or step not in (2, 3):
                    optimizer.step()
                    optimizer.zero_grad()
            return bool(twins.comm.ready)

        # The first step is taken for one with its passes together, and step 3 follows such a one;
        # step 4 finds out that it is none.
        assert twins.train(one) == [step in (0, 3, 4) for step in range(STEPS)]


ZEROS = {
    "new memory": lambda optimizer: optimizer.zero_grad(),
    "zeroed": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "kept": lambda optimizer: None,
}


@pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)
def test_layers_that_are_used_now_and_then(comm, zero):
    def one(step, model, optimizer):
        zero(optimizer)
        turn = step * (comm.rank + 1)
        used = [layer for i, layer in enumerate(model) if (i + turn) % 3]
        backward(torch.nn.Sequential(*used), batch(comm, step))
        optimizer.step()

    with overlapped(comm) as twins:
        twins.train(one)


def test_steps_without_a_backward_pass(comm):
    def one(step, model, optimizer):
        if step % 3 == 0:
            backward(model, batch(comm, step))
        optimizer.step()

    with overlapped(comm) as twins:
        twins.train(one)


def test_averages_outlast_the_end(comm):
    twins = Twins(comm)
    for step in range(2):

        def one(model, optimizer, step=step):
            optimizer.zero_grad()
            backward(model, batch(comm, step))
            optimizer.synchronize()

        twins.each(one)
    twins.each(lambda model, optimizer: optimizer.close())
    plain, early = ([p.grad.numpy() for p in m.parameters()] for m in twins.models)
    for one_grad, other in zip(plain, early, strict=True):
        np.testing.assert_array_equal(one_grad, other)


def test_options_hold_as_in_the_step(comm):
    def one(step, model, optimizer):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        backward(model, batch(comm, step))
        optimizer.step()

    options = {"clip_global_norm": 0.01, "gradient_predivide_factor": 2.0}
    with overlapped(comm, compression=cc.FP16, **options) as twins:
        twins.train(one)


@pytest.mark.parametrize("compression", [cc.FP16, cc.INT8], ids=str)
def test_what_rounding_leaves_over_is_kept_once(comm, compression):
    """Also where gradients are reduced twice, or the step is an error."""
    models = [network(), network()]
    optimizers = [
        strategies.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), comm=comm, overlap=overlap,
            bucket_bytes=128, compression=compression.with_feedback(),
        )
        for model, overlap in zip(models, (False, True), strict=True)
    ]  # fmt: skip
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, batch(comm, step))
            if step % 3 == 1:
                change_uncounted(model, optimizer)
            if step == 5:
                with pytest.raises(ValueError, match="no rank has an example"):
                    optimizer.step(examples=0)
            else:
                optimizer.step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            np.testing.assert_array_equal(one.detach().numpy(), other.detach().numpy())
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.parametrize("rank", [0, -1], ids=["first rank", "last rank"])
def test_a_parameter_that_one_rank_has_frozen(comm, rank):
    def one(step, model, optimizer):
        if step == 4 and comm.rank == rank % comm.size:
            model[2].weight.requires_grad_(False)
        optimizer.zero_grad()
        backward(model, batch(comm, step))
        optimizer.step()

    with overlapped(comm) as twins:
        twins.train(one)


def test_parameters_that_join_or_change_their_dtype(comm):
    def one(step, model, optimizer):
        optimizer.zero_grad()
        x = batch(comm, step)
        if step == 3:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))]})
        if step >= 3:
            x = x * optimizer.param_groups[1]["params"][0]
        if step == 5:
            model.double()
        backward(model, x.double() if step >= 5 else x)
        optimizer.step()

    with overlapped(comm) as twins:
        twins.train(one)


def test_an_error_of_one_rank_is_raised_on_all_and_training_goes_on(comm):
    def one(step, model, optimizer):
        def closure():
            optimizer.zero_grad()
            backward(model, batch(comm, step))
            if step == 4 and comm.rank == comm.size - 1:
                raise ValueError("no loss today")
            return 1.0

        if step == 4:
            with pytest.raises((ValueError, OpError, cc.CollectiveError), match="no loss"):
                optimizer.step(closure)
        else:
            optimizer.step(closure)

    with overlapped(comm) as twins:
        twins.train(one)


def test_a_gradient_that_cannot_be_put_in_its_place_is_an_error_on_all(world, monkeypatch):
    failing = set()  # threads, each a rank

    def or_fail(function):
        def placed(*args):
            if threading.get_ident() in failing:
                raise MemoryError("no room for it")
            return function(*args)

        return placed

    for name in ("host_views", "copy_into"):
        monkeypatch.setattr(bucket_copy, name, or_fail(getattr(bucket_copy, name)))

    def check(comm):
        culprit = comm.rank == comm.size - 1

        def one(step, model, optimizer):
            optimizer.zero_grad()
            if step in (3, 6) and culprit:
                failing.add(threading.get_ident())
            # In step 6 when the first gradients are on their way.
            backward(model if step != 6 else model[:-2], batch(comm, step))
            if step in (3, 6):
                kinds = MemoryError if culprit else (OpError, RuntimeError, cc.MismatchError)
                with pytest.raises(kinds, match="no room for it"):
                    optimizer.step()
                failing.discard(threading.get_ident())
            else:
                optimizer.step()

        with overlapped(comm) as twins:
            twins.train(one)

    world.run(check)


def test_a_gradient_that_turns_sparse(comm):
    table = torch.nn.Parameter(torch.zeros((6, 2)))
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD([table], 1.0), comm=comm, overlap=True
    )
    expected = np.zeros((6, 2))
    for step in range(STEPS):
        sparse = step % 4 == 2
        optimizer.zero_grad()
        rows = torch.nn.functional.embedding(torch.tensor([comm.rank, 5]), table, sparse=sparse)
        rows.sum().backward()
        assert table.grad.is_sparse == sparse
        optimizer.step()
        for rank in range(comm.size):
            np.add.at(expected, [rank, 5], -1 / comm.size)
        np.testing.assert_allclose(table.detach().numpy(), expected, rtol=1e-6)


def test_buckets_are_released_between_backward_and_step(comm):
    twins = Twins(comm)
    for step in range(3):

        def one(model, optimizer, step=step):
            optimizer.zero_grad()
            if step < 2 or comm.rank == 0:
                backward(model, batch(comm, step))
            if step == 2:
                began = time.monotonic()
                optimizer.close()
                assert time.monotonic() - began < 5, "it has waited for other ranks"
            else:
                optimizer.step()

        twins.each(one)
    twins.check()


@pytest.mark.several
def test_ranks_with_other_parameters_are_told_when_it_is_made(comm):
    def made(size):
        sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(size))], 0.1)
        return strategies.DistributedOptimizer(sgd, comm=comm, overlap=True)

    with pytest.raises(cc.MismatchError, match=r"float32 of shape \(4,\) on rank 0"):
        made(3 if comm.rank else 4)
    made(3).close()


def test_only_arrays_that_come_one_by_one_overlap(comm):
    with pytest.raises(ValueError, match="all gradients are there at once"):
        strategies.DistributedOptimizer(strategies.SGD(0.1), comm=comm, overlap=True)


def early_steps(comm, act=lambda model: None, **options):
    """Make steps; returns how many places in buckets were ready before each of them."""
    comm, model = Watched(comm), network()
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), comm=comm, **options
    )
    counts = []
    for step in range(STEPS):
        optimizer.zero_grad()
        comm.ready.clear()
        backward(model, batch(comm, step))
        counts.append(len(comm.ready))
        act(model)
        optimizer.step()
    optimizer.close()
    return counts


def test_by_itself_it_overlaps_between_nodes_alone(comm):
    expected = 2 * LAYERS if comm.num_nodes > 1 else 0
    assert early_steps(comm) == [expected] * STEPS


def test_by_itself_it_gives_up_where_gradients_change_before_each_step(comm):
    def clip(model):
        if comm.rank == comm.size - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    counts = early_steps(comm, clip)
    if comm.num_nodes > 1:
        assert counts == [2 * LAYERS] * 3 + [0] * (STEPS - 3)
    assert early_steps(comm, clip, overlap=True) == [2 * LAYERS] * STEPS


def test_gradients_are_written_where_their_average_will_be(comm):
    model, alone = network(), network()
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), comm=comm, overlap=False
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(comm, step)
        with torch.no_grad():
            for one, other in zip(alone.parameters(), model.parameters(), strict=True):
                one.copy_(other)
                one.grad = None
        backward(model, x)
        backward(alone, x)
        own = [parameter.grad.data_ptr() for parameter in model.parameters()]
        for one, other in zip(alone.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # not averaged yet
        optimizer.step(examples=len(x) + comm.rank)
        averaged = [parameter.grad.data_ptr() for parameter in model.parameters()]
        assert (own == averaged) == (step > 0)
    optimizer.close()


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_in_their_places_and_others_are_averaged_alike(comm, scaled):
    parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(4)]
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD(parameters, 1.0), comm=comm, overlap=False
    )
    examples = [1 + rank if scaled else None for rank in range(comm.size)]
    weights = np.array([n or 1 for n in examples], float)
    for step in range(3):
        optimizer.zero_grad()
        own = [float(rank + step) for rank in range(comm.size)]
        used = [p for i, p in enumerate(parameters) if i != 2]
        (own[comm.rank] * sum(p.sum() for p in used)).backward()
        parameters[1].grad = torch.full((5,), -own[comm.rank])  # a new one
        parameters[2].grad = torch.ones(5)  # of which backward knew nothing
        if step == 1:
            parameters[3].grad = None if comm.rank else parameters[3].grad
        optimizer.synchronize(examples=examples[comm.rank])
        mean = float(np.average(own, weights=weights))
        third = own[0] * weights[0] / weights.sum() if step == 1 else mean
        for parameter, value in zip(parameters, (mean, -mean, 1.0, third), strict=True):
            np.testing.assert_allclose(parameter.grad, value, rtol=1e-6, atol=1e-7)
        optimizer.step()
    optimizer.close()
