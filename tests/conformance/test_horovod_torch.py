"""Horovod's names for PyTorch: gradients, sparse tensors, the optimizer."""

import contextlib
import copy

import numpy as np
import pytest
from adasum_oracle import combined

import collectives as cc
import strategies
from requirements import installed

torch = installed("torch")
hvd = pytest.importorskip("strategies.horovod.torch") if torch else None


@contextlib.contextmanager
def everyone(comm):
    """The process set of all ranks of a context on a communicator."""
    made = hvd.HorovodContext(comm)
    yield made.world
    made.close()


def rows_of(rank, *shape):
    made = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, generator=made, dtype=torch.float64)


FORWARD = {
    "average": lambda x, s: hvd.allreduce(x, name="a", prescale_factor=2.0, process_set=s),
    "sum": lambda x, s: hvd.allreduce(x, op=hvd.Sum, postscale_factor=3.0, process_set=s),
    "min": lambda x, s: hvd.allreduce(x, op=hvd.Min, process_set=s),
    "max": lambda x, s: hvd.allreduce(
        x, op=hvd.Max, prescale_factor=2.0, postscale_factor=3.0, process_set=s
    ),
    "product": lambda x, s: hvd.allreduce(x, op=hvd.Product, process_set=s),
    "group": lambda x, s: torch.cat(hvd.grouped_allreduce([x, 2 * x], process_set=s)),
    "fp16": lambda x, s: hvd.allreduce(x * 0, compression=hvd.Compression.fp16, process_set=s),
    "rows": lambda x, s: hvd.allgather(x[: 1 + (s.rank() or 0)], name="rows", process_set=s),
    "broadcast": lambda x, s: hvd.broadcast(x, s.size() - 1, process_set=s),
    "alltoall": lambda x, s: hvd.alltoall(x, process_set=s),
    "splits": lambda x, s: hvd.alltoall(
        x, splits=torch.tensor([len(x)] + [0] * (s.size() - 1)), process_set=s
    )[0],
    "groups of rows": lambda x, s: torch.cat(
        hvd.grouped_allgather([x[: 1 + (s.rank() or 0)], x], name="rows", process_set=s)
    ),
    "shares": lambda x, s: hvd.reducescatter(x, process_set=s),
    "shares of a sum": lambda x, s: hvd.reducescatter(
        x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0, process_set=s
    ),
    "groups of shares": lambda x, s: torch.cat(
        hvd.grouped_reducescatter([x, 2 * x], process_set=s)
    ),
}

# Horovod's gradients, by the number of ranks, as multiples of those of the sum of all losses.
TIMES = {
    **dict.fromkeys(("rows", "groups of rows", "broadcast"), lambda size: 1 / size),
    **dict.fromkeys(("shares", "shares of a sum", "groups of shares"), lambda size: size),
}


@pytest.mark.parametrize("name", FORWARD)
def test_gradients_are_those_of_horovod(comm, name):
    forward, times = FORWARD[name], TIMES.get(name, lambda size: 1)
    with everyone(comm) as ranks:
        x = rows_of(comm.rank, 2 * comm.size, 3).requires_grad_()
        y = forward(x, ranks)
        weights = rows_of(100 + comm.rank, *y.shape)
        (y * weights).sum().backward()

        def total(position, by):
            """The sum of all losses, with one number of the last rank's changed."""
            changed = x.detach().clone()
            if comm.rank == comm.size - 1:
                changed[position] += by
            with torch.no_grad():
                own = (forward(changed, ranks) * weights).sum()
            return comm.allreduce(own.item(), op=cc.SUM)

        for position in ((0, 1), (1, 2)):
            # Central differences: the error is of order 1e-8 by rounding, and by the step's square.
            slope = (total(position, 1e-6) - total(position, -1e-6)) / 2e-6
            if comm.rank == comm.size - 1:
                wanted = times(comm.size) * slope
                assert x.grad[position].item() == pytest.approx(wanted, abs=1e-6 * comm.size)


