"""DistributedOptimizer of PyTorch: the same program on any number of ranks."""

import copy
import io
import pickle

import numpy as np
import pytest

import collectives as cc
import oracle
import strategies
import strategies.horovod.common as hvd
from requirements import installed

torch = installed("torch")


class Network(torch.nn.Module):
    """Two layers; one that a batch may not use, and one that none does."""

    def __init__(self, seed=0):
        super().__init__()
        made = torch.Generator().manual_seed(seed)

        def weights(*shape):
            return torch.nn.Parameter(torch.randn(shape, generator=made, dtype=torch.float64))

        self.w1, self.w2, self.sometimes, self.never = (
            weights(6, 5), weights(5, 2), weights(2), weights(3)
        )  # fmt: skip

    def forward(self, x, sometimes=False):
        y = torch.tanh(x @ self.w1) @ self.w2
        return y + self.sometimes if sometimes else y


def batches_of(rank, steps=6, rows=4):
    random = np.random.default_rng([7, rank])
    return [
        (torch.tensor(random.standard_normal((rows, 6))), torch.tensor(random.random((rows, 2))))
        for _ in range(steps)
    ]


def joined(ranks):
    return oracle.joined(ranks, torch.cat)


def loss_of(model, x, y, **options):
    return (model(x, **options) - y).square().mean()


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return model


def values(model):
    return [p.detach().numpy() for p in model.parameters()]


def assert_alike(comm, model, expected=None, rtol=1e-9):
    """All ranks have the same bits, and the expected values."""
    for i, own in enumerate(values(model)):
        everyones = comm.allgather(own[np.newaxis])
        np.testing.assert_array_equal(everyones, np.broadcast_to(own, everyones.shape))
        if expected is not None:
            # float64; some 100 roundings per step, amplified by Adam's division.
            np.testing.assert_allclose(own, values(expected)[i], rtol=rtol, atol=1e-11)


OPTIMIZERS = {
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "adam fused": lambda ps: torch.optim.Adam(ps, 0.01, fused=True),
}


OVERLAP = [False]


@pytest.fixture(autouse=True, params=[False, True], ids=["in the step", "overlapped"])
def overlap(request):
    """All tests hold whether gradients are reduced in the step or before."""
    OVERLAP[0] = request.param


def overlaps(options):
    """Whether a test is to ask for overlap where it does not itself."""
    kept = options.get("compression", cc.NONE).residuals is not None
    return OVERLAP[0] and options.get("backward_passes_per_step", 1) == 1 and not kept


def wrapped(comm, model, kind="momentum", **options):
    options.setdefault("overlap", overlaps(options))
    return strategies.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()),
        named_parameters=model.named_parameters(),
        comm=comm,
        **options,
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_one_process_on_all_rows(comm, kind):
    ranks = [batches_of(r) for r in range(comm.size)]
    alone = Network()
    train(alone, OPTIMIZERS[kind](alone.parameters()), joined(ranks))
    model = Network(seed=comm.rank)
    optimizer = wrapped(comm, model, kind)
    strategies.broadcast_parameters(model.state_dict(), comm=comm)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, type(optimizer.optimizer))  # the class of the wrapped one
    train(model, optimizer, ranks[comm.rank])
    assert_alike(comm, model, alone)
    assert model.never.grad is None


def test_zero_grad_in_place_and_forgotten_zero_grad(comm):
    ranks = [batches_of(r) for r in range(comm.size)]
    for zero in (lambda o: o.zero_grad(set_to_none=False), lambda o: None):
        alone, model = Network(), Network()
        optimizers = [
            (alone, OPTIMIZERS["momentum"](alone.parameters()), joined(ranks)),
            (model, wrapped(comm, model), ranks[comm.rank]),
        ]
        for net, optimizer, batches in optimizers:
            for x, y in batches:
                zero(optimizer)
                loss_of(net, x, y).backward()
                optimizer.step()
        assert_alike(comm, model, alone)


def test_uneven_examples_and_ranks_without_any(comm):
    ranks = [batches_of(r, rows=0 if r == 1 else r + 2) for r in range(comm.size)]
    alone, model = Network(), Network()
    train(alone, OPTIMIZERS["momentum"](alone.parameters()), joined(ranks))
    optimizer = wrapped(comm, model)
    for x, y in ranks[comm.rank]:
        optimizer.zero_grad()
        if len(x) or comm.size % 2:  # a mean over no rows is NaN
            loss_of(model, x, y).backward()
        optimizer.step(examples=len(x))
    assert_alike(comm, model, alone)


