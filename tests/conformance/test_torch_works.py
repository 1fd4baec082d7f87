"""Operations of torch.distributed that are under way: works, futures, threads, groups, errors."""

import datetime
import gc
from types import SimpleNamespace

import pytest
from calls import together

import collectives as cc
from requirements import installed

torch = installed("torch")
dist = torch.distributed
if torch:
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.distributed_c10d import _coalescing_manager as coalescing

    from strategies.torch.rendezvous import timeout_seconds


def ones(rank, n=4):
    return torch.full((n,), float(rank + 1))


def total(size):
    return size * (size + 1) / 2


def test_works_in_any_mixture(torch_ranks):
    rank, size = torch_ranks
    first, second, third = ones(rank), ones(rank), ones(rank, 300_000)
    works = [dist.all_reduce(x, async_op=True) for x in (first, second, third)]
    dist.all_reduce(fourth := ones(rank))  # stands in line behind them
    assert all(work.is_completed() for work in works)
    assert [x[0].item() for x in (first, second, third, fourth)] == [total(size)] * 4
    works.append(dist.broadcast(first, 0, async_op=True))
    for work in reversed(works):
        assert work.wait()
        assert work.wait(datetime.timedelta(seconds=5))
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0].numel() in (4, 300_000)
        work.synchronize()
        work.block_current_stream()


@pytest.mark.several
def test_a_rank_that_goes_on_meets_what_others_do_before(torch_ranks):
    rank, size = torch_ranks
    x = ones(rank)
    if rank == 0:  # would wait for each other, if an operation held up its caller
        work = dist.all_reduce(x, async_op=True)
        dist.send(ones(7), 1)
        work.wait()
    else:
        if rank == 1:
            dist.recv(y := torch.zeros(4), 0)
            assert y[0] == 8
        dist.all_reduce(x)
    assert x[0] == total(size)


def test_works_that_only_cpp_holds(torch_ranks):
    """PyTorch keeps the Python half of works that its C++ code has requested."""
    rank, size = torch_ranks
    length = 100_000 * size
    made = [
        functional.all_reduce(ones(rank, length), "sum", dist.group.WORLD),
        functional.all_gather_tensor(ones(rank, length), 0, dist.group.WORLD),
        functional.reduce_scatter_tensor(ones(rank, length), "sum", 0, dist.group.WORLD),
        *functional.all_reduce_coalesced([ones(rank, length)], "sum", dist.group.WORLD),
    ]
    with coalescing(async_ops=True) as together:
        dist.all_reduce(x := ones(rank, length))
        dist.all_reduce(ones(rank, length))
    gc.collect()
    last = [functional.wait_tensor(tensor)[-1].item() for tensor in made]
    assert last == [total(size), size, total(size), total(size)]
    together.wait()
    assert x[-1] == total(size)


def test_futures_and_what_follows_from_them(torch_ranks):
    rank, size = torch_ranks

    def again(future):
        (x,) = future.value()
        work = dist.all_reduce(x, async_op=True)  # in the line's own thread
        return work.get_future().wait()[0] + 1

    x = ones(rank)
    future = dist.all_reduce(x, async_op=True).get_future().then(again)
    assert future.wait()[0].item() == total(size) * size + 1
    work = dist.all_reduce(x := ones(rank), async_op=True)
    work.wait()
    assert work.get_future().wait()[0] is x


def test_groups_of_some_ranks(torch_ranks):
    rank, size = torch_ranks
    alone = [dist.new_group([r]) for r in range(size)]
    turned = dist.new_group(list(range(size))[::-1])
    assert alone[(rank + 1) % size] == dist.GroupMember.NON_GROUP_MEMBER or size == 1
    dist.all_reduce(x := ones(rank), group=alone[rank])
    assert x[0] == rank + 1
    dist.broadcast(x, 0, group=turned)  # by the number in the world
    assert x[0] == 1
    if rank != 0 or size == 1:
        of_others = dist.new_group(list(range(size > 1, size)), use_local_synchronization=True)
        dist.all_reduce(x := ones(rank), group=of_others)
        assert x[0] == total(size) - (size > 1)
    dist.barrier()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, size))
    dist.all_reduce(x := ones(rank), group=mesh.get_group(1))
    assert x[0] == total(size)
    dist.destroy_process_group(turned)
    with pytest.raises(dist.DistBackendError, match="not usable|destroyed"):
        turned.barrier()
    work = dist.all_reduce(x := ones(rank), async_op=True)
    assert work.wait()


def test_two_threads_with_a_group_each(torch_ranks):
    rank, size = torch_ranks
    groups = [dist.new_group(), dist.new_group()]

    def work(number):
        results = []
        for step in range(50):
            dist.all_reduce(x := ones(rank) * (number + step), group=groups[number])
            results.append(x[0].item())
        return results

    results = together(work, (0, 1))
    assert results == [[total(size) * (n + step) for step in range(50)] for n in (0, 1)]