def test_bfloat16_is_added_in_32_bits(comm):
    with everyone(comm) as ranks:
        x = torch.full((5,), 1.0 if comm.rank else 256.0, dtype=torch.bfloat16)
        result = hvd.allreduce(x, op=hvd.Sum, process_set=ranks)
        exact = torch.tensor(256.0 + comm.size - 1).to(torch.bfloat16)
        assert result.dtype == torch.bfloat16
        assert (result == exact).all()
        hvd.allreduce_(x, op=hvd.Sum, process_set=ranks)
        assert (x == exact).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_adasum_of_tensors_and_of_their_gradients(comm, dtype):
    with everyone(comm) as ranks:
        kind, epsilon = getattr(torch, dtype), torch.finfo(getattr(torch, dtype)).eps

        def close(result, seed):
            values = [rows_of(seed + r, 3, 5).to(kind).double().numpy() for r in range(comm.size)]
            assert result.dtype == kind
            # A rounding in each of two rounds, of numbers of up to 4.
            limit = 16 * epsilon
            np.testing.assert_allclose(result.double(), combined(values), rtol=0, atol=limit)

        x = rows_of(comm.rank, 3, 5).to(kind).requires_grad_()
        y = hvd.allreduce(x, op=hvd.Adasum, name="x", process_set=ranks)
        close(y.detach(), 0)
        y.backward(rows_of(100 + comm.rank, 3, 5).to(kind))
        close(x.grad, 100)
        with torch.no_grad():
            hvd.allreduce_(x.t(), op=hvd.Adasum, process_set=ranks)
        close(x.detach(), 0)


def test_sparse_tensors(comm):
    with everyone(comm) as ranks:
        size = comm.size
        own = torch.sparse_coo_tensor(
            [[comm.rank, size]], [[1.0, 2.0], [3.0, 4.0]], (size + 1, 2), check_invariants=False
        )
        wait = hvd.sparse_allreduce_async(own, "rows", hvd.Sum, ranks)
        mean = hvd.allreduce(own, process_set=ranks)
        wanted = [[1.0, 2.0]] * size + [[3.0 * size, 4.0 * size]]
        assert wait().to_dense().tolist() == wanted
        np.testing.assert_allclose(mean.to_dense().numpy(), np.array(wanted) / size, rtol=1e-6)
        with pytest.raises(TypeError, match="expected a sparse tensor"):
            hvd.sparse_allreduce_async(torch.ones(2), process_set=ranks)
        if comm.rank:  # rank 0 has joined
            mean = hvd.allreduce(own, process_set=ranks)
            assert mean.to_dense()[[0, size]].tolist() == [[0, 0], [3, 4]]
        hvd.join(process_set=ranks)


def network():
    layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    model = torch.nn.Sequential(*layers).double()
    for i, p in enumerate(model.parameters()):  # ranks are threads, which share torch's generator
        p.data = rows_of(50 + i, *p.shape)
    return model


def batch_of(rank, step, rows=4):
    return rows_of(1000 * step + rank, rows, 6), rows_of(7000 * step + rank, rows, 2)


def train(model, optimizer, batches):
    for parts in batches:
        optimizer.zero_grad()
        for x, y in parts:
            (model(x) - y).square().mean().backward()
        optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def assert_as_one_process(own, steps):
    """Parameters are as one process leaves them that makes these steps."""
    alone = network()
    one = train(alone, torch.optim.SGD(alone.parameters(), 0.1), steps)
    for values, wanted in zip(own, one, strict=True):
        np.testing.assert_allclose(values, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"gradient_predivide_factor": 4.0}])
def test_the_optimizer_equals_one_process_with_all_rows(comm, options):
    with everyone(comm) as ranks:
        model = network()
        for p in model.parameters():
            p.data.mul_(1 + comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        hvd.broadcast_parameters(model.state_dict(), 0, process_set=ranks)
        hvd.broadcast_optimizer_state(optimizer, 0, process_set=ranks)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), process_set=ranks, **options
        )
        assert isinstance(optimizer, torch.optim.Optimizer)
        own = train(model, optimizer, [[batch_of(comm.rank, step)] for step in range(6)])
        for values in own:
            everyones = comm.allgather(values[np.newaxis])
            np.testing.assert_array_equal(everyones, np.broadcast_to(values, everyones.shape))
        alone = network()
        ranks_of_steps = [[batch_of(r, step) for r in range(comm.size)] for step in range(6)]
        joined = [[tuple(map(torch.cat, zip(*p, strict=True)))] for p in ranks_of_steps]
        one = train(alone, torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9), joined)
        for values, wanted in zip(own, one, strict=True):
            np.testing.assert_allclose(values, wanted, rtol=1e-9, atol=1e-12)
        own = train(model, optimizer, [[batch_of(comm.rank, step)] for step in range(6, 200)])
        for values in own:
            everyones = comm.allgather(values[np.newaxis])
            np.testing.assert_array_equal(everyones, np.broadcast_to(values, everyones.shape))
        optimizer.close()