@pytest.mark.parametrize("weighted", [False, True])
def test_ranks_that_join_are_left_out_of_the_mean(comm, weighted):
    alone, model = Network(), Network()
    reference, optimizer = OPTIMIZERS["momentum"](alone.parameters()), wrapped(comm, model)
    ranks = [batches_of(r, steps=1 + 2 * r) for r in range(comm.size)]
    last = comm.size - 1
    options = {"examples": 4} if weighted else {}

    def step_with(net, wrapper, x, y, **how):
        wrapper.zero_grad()
        loss_of(net, x, y).backward()
        wrapper.step(**how)
        for group in wrapper.param_groups:  # a rank that has joined does not follow a schedule
            group["lr"] *= 0.9

    for _ in range(2):
        for step in range(len(ranks[last])):
            left = [batches[step] for batches in ranks if step < len(batches)]
            step_with(alone, reference, *(torch.cat(part) for part in zip(*left, strict=True)))
        for x, y in ranks[comm.rank]:
            step_with(model, optimizer, x, y, **options)
        optimizer.join()
        strategies.broadcast_parameters(model.state_dict(), last, comm=comm)
        strategies.broadcast_optimizer_state(optimizer, last, comm=comm)
        assert_alike(comm, model, alone)


@pytest.mark.several
def test_a_rank_may_join_before_its_first_step(comm):
    model = Network()
    optimizer = wrapped(comm, model)
    before = values(model)[0].copy()
    if comm.rank != 0:
        train(model, optimizer, batches_of(1, steps=2))
    optimizer.join()
    assert (values(model)[0] == before).all() == (comm.rank == 0)


def test_parameters_that_only_some_ranks_use(comm):
    model, alone = Network(), Network()
    optimizer = wrapped(comm, model)
    ranks = [batches_of(r) for r in range(comm.size)]
    other = OPTIMIZERS["momentum"](alone.parameters())
    for step, (x, y) in enumerate(ranks[comm.rank]):
        user = step % comm.size  # another one in each step; in step 3 none
        optimizer.zero_grad()
        loss_of(model, x, y, sometimes=comm.rank == user and step != 3).backward()
        optimizer.step()
        assert (model.sometimes.grad is None) == (step == 3)
        other.zero_grad()
        losses = [
            loss_of(alone, *ranks[r][step], sometimes=r == user and step != 3)
            for r in range(comm.size)
        ]
        (sum(losses) / comm.size).backward()
        other.step()
    assert_alike(comm, model, alone)


def test_parameters_may_be_frozen_thawed_and_added(comm):
    model, alone = Network(), Network()
    ranks = [batches_of(r) for r in range(comm.size)]
    pairs = [
        (model, None, ranks[comm.rank]),
        (alone, torch.optim.SGD([alone.w1], 0.1), joined(ranks)),
    ]
    for net, optimizer, batches in pairs:
        optimizer = optimizer or strategies.DistributedOptimizer(
            torch.optim.SGD([net.w1], 0.1), comm=comm
        )
        net.w1.requires_grad_(False)
        for step, (x, y) in enumerate(batches):
            net.w1.requires_grad_(step > 1)
            if step == 3:
                optimizer.add_param_group({"params": [net.w2], "lr": 0.01})
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()
    assert_alike(comm, model, alone)


@pytest.mark.parametrize("each", [False, True], ids=["step once", "step each time"])
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
def test_passes_add_up_before_ranks_communicate(comm, each, mean):
    ranks = [batches_of(r) for r in range(comm.size)]
    three = [
        [tuple(map(torch.cat, zip(*r[i : i + 3], strict=True))) for i in (0, 3)] for r in ranks
    ]
    alone, model = Network(), Network()
    rate = 0.1 if mean else 0.3
    train(alone, torch.optim.SGD(alone.parameters(), rate), joined(three))
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), comm=comm,
        backward_passes_per_step=3, average_aggregated_gradients=mean,
    )  # fmt: skip
    for i, (x, y) in enumerate(ranks[comm.rank]):
        before = model.w1.detach().clone()
        if each or i % 3 == 0:
            optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if each or i % 3 == 2:
            optimizer.step()
        assert torch.equal(before, model.w1) == (i % 3 != 2)
    assert_alike(comm, model, alone)