def test_a_barrier_has_a_limit_of_its_own(torch_ranks):
    rank, size = torch_ranks
    group = dist.new_group()
    dist.barrier(group=group, timeout=datetime.timedelta(seconds=20))
    if size > 1 and rank == 0:
        with pytest.raises(cc.CollectiveTimeout, match="no answer within 0.5 s"):
            dist.barrier(group=group, timeout=datetime.timedelta(seconds=0.5))


def test_a_programs_limit_goes_before_the_setting():
    comm = SimpleNamespace(settings=SimpleNamespace(timeout=5.0))
    assert timeout_seconds(datetime.timedelta(hours=2), comm) == 7200
    assert timeout_seconds(datetime.timedelta(seconds=1), comm) == 1
    assert timeout_seconds(dist.default_pg_timeout, comm) == 5


def test_a_second_init_and_what_is_left_of_the_first(torch_ranks):
    rank, size = torch_ranks
    work = dist.all_reduce(x := ones(rank), async_op=True)
    dist.destroy_process_group()  # waits for what is in line
    assert work.is_completed()
    assert x[0] == total(size)
    dist.init_process_group("unisono")
    dist.all_reduce(x := ones(rank))
    assert x[0] == total(size)
    with pytest.raises(ValueError, match="not those of MPI, expected rank"):
        dist.destroy_process_group() or dist.init_process_group(
            "unisono", rank=(rank + 1) % (size + 1), world_size=size + 1
        )


@pytest.mark.several
@pytest.mark.parametrize("asynchronous", [False, True])
def test_calls_that_differ_are_one_error_on_all(torch_ranks, asynchronous):
    rank, size = torch_ranks
    x = torch.zeros(3 if rank else 4)

    def call():
        work = dist.all_reduce(x, async_op=asynchronous)
        return work and work.wait()

    with pytest.raises(cc.MismatchError, match="rank 0") as caught:
        call()
    assert isinstance(caught.value, dist.DistBackendError)
    line = call.__code__.co_firstlineno + 1
    assert f"test_torch_works.py:{line}" in str(caught.value)
    assert "torch.distributed.allreduce" in str(caught.value)
    assert caught.value.operations == {"allreduce"}
    future = dist.all_reduce(x, async_op=True).get_future()
    with pytest.raises(RuntimeError, match="allreduce"):
        future.wait()
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(cc.MismatchError):
        work.wait()
    assert isinstance(work.exception(), cc.MismatchError)
    assert not work.is_success()
    dist.all_reduce(x := ones(rank))
    assert x[0] == total(size)


@pytest.mark.several
def test_a_rank_that_does_not_come_is_named(torch_ranks):
    rank, size = torch_ranks
    group = dist.new_group()
    if rank == 0:
        with pytest.raises(cc.CollectiveTimeout, match="barrier.*rank 1"):
            group.monitored_barrier(datetime.timedelta(seconds=0.3))
        with pytest.raises(dist.DistBackendError, match="not usable"):
            dist.all_reduce(ones(rank), group=group)
    dist.barrier()
    work = dist.irecv(torch.zeros(1), (rank + 1) % size)
    with pytest.raises(cc.CollectiveTimeout, match="and continues"):
        work.wait(datetime.timedelta(seconds=0.05))
    dist.barrier()
    dist.send(torch.zeros(1), (rank - 1) % size)
    assert work.wait()


# Calls that wait for a missing rank.
LATE = {
    "barrier": lambda group: dist.barrier(group=group),
    "monitored_barrier": lambda group: group.monitored_barrier(),
    "all_reduce": lambda group: dist.all_reduce(torch.zeros(1), group=group),
    "all_reduce later": lambda group: dist.all_reduce(
        torch.zeros(1), group=group, async_op=True
    ).wait(),
    "all_gather": lambda group: dist.all_gather_object([None] * group.size(), 1, group),
    "recv": lambda group: dist.recv(torch.zeros(1), 1, group),
    "irecv": lambda group: dist.irecv(torch.zeros(1), 1, group).wait(
        datetime.timedelta(seconds=0.01)
    ),
}


@pytest.mark.several
def test_the_text_of_a_timeout_contains_timed_out(torch_ranks):
    """The words that launchers and loggers search for."""
    rank, size = torch_ranks
    for call in LATE.values():
        group = dist.new_group()
        group.set_timeout(datetime.timedelta(seconds=0.2))
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match=r"\w: .*timed out, .* within 0\.") as e:
                call(group)
            assert isinstance(e.value, cc.CollectiveTimeout)
        dist.barrier()