def test_on_one_node_gradients_are_averaged_in_the_step(comm):
    with everyone(comm) as ranks:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), process_set=ranks
        )
        for _ in range(2):
            optimizer.zero_grad()
            x, y = batch_of(comm.rank, 0)
            (model(x) - y).square().mean().backward()
            own = [parameter.grad.data_ptr() for parameter in model.parameters()]
            optimizer.step()
        averaged = [parameter.grad.data_ptr() for parameter in model.parameters()]
        # With overlap the average is in another place than the gradient that it was made of.
        assert (own == averaged) == (comm.num_nodes == 1)
        optimizer.close()


def test_several_passes_and_another_number_of_them(comm):
    with everyone(comm) as ranks:
        model = network()
        plain = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), backward_passes_per_step=2, op=hvd.Sum,
            process_set=ranks,
        )  # fmt: skip
        train(model, optimizer, [[batch_of(comm.rank, k) for k in (1, 2)]])
        optimizer.set_backward_passes_per_step(1)
        own = train(model, optimizer, [[batch_of(comm.rank, 3)]])
        with pytest.raises(ValueError, match="expected an integer >= 1, got 0"):
            optimizer.set_backward_passes_per_step(0)
        steps = [[batch_of(r, k) for k in (1, 2) for r in range(comm.size)]]
        steps += [[batch_of(r, 3) for r in range(comm.size)]]
        assert_as_one_process(own, steps)
        optimizer.close()


def test_a_step_after_fewer_passes_updates_with_these(comm):
    with everyone(comm) as ranks:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(),
            backward_passes_per_step=3, op=hvd.Sum, process_set=ranks,
        )  # fmt: skip
        passes = [(1, 2, 3), (4, 5)]  # the end of an epoch
        own = train(model, optimizer, [[batch_of(comm.rank, k) for k in ks] for ks in passes])
        steps = [[batch_of(r, k) for k in ks for r in range(comm.size)] for ks in passes]
        assert_as_one_process(own, steps)
        optimizer.close()


def test_who_is_not_in_the_process_set_steps_alone(comm):
    made = hvd.HorovodContext(comm)
    some = made.world if comm.size == 1 else made.add([0])
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), process_set=some
    )
    steps = [[batch_of(comm.rank, 1)], [batch_of(comm.rank, 2)]]
    assert_as_one_process(train(model, optimizer, steps), steps)
    optimizer.close()
    made.close()


def test_batch_norm_is_over_the_rows_of_a_process_set(comm):
    with everyone(comm) as ranks:
        rows = [rows_of(rank, 4, 5) for rank in range(comm.size)]
        norm = hvd.SyncBatchNorm(5, process_set=ranks).double()
        wanted = torch.nn.BatchNorm1d(5).double()(torch.cat(rows))[4 * comm.rank :][:4]
        for made in (norm, copy.deepcopy(norm)):
            np.testing.assert_allclose(
                made(rows[comm.rank]).detach().numpy(),
                wanted.detach().numpy(),
                rtol=1e-9,
                atol=1e-12,
            )


def test_gradients_can_be_clipped_between_synchronize_and_step(comm):
    with everyone(comm) as ranks:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), process_set=ranks
        )
        for step in range(2):
            x, y = batch_of(comm.rank, step)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            before = [p.detach().clone() for p in model.parameters()]
            with optimizer.skip_synchronize():
                optimizer.step()
            pairs = zip(model.parameters(), before, strict=True)
            assert sum((p - b).square().sum() for p, b in pairs).sqrt().item() == pytest.approx(
                1e-4, rel=1e-2
            )
        optimizer.close()


ADASUM = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
}