def test_more_passes_than_announced_and_fewer_are_no_trap(comm):
    ranks = [batches_of(r) for r in range(comm.size)]
    alone, model = Network(), Network()
    exact = torch.optim.SGD(alone.parameters(), 0.1)
    optimizer = strategies.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), comm=comm)
    for net, made, batches in ((alone, exact, None), (model, optimizer, ranks[comm.rank])):
        for step in range(3):
            made.zero_grad()
            # A rank may call backward more often than another: `.grad` adds up.
            for r in range(comm.size) if batches is None else [comm.rank]:
                for _ in range(1 + r % 2):
                    scale = comm.size if batches is None else 1
                    (loss_of(net, *ranks[r][step]) / scale).backward()
            made.step()
    assert_alike(comm, model, alone)
    # Gradients that were thrown away before the step are gone on all ranks.
    before = values(model)[0].copy()
    loss_of(model, *ranks[comm.rank][0]).backward()
    optimizer.zero_grad()
    optimizer.step()
    np.testing.assert_array_equal(before, values(model)[0])
    loss_of(model, *ranks[comm.rank][0]).backward()
    assert optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.step()
    np.testing.assert_array_equal(before, values(model)[0])


def convolutions():
    """A convolution, and one whose kernels have one element."""
    made = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1)).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=made, dtype=torch.float64)
    return model


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_gradient_has_the_strides_of_its_parameter(comm, clip):
    x = torch.tensor(np.random.default_rng(comm.rank).random((2, 3, 5, 5)))
    trained = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = convolutions().to(memory_format=memory_format)
        optimizer = wrapped(comm, model, clip_global_norm=clip)
        for _ in range(3):
            optimizer.zero_grad()
            model(x.to(memory_format=memory_format)).square().sum().backward()
            optimizer.step()
            for parameter in model.parameters():
                assert parameter.grad.stride() == parameter.stride()
        trained.append(model)
    assert trained[1][0].weight.stride() == (27, 1, 9, 3)
    # Sums in another order, 3 steps that multiply: as `assert_alike`.
    assert_alike(comm, trained[1], trained[0])


def test_strides_that_differ_are_an_error_on_all(comm):
    odd = comm.rank == comm.size - 1 > 0
    model = convolutions()
    if not odd:
        model.to(memory_format=torch.channels_last)
    if comm.size > 1:
        words = r"\(4, 3, 3, 3\) with strides \(27, 1, 9, 3\) on rank 0, 0.weight: "
        with pytest.raises(cc.MismatchError, match=words):
            wrapped(comm, model)


def test_gradients_are_clipped_after_the_average(comm):
    ranks = [batches_of(r) for r in range(comm.size)]
    alone, byhand, builtin = Network(), Network(), Network()
    for net, batches in ((alone, joined(ranks)), (byhand, ranks[comm.rank])):
        optimizer = OPTIMIZERS["momentum"](net.parameters())
        if net is byhand:
            optimizer = strategies.DistributedOptimizer(optimizer, comm=comm)
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            if net is byhand:
                assert optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
    assert_alike(comm, byhand, alone)
    train(builtin, wrapped(comm, builtin, clip_global_norm=0.1), ranks[comm.rank])
    # PyTorch divides by the norm plus 1e-6: 6 steps of a relative 1e-5.
    assert_alike(comm, builtin, alone, rtol=1e-3)


def test_a_scaler_skips_a_step_on_all_ranks_where_one_overflows(comm):
    model, alone = Network(), Network()
    ranks = [batches_of(r) for r in range(comm.size)]
    optimizer = wrapped(comm, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, (x, y) in enumerate(ranks[comm.rank]):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        if step in (1, 4) and comm.rank == comm.size - 1:
            loss = loss * (float("inf") if step == 1 else float("nan"))
        scaler.scale(loss).backward()
        if step >= 3:  # with a look at the gradients in between
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        scales = comm.allgather([scaler.get_scale()])
        assert set(scales.tolist()) == {1024.0 / 2 ** ((step >= 1) + (step >= 4))}
    kept = [batch for step, batch in enumerate(joined(ranks)) if step not in (1, 4)]
    train(alone, OPTIMIZERS["momentum"](alone.parameters()), kept)
    assert_alike(comm, model, alone)


def test_a_scaler_that_looks_too_early_is_told(comm):
    model = Network()
    optimizer = wrapped(comm, model)
    scaler = torch.amp.GradScaler("cpu")
    ((x, y),) = batches_of(comm.rank, steps=1)
    scaler.scale(loss_of(model, x, y)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match=r"call optimizer\.synchronize\(\) before scaler"):
        scaler.step(optimizer)
    several = wrapped(comm, model, backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, x, y)).backward()
    with pytest.raises(ValueError, match="call scaler.step once after 2 backward passes"):
        scaler.step(several)


