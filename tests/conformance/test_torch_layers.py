"""Layers, rows and metrics of PyTorch over all ranks: as if one process had all rows."""

import copy
import io
import itertools
import json
import pickle

import numpy as np
import pytest

import collectives as cc
from conftest import UNDER_MPI
from requirements import installed
from strategies.averaging.metrics import metric_average

torch = installed("torch")
if torch:
    from strategies.torch import ShardedSampler, SyncBatchNorm


def rows_of(rank, rows, *shape, mean=0.0):
    made = torch.Generator().manual_seed(10 * rank + 1)
    return torch.randn(rows, *shape, generator=made, dtype=torch.float64) + mean


COUNTS = {"even": lambda r: 3, "uneven": lambda r: 2 * r + 2, "empty": lambda r: 0 if r else 4}


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 2, 3)])
def test_sync_batch_norm_equals_batch_norm_of_all_rows(comm, counts, shape):
    plain = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d}
    alone = plain[len(shape)](5, momentum=None if len(shape) == 2 else 0.3).double()
    alone.weight.data = rows_of(77, 1, 5)[0]
    alone.bias.data = rows_of(78, 1, 5)[0]
    ours = SyncBatchNorm(5, momentum=alone.momentum, comm=comm).double()
    ours.load_state_dict(alone.state_dict())
    count = COUNTS[counts]
    for step in range(3):
        everyones = [rows_of(100 * step + r, count(r), *shape) for r in range(comm.size)]
        weights = [rows_of(100 * step + 50 + r, count(r), *shape) for r in range(comm.size)]
        x = everyones[comm.rank].clone().requires_grad_()
        whole = torch.cat(everyones).requires_grad_()
        y = ours(x)
        (y * weights[comm.rank]).sum().backward()
        wanted = alone(whole)
        (wanted * torch.cat(weights)).sum().backward()
        begin = sum(count(r) for r in range(comm.rank))
        part = slice(begin, begin + len(x))
        close = {"rtol": 1e-9, "atol": 1e-11}  # float64, sums of some 50 numbers
        torch.testing.assert_close(y, wanted[part], **close)
        torch.testing.assert_close(x.grad, whole.grad[part], **close)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(ours, name), getattr(alone, name), **close)
    for own, one in ((ours.weight, alone.weight), (ours.bias, alone.bias)):
        torch.testing.assert_close(comm.allreduce(own.grad, op=cc.SUM), one.grad, **close)
    ours.eval()
    alone.eval()
    torch.testing.assert_close(ours(whole), alone(whole), **close)


def test_sync_batch_norm_of_large_means_and_16_bits(comm):
    layer = SyncBatchNorm(2, comm=comm)
    x = rows_of(comm.rank, 64, 2, mean=1e4).float()
    y = layer(x)
    # Of E[x^2] - E[x]^2 nothing would be left in float32.
    every = comm.allgather(y.detach())
    assert every.var(0, unbiased=False).sub(1).abs().max() < 1e-2
    assert layer(x.to(torch.bfloat16)).dtype == torch.bfloat16


def test_sync_batch_norm_in_the_place_of_others(comm):
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.BatchNorm1d(4, affine=False))
    )
    made = SyncBatchNorm.convert(model, comm=comm)
    assert made is model
    assert isinstance(model[1][0], SyncBatchNorm)
    assert isinstance(SyncBatchNorm.convert(torch.nn.BatchNorm1d(4)), SyncBatchNorm)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match="expected an input of shape"):
        model[1](torch.ones(4))


def named_group(comm, ranks):
    """A group whose name no other group has in this process, which has had many worlds."""
    return comm.group(list(ranks), tag=77)