@pytest.mark.parametrize("name", ADASUM)
@pytest.mark.parametrize("passes", [1, 2])
def test_adasum_combines_the_steps_of_all_ranks(comm, name, passes):
    with everyone(comm) as ranks:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            ADASUM[name](model.parameters()), model.named_parameters(), op=hvd.Adasum,
            backward_passes_per_step=passes, process_set=ranks,
        )  # fmt: skip
        assert isinstance(optimizer, torch.optim.Optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        # The same on one process: each rank's optimizer has a copy of the model.
        copies = [network() for _ in range(comm.size)]
        alone = [ADASUM[name](copy.parameters()) for copy in copies]
        for step in range(3):
            parts = [[batch_of(r, 10 * step + k) for k in range(passes)] for r in range(comm.size)]
            own = train(model, optimizer, [parts[comm.rank]])
            starts = [p.detach().clone().numpy() for p in copies[0].parameters()]
            for one, stepping, batches in zip(copies, alone, parts, strict=True):
                train(one, stepping, [batches])
            for i, (values, start) in enumerate(zip(own, starts, strict=True)):
                everyones = comm.allgather(values[np.newaxis])
                np.testing.assert_array_equal(everyones, np.broadcast_to(values, everyones.shape))
                trained = [list(one.parameters())[i] for one in copies]
                wanted = start + combined([p.detach().numpy() - start for p in trained])
                np.testing.assert_allclose(values, wanted, rtol=1e-9, atol=1e-12)
                for p in trained:
                    p.data.copy_(torch.from_numpy(wanted))
            scheduler.step()
            for stepping in alone:
                stepping.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]


@pytest.mark.several
def test_adasum_of_ranks_that_differ_or_have_joined(comm):
    with everyone(comm) as ranks:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=hvd.Adasum,
            compression=hvd.Compression.fp16, process_set=ranks,
        )  # fmt: skip
        with torch.no_grad():
            model[0].bias.add_(comm.rank)
        model(batch_of(comm.rank, 0)[0]).sum().backward()
        with pytest.raises(cc.MismatchError, match=r"hvd.broadcast_parameters.*0\.bias"):
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), 0, process_set=ranks)
        optimizer.step()
        last = comm.size - 1
        if comm.rank == last:  # the others have joined
            before = [p.detach().clone() for p in model.parameters()]
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            for p, old, gradient in zip(model.parameters(), before, gradients, strict=True):
                # float16 rounds the change to 11 bits.
                torch.testing.assert_close(p.detach(), old - 0.1 * gradient, rtol=0, atol=1e-3)
        assert hvd.join(process_set=ranks) == last


class Refuses(torch.optim.SGD):
    """An optimizer that changes its parameters, and then may raise an error."""

    refuses = False

    def step(self, closure=None):
        super().step(closure)
        if self.refuses:
            raise MemoryError("no room")


def no_loss():
    raise KeyError("no loss")


@pytest.mark.several
@pytest.mark.parametrize("failing", [0, -1])
def test_an_error_in_an_adasum_step_reaches_all_ranks(comm, failing):
    with everyone(comm) as ranks:
        failing %= comm.size
        model = network()
        inner = Refuses(model.parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(inner, op=hvd.Adasum, process_set=ranks)
        model(batch_of(comm.rank, 0)[0]).sum().backward()
        start = [p.detach().clone() for p in model.parameters()]
        for closure, words in ((no_loss, "no loss"), (None, "no room")):
            if comm.rank == failing:
                inner.refuses = closure is None
                with pytest.raises((KeyError, MemoryError), match=words):
                    optimizer.step(closure)
                inner.refuses = False
            else:
                text = rf"rank {failing} .*has raised an error: (Key|Memory)Error: .*{words}"
                with pytest.raises(cc.MismatchError, match=text):
                    optimizer.step()
            for p, before in zip(model.parameters(), start, strict=True):
                assert torch.equal(p, before)
        optimizer.step()
        for p in model.parameters():
            own = p.detach().numpy()[np.newaxis]
            np.testing.assert_array_equal(comm.allgather(own), own.repeat(comm.size, 0))


@pytest.mark.several
def test_wrong_use_of_the_adasum_optimizer(comm):
    with everyone(comm) as ranks:
        model = network()
        options = {"op": hvd.Adasum, "process_set": ranks}
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        for make, words in (
            (lambda: hvd.DistributedOptimizer(wrapped, **options), "wrapped already"),
            (
                lambda: hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), 0.1), gradient_predivide_factor=2.0,
                    **options,
                ),
                "gradient_predivide_factor is for Average",
            ),
            (lambda: hvd.DistributedOptimizer(strategies.SGD(0.1), **options), "of PyTorch"),
            (wrapped.skip_synchronize, "not possible with Adasum"),
            (lambda: scaler.step(wrapped), "expected training without one"),
        ):  # fmt: skip
            with pytest.raises((TypeError, ValueError), match=words):
                make()
        assert type(copy.copy(wrapped)) is torch.optim.SGD