def test_schedulers_states_and_copies(comm):
    ranks = [batches_of(r) for r in range(comm.size)]
    alone, model = Network(), Network()
    exact = OPTIMIZERS["adam"](alone.parameters())
    optimizer = wrapped(comm, model, "adam")
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (exact, optimizer)]
    for net, made, schedule, batches in (
        (alone, exact, schedules[0], joined(ranks)),
        (model, optimizer, schedules[1], ranks[comm.rank]),
    ):
        for batch in batches[:3]:
            train(net, made, [batch])
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == exact.param_groups[0]["lr"] == 0.01 / 8
    assert {"param_groups", "state", "defaults", "synchronize"} <= {*dir(optimizer)}
    assert optimizer.state.keys() == {*model.parameters()} - {model.sometimes, model.never}
    # All of it as a checkpoint, and into new objects.
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    again = Network(seed=9)
    again.load_state_dict(saved["model"])
    resumed = wrapped(comm, again, "adam")
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, ranks[comm.rank][3:])
    train(alone, exact, joined(ranks)[3:])
    assert_alike(comm, again, alone)
    # Copies belong to no communicator, and hooks of a model are not in its copies.
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.Adam
    twin = copy.deepcopy(model)
    loss_of(twin, *ranks[comm.rank][0]).backward()
    stream = io.BytesIO()
    torch.save(model, stream)
    assert "Adam" in repr(optimizer)
    assert f"of {comm.size}" in repr(optimizer)


class TwoSteps(torch.optim.SGD if torch else object):
    """A sharpness-aware optimizer that also has methods without a step."""

    @torch.no_grad()
    def first_step(self, unseen=False):
        for p in self.param_groups[0]["params"]:
            self.state[p]["moved"] = p.grad * 0.05
            (p.data if unseen else p).add_(self.state[p]["moved"])  # .data is not counted
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["moved"]).sub_(p.grad, alpha=0.1)
        self.zero_grad()

    @torch.no_grad()
    def eval(self):
        for p in self.param_groups[0]["params"]:
            p.mul_(2.0).mul_(0.5)

    def largest(self):
        return max(float(p.grad.abs().max()) for p in self.param_groups[0]["params"])


def test_methods_that_step_need_averaged_gradients(comm):
    def backward(rank, net):
        x = torch.tensor(np.random.default_rng(rank).random((3, 2)))
        (net(x).square().mean() / (1 if net is model else comm.size)).backward()

    model, alone = torch.nn.Linear(2, 1).double(), torch.nn.Linear(2, 1).double()
    for net in (model, alone):
        torch.nn.init.ones_(net.weight)
        torch.nn.init.ones_(net.bias)
    exact = TwoSteps(alone.parameters())
    optimizer = strategies.DistributedOptimizer(
        TwoSteps(model.parameters()), comm=comm, overlap=overlaps({})
    )
    for _ in range(3):
        for method in ("first_step", "second_step"):
            backward(comm.rank, model)
            assert optimizer.largest() > 0
            optimizer.eval()
            assert optimizer.synchronize()
            getattr(optimizer, method)()
            for rank in range(comm.size):
                backward(rank, alone)
            getattr(exact, method)()
    assert_alike(comm, model, alone)
    backward(comm.rank, model)
    for unseen in (False, True):
        with pytest.raises(ValueError, match=r"first_step: .*optimizer.synchronize\(\) after"):
            optimizer.first_step(unseen)
        backward(comm.rank, model)


def test_hooks_of_the_wrapped_optimizer_run(comm):
    model = Network()
    optimizer = wrapped(comm, model)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.w1.grad.sum().item()))
    train(model, optimizer, batches_of(comm.rank)[:2])
    assert len(seen) == 2
    everyones = comm.allgather([seen])
    assert (everyones == everyones[0]).all()  # after the average