def test_a_model_that_holds_a_communicator_is_copied_and_pickled(comm):
    half = named_group(comm, range(comm.rank % 2, comm.size, 2))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model = SyncBatchNorm.convert(model, comm=half)
    copies = [copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module]
    if UNDER_MPI:  # a process is one rank, and finds its communicators by name
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies += [pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
        assert pickle.loads(pickle.dumps(cc.init())) is cc.init()
    x = rows_of(comm.rank, 4, 3).float()
    expected = model(x)
    for made in copies:
        assert torch.equal(made(x), expected)
    assert copy.copy(half) is copy.deepcopy(half) is half
    half.close()


def test_a_pickled_communicator_is_found_only_while_it_is_open(comm):
    half = named_group(comm, range(comm.rank % 2, comm.size, 2))
    pickled = pickle.dumps(half)
    half.close()
    comm.barrier()  # ranks that are threads find those of all
    with pytest.raises(ValueError, match=r"its own job only, while it is open, .*, got 0"):
        pickle.loads(pickled)


def test_a_sampler_is_copied_and_pickled(comm):
    comm = named_group(comm, range(comm.size))
    sampler = ShardedSampler(10, comm=comm, seed=4)
    next(iter(sampler))  # a copy starts a new pass
    copies = [copy.deepcopy(sampler)]
    if UNDER_MPI:
        copies.append(pickle.loads(pickle.dumps(sampler)))
    fresh = ShardedSampler(10, comm=comm, seed=4)
    for made in copies:
        assert made.state() == fresh.state()
        assert list(made) == list(ShardedSampler(10, comm=comm, seed=4))
    comm.close()


def test_one_number_of_all_ranks_has_no_variance(comm):
    layer = SyncBatchNorm(2, comm=comm)
    with pytest.raises(ValueError, match="expected more than 1 number per channel"):
        layer(torch.ones(1 if comm.rank == 0 else 0, 2))
    assert layer(torch.ones(0, 2)).shape == (0, 2)


def joined(comm, rows):
    return list(itertools.chain(*comm.allgather_object(list(rows))))


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_comes_once_per_epoch(comm, shuffle):
    sampler = ShardedSampler(11, comm=comm, shuffle=shuffle, seed=4)
    orders = []
    for epoch in range(3):
        assert sampler.epoch == epoch
        length = len(sampler)
        loader = torch.utils.data.DataLoader(torch.arange(11), batch_size=2, sampler=sampler)
        own = [row for batch in loader for row in batch.tolist()]
        assert len(own) == length
        assert abs(length - 11 / comm.size) < 1
        orders.append(joined(comm, own))
        assert sorted(orders[-1]) == list(range(11))
    assert (orders[0] != orders[1]) == shuffle
    sampler.set_epoch(0)
    assert joined(comm, sampler) == orders[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda odd: {"seed": int(odd)}, "seed 0 on rank 0, seed 1 on rank"),
        (lambda odd: {"data": 6 + odd}, "6 rows on rank 0, 7 rows on rank"),
        (lambda odd: {"shuffle": not odd}, "shuffle True on rank 0, shuffle False on rank"),
    ],
    ids=["seed", "rows", "shuffle"],
)
def test_ranks_whose_samplers_differ_all_get_the_same_error(comm, options, words):
    def make(odd):
        return ShardedSampler(**{"data": 6, "comm": comm, **options(odd)})

    if comm.size > 1:
        with pytest.raises(cc.MismatchError, match=words) as raised:
            make(comm.rank == comm.size - 1)
        assert len(set(comm.allgather_object(str(raised.value)))) == 1
        with pytest.raises(ValueError, match="bad number of rows"):
            ShardedSampler(6 if comm.rank else 0, comm=comm)
    sampler = make(False)
    if comm.rank == 0:  # only the constructor is collective
        assert len(list(sampler)) == len(sampler)


def test_an_epoch_goes_on_with_another_number_of_ranks(comm):
    sampler = ShardedSampler(17, comm=comm, seed=2)
    list(sampler)
    rows = iter(sampler)
    ahead = [next(rows) for _ in range(3)]  # of which two are used
    state = json.loads(json.dumps(sampler.state(used=2)))
    used = joined(comm, ahead[:2])
    some = comm.split(0 if comm.rank < max(1, comm.size - 1) else None)
    if some is not None:
        later = ShardedSampler(17, comm=some, seed=2, state=state)
        assert later.epoch == 1
        rest = joined(some, later)
        assert sorted(used + rest) == list(range(17))
        assert sorted(joined(some, later)) == list(range(17))
        with pytest.raises(ValueError, match="the state belongs to other input"):
            ShardedSampler(18, comm=some, seed=2, state=state)
        some.close()


@pytest.mark.parametrize("fewer", [0, 1])
@pytest.mark.parametrize("read", [0, 2, 17])
def test_a_resumed_epoch_is_resumed_again(comm, read, fewer):
    some = comm.split(0 if comm.rank < max(1, comm.size - fewer) else None)
    sampler = ShardedSampler(17, comm=comm, seed=2)
    used = joined(comm, itertools.islice(sampler, 2))
    state = sampler.state()
    if some is not None:
        later = ShardedSampler(17, comm=some, seed=2, state=state)
        used += joined(some, itertools.islice(later, read))
        assert len(later)  # of the next pass, which does not change this one
        last = ShardedSampler(17, comm=some, seed=2, state=later.state())
        assert sorted(used + joined(some, last)) == list(range(17))
        assert sorted(joined(some, last)) == list(range(17))
        assert last.epoch == 2
        some.close()


def test_metrics_are_averaged_over_rows(comm):
    own = {"loss": float(comm.rank), "accuracy": np.float32(0.5)}
    rows = [r % 3 for r in range(comm.size)]
    rows[0] = 2
    found = metric_average(own, rows[comm.rank], comm=comm)
    wanted = sum(r * n for r, n in enumerate(rows)) / sum(rows)
    assert found == pytest.approx({"loss": wanted, "accuracy": 0.5})
    assert len(set(comm.allgather_object(found["loss"]))) == 1
    assert metric_average(torch.tensor(float(comm.rank)), comm=comm) == (comm.size - 1) / 2
    assert metric_average(float("nan") if comm.rank else 1.0, not comm.rank, comm=comm) == 1
    with pytest.raises(ValueError, match="no rank has an example"):
        metric_average(1.0, 0, comm=comm)
    if comm.size > 1:
        with pytest.raises(cc.MismatchError, match="metric_average: ranks differ"):
            metric_average({"a" if comm.rank else "b": 1.0}, comm=comm)