@pytest.mark.parametrize("kind", ["momentum", "lbfgs"])
def test_closures_take_the_same_way_on_all_ranks(comm, kind):
    def make(model):
        if kind == "lbfgs":
            return torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
        return OPTIMIZERS[kind](model.parameters())

    ranks = [batches_of(r, steps=2, rows=8) for r in range(comm.size)]
    alone, model = Network(), Network()
    losses = []
    for net, optimizer, batches in (
        (alone, make(alone), joined(ranks)),
        (model, strategies.DistributedOptimizer(make(model), comm=comm), ranks[comm.rank]),
    ):
        for x, y in batches:

            def closure(net=net, optimizer=optimizer, x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(net, x, y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
    # A line search amplifies roundings; what counts is that all ranks go the same way.
    np.testing.assert_allclose(losses[2:], losses[:2], rtol=1e-6)
    assert_alike(comm, model)

    def broken():
        raise OSError("no such batch")

    if comm.rank == comm.size - 1:
        with pytest.raises(OSError, match="no such batch"):
            optimizer.step(broken)
    else:
        with pytest.raises(RuntimeError, match="OSError: no such batch"):
            optimizer.step(closure)


@pytest.mark.parametrize("dense", [False, True], ids=["rows", "as dense"])
@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
def test_embeddings_with_sparse_gradients(comm, kind, dense):
    tables = []
    for size in (1, comm.size):
        table = torch.nn.Embedding(50, 3, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            table.weight.copy_(torch.arange(150.0).reshape(50, 3) / 100)
        optimizer = getattr(torch.optim, kind)(table.parameters(), 0.5)
        if size == comm.size and tables:
            optimizer = strategies.DistributedOptimizer(optimizer, comm=comm, sparse_as_dense=dense)
        for step in range(4):
            optimizer.zero_grad()
            looked_up = [[r, 40 + step, 40 + step] for r in range(comm.size)]
            looked_up[-1] = [0, 1, 2]
            weight = 1.0
            if tables:
                indices = [looked_up[comm.rank]]
            else:
                indices, weight = looked_up, 1 / comm.size
            # The last rank of several uses the table in even steps only.
            used = [
                i for r, i in enumerate(indices)
                if step % 2 == 0 or (comm.rank if tables else r) != comm.size - 1
            ]  # fmt: skip
            if used:
                (table(torch.tensor(used)).square().sum() * weight).backward()
            optimizer.step()
            assert table.weight.grad is None or table.weight.grad.is_sparse
        tables.append(table.weight.detach().numpy())
    np.testing.assert_allclose(tables[1], tables[0], rtol=1e-12)
    everyones = comm.allgather(tables[1][np.newaxis])
    np.testing.assert_array_equal(everyones, np.broadcast_to(tables[1], everyones.shape))


def test_compression_and_sixteen_bit_parameters(comm):
    parameter = torch.nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    optimizer = strategies.DistributedOptimizer(torch.optim.SGD([parameter], 1.0), comm=comm)
    (parameter * (comm.rank + 1)).sum().backward()
    optimizer.step()
    assert (parameter == -(comm.size + 1) / 2).all()
    parameter = torch.nn.Parameter(torch.zeros(300))
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD([parameter], 1.0), comm=comm, compression=cc.BF16.with_feedback()
    )
    for _ in range(20):
        optimizer.zero_grad()
        (parameter * (comm.rank + 1 / 3)).sum().backward()
        optimizer.step()
    exact = -20 * ((comm.size - 1) / 2 + 1 / 3)
    limit = 4 * comm.size * 2.0**-8 + 20 * abs(exact) * 2.0**-23
    np.testing.assert_allclose(parameter.detach(), exact, rtol=0, atol=limit)


def names_of(case, model):
    pairs = list(model.named_parameters())
    return {
        "missing": pairs[1:],
        "twice": [(name if i else "w2", p) for i, (name, p) in enumerate(pairs)],
        "no pairs": [p for _, p in pairs],
        "no tensors": [(name, 3) for name, _ in pairs],
    }[case]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("missing", ValueError, r"no name for a parameter .*position 0, shape \(6, 5\)"),
        ("twice", ValueError, "two parameters have one name, got 'w2'"),
        ("no pairs", TypeError, r"expected \(name, parameter\) pairs"),
        ("no tensors", TypeError, r"expected \(name, parameter\) pairs"),
    ],
)
def test_wrong_names_on_one_rank_are_errors_on_all(comm, case, kind, words):
    model = Network()
    named = list(model.named_parameters())
    if comm.rank == comm.size - 1:
        named = names_of(case, model)
    with pytest.raises(kind, match=words):
        strategies.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), named_parameters=named, comm=comm
        )
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_a_wrapped_optimizer_is_not_wrapped_again(comm):
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    wrapped = strategies.DistributedOptimizer(sgd, comm=comm)
    with pytest.raises(ValueError, match="is wrapped already and .*, got TorchOptimizer"):
        strategies.DistributedOptimizer(wrapped, comm=comm)
    made = hvd.HorovodContext(comm)
    with pytest.raises(ValueError, match="is wrapped already and .*, got TorchOptimizer"):
        hvd.DistributedOptimizer(wrapped, process_set=made.world)
    made.close()


@pytest.mark.several
def test_other_parameters_on_one_rank_are_one_error_on_all(comm):
    last = comm.rank == comm.size - 1
    model = Network()
    named = dict(model.named_parameters())
    order = ["w2", "w1"] if last else ["w1", "w2"]
    with pytest.raises(cc.MismatchError, match=r"w1: float64 of .* on rank 0, w2: float64 of"):
        strategies.DistributedOptimizer(
            torch.optim.SGD([named[name] for name in order], 0.1),
            named_parameters=named, comm=comm,
        )  # fmt: skip
    with pytest.raises(cc.MismatchError, match=r"optim\.sgd\.SGD on rank 0, .*Adam on rank"):
        wrapped(comm, model, "adam" if last else "momentum")
    optimizer = wrapped(comm, model)
    if last:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    ((x, y),) = batches_of(comm.rank, steps=1)
    loss_of(model, x, y).backward()
    with pytest.raises(cc.MismatchError, match="nothing on rank 0, parameter 4: float32"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["momentum", "adam", "lbfgs", "adagrad", "tensor rate"])
def test_optimizer_state_of_one_rank_reaches_all(comm, kind):
    root = comm.size - 1
    model = Network()

    def make(rate):
        ps = [model.w1, model.w2]
        return {
            "momentum": lambda: torch.optim.SGD(ps, rate, momentum=0.9),
            "adam": lambda: torch.optim.Adam(ps, rate, amsgrad=True, betas=(0.8, 0.9)),
            "lbfgs": lambda: torch.optim.LBFGS(ps, rate),
            "adagrad": lambda: torch.optim.Adagrad(ps, rate),
            "tensor rate": lambda: torch.optim.Adam(ps, torch.tensor(rate)),
        }[kind]()

    optimizer = make(0.5 if comm.rank == root else 0.1)
    ((x, y),) = batches_of(0, steps=1)
    if comm.rank == root:  # as after it has loaded a checkpoint that only it can read

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)
    strategies.broadcast_parameters(model.named_parameters(), root, comm=comm)
    result = strategies.broadcast_optimizer_state(optimizer, root, comm=comm)
    assert result is optimizer
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step(lambda: loss_of(model, x, y))
    assert_alike(comm, model)


class WithExtra(torch.nn.Module if torch else object):
    """A module with a buffer that is not persistent, and extra state."""

    def __init__(self, value):
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)
        self.register_buffer("cache", torch.full((2,), float(value)), persistent=False)
        self.extra = {"count": value, "bytes": bytes([value]), "other": {value}}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        if state["count"] < 0:
            raise ValueError("a negative count")
        self.extra = state


def test_all_buffers_and_extra_state_of_a_module_are_broadcast(comm):
    root = comm.size - 1
    model = torch.nn.Sequential(WithExtra(comm.rank))
    torch.nn.init.ones_(model[0].inner.weight)
    torch.nn.init.ones_(model[0].inner.bias)
    if comm.size > 1:
        words = r"check_consistent: .*, 0.cache: .* is not as on rank 0 \(and 2 more\)"
        with pytest.raises(cc.MismatchError, match=words):
            strategies.check_consistent(model, comm=comm)
    strategies.broadcast_parameters(model, root, comm=comm)
    strategies.check_consistent(model, comm=comm)
    assert model[0].cache.tolist() == [root] * 2
    assert model[0].extra == {"count": root, "bytes": bytes([root]), "other": {root}}
    shared = torch.nn.Sequential(model[0], model[0])  # one module by two names
    strategies.broadcast_parameters(shared, root, comm=comm)
    strategies.check_consistent(shared, comm=comm)
    if comm.size > 1:
        model[0].extra["count"] = -1
        with pytest.raises(ValueError, match="a negative count"):
            strategies.broadcast_parameters(model, root, comm=comm)


def test_running_means_of_a_model_are_broadcast(comm):
    model = torch.nn.BatchNorm1d(3)
    model(torch.full((4, 3), float(comm.rank + 1)))
    strategies.broadcast_parameters(model.state_dict(), comm=comm)
    np.testing.assert_allclose(model.running_mean, 0.1)
    assert model.num_batches_tracked == 1


@pytest.mark.several
@pytest.mark.parametrize("overlap", [False, True])
def test_a_forgotten_broadcast_or_another_rate_is_an_error_on_all(comm, overlap):
    odd = comm.rank == comm.size - 1
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    for i, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, i + odd)

    def optimizer(rate, compare="all"):
        return strategies.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), rate, momentum=0.9),
            named_parameters=model.named_parameters(),
            comm=comm,
            overlap=overlap,
            compare=compare,
        )

    first = optimizer(0.1)
    model(torch.ones(4, 3)).sum().backward()
    last = comm.size - 1
    words = rf"0.weight: float32 of shape \(2, 3\) on rank {last} is not as on rank 0 \(and 3 "
    with pytest.raises(cc.MismatchError, match=words):
        first.step()
    with pytest.raises(cc.MismatchError, match="check_consistent: .*0.bias"):
        strategies.check_consistent(model, comm=comm)
    assert strategies.broadcast_parameters(model, comm=comm) is model
    strategies.check_consistent(model, comm=comm)
    first.step()
    other = optimizer(0.2 if odd else 0.1)
    with pytest.raises(cc.MismatchError, match=f"lr is 0.1 on rank 0, 0.2 on rank {last};"):
        other.step()
    optimizer(0.2 if odd else 0.1, "parameters").step()


def test_a_rate_that_differs_in_a_later_step_is_an_error_in_that_step(comm):
    odd = comm.rank == comm.size - 1 > 0
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [p], "lr": torch.tensor(0.25)} for p in parameters]
    optimizer = strategies.DistributedOptimizer(
        torch.optim.Adam(groups), comm=comm, overlap=overlaps({})
    )
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    words = (
        rf"in their settings, lr of group 0 is 0.25 on rank 0, 0.125 on rank {comm.size - 1} "
        r"\(and 1 more\); give all ranks the same options, and a schedule a metric"
    )

    def step():
        sum(p.sum() for p in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for loss in (1.0, 2.0 if odd else 0.5):  # tensors are rates that change in place
        schedule.step(loss)
    before = [p.tolist() for p in parameters]
    if comm.size > 1:
        with pytest.raises(cc.MismatchError, match=words):
            step()
        assert [p.tolist() for p in parameters] == before
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"].fill_(0.125)
    step()
    strategies.check_consistent(parameters, comm=comm)


def test_tensors_of_every_kind_have_a_checksum(comm):
    tensors = [
        torch.ones(3, dtype=dtype)
        for dtype in (torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.float64)
    ]
    embedding = torch.sparse_coo_tensor(torch.tensor([[2, 0]]), torch.ones(2, 3), (4, 3))
    tensors += [embedding, torch.arange(6).reshape(2, 3).T, torch.empty(0), torch.tensor(1.0)]
    strategies.check_consistent(tensors, comm=comm)
    odd = comm.rank == comm.size - 1 > 0
    for tensor in tensors:
        other = tensor + tensor if odd and tensor.dtype != torch.bool else tensor
        if comm.size == 1 or tensor.dtype == torch.bool or not tensor.numel():
            continue
        with pytest.raises(cc.MismatchError, match=f"on rank {comm.size - 1} is not as"):
            strategies.check_consistent([other], comm=comm)


def test_a_swapped_pair_of_tensors_is_called_that():
    weights = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="SGD: the pair is swapped, expected"):
        strategies.SGD(0.1).apply_gradients([(weights, torch.ones(3))])
