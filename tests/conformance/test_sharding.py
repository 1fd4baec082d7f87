"""Sharing the input: uneven ends, positions that other numbers of ranks go on from, prefetch."""

import json
import threading
from collections import Counter
from itertools import islice

import numpy as np
import pytest

import collectives as cc
import strategies
from conftest import UNDER_MPI
from requirements import installed
from strategies.errors import OutOfRangeError
from strategies.horovod.elastic import ElasticSampler
from strategies.input import FileBatches, in_step, uneven_batches
from strategies.input.prefetching import prefetch
from strategies.input.readers import TextLineReader
from strategies.input.sharded import ShardedInput
from strategies.queues.shared_files import shared_files
from strategies.rpc.service import Service

FILES = {f"f{i}": [10 * i + j for j in range(i + 2)] for i in range(5)}  # 2, 3, 4, 5, 6 records
EVERYTHING = Counter(record for records in FILES.values() for record in records)


def records_of(comm, **options):
    return ShardedInput(list(FILES), FILES.get, rank=comm.rank, size=comm.size, **options)


def everybodys(comm, records):
    return Counter(sum(comm.allgather_object(list(records)), []))


def batches_of(records, size):
    records = iter(records)
    while rows := list(islice(records, size)):
        yield np.array(rows)


@pytest.mark.parametrize("policy", ["auto", "file", "data"])
def test_every_record_reaches_one_rank(comm, policy):
    assert everybodys(comm, records_of(comm, policy=policy)) == EVERYTHING


@pytest.mark.parametrize("policy", ["auto", "file", "data", "off"])
def test_half_of_the_ranks_go_on_where_all_have_stopped(comm, policy):
    records = records_of(comm, policy=policy, num_epochs=2, seed=3)
    taken = Counter(islice(records, 2 + comm.rank))
    state = records.state(comm)
    assert comm.allgather_object(json.dumps(state)) == [json.dumps(state)] * comm.size
    half = comm.split(0 if comm.rank < (comm.size + 1) // 2 else None)
    if half is not None:
        taken.update(
            records_of(
                half, policy=policy, num_epochs=2, seed=3, state=json.loads(json.dumps(state))
            )
        )
    if policy == "off":
        assert half is None or taken >= EVERYTHING + EVERYTHING
        return
    everything = sum(comm.allgather_object(taken), Counter())
    assert everything == EVERYTHING + EVERYTHING


def test_what_was_only_read_ahead_is_not_counted(comm):
    records = records_of(comm, policy="data", num_epochs=2)
    with prefetch(batches_of(records, 2), 3, position=records.position) as batches:
        taken = Counter(np.concatenate([next(batches) for _ in range(2)]).tolist())
        state = records.state(comm, batches.position())
    rest = records_of(comm, policy="data", num_epochs=2, state=state)
    everything = everybodys(comm, [*taken.elements(), *rest])
    assert everything == EVERYTHING + EVERYTHING


def test_ranks_that_run_out_end_as_the_user_says(comm):
    """Rank r has r + 1 batches of 2 rows."""

    def steps(uneven):
        batches = [np.full(2, 10 * comm.rank + i) for i in range(comm.rank + 1)]
        return [batch.tolist() for batch in in_step(batches, comm, uneven=uneven)]

    own = [[10 * comm.rank + i] * 2 for i in range(comm.rank + 1)]
    missing = comm.size - len(own)
    assert steps("fewer") == own + [[]] * missing
    assert steps("drop") == own[:1]
    assert steps("pad") == own + [own[0]] * missing
    with pytest.raises(ValueError, match="expected one of fewer drop pad, got 'stop'"):
        next(in_step([], comm, uneven="stop"))


@pytest.mark.parametrize("uneven", ["fewer", "drop", "pad"])
def test_a_step_in_which_no_rank_has_a_row_is_left_out(comm, uneven):
    sizes = [0, comm.rank, 0, 1 if comm.rank == 0 else 0, 0]
    seen = [len(x) for x in in_step(map(np.ones, sizes), comm, uneven=uneven)]
    assert seen == ([comm.rank] if comm.size > 1 else []) + [sizes[3]]


@pytest.mark.parametrize(("uneven", "steps"), [("fewer", 1), ("drop", 0), ("pad", 1)])
def test_a_rank_without_any_batch_learns_their_form(comm, uneven, steps):
    batch = {"x": np.ones((1, 3), np.float32), "y": np.zeros(1, np.int64)}
    seen = list(in_step([] if comm.rank == 0 else [batch], comm, uneven=uneven))
    if comm.size == 1:
        assert seen == []
        return
    assert len(seen) == steps
    if comm.rank == 0:
        forms = [(x.shape, x.dtype) for batch in seen for x in (batch["x"], batch["y"])]
        assert forms == [((0, 3), np.float32), ((0,), np.int64)] * steps


def of_library(library):
    """Return what makes an array of a library out of a NumPy array."""
    module = installed(library)
    return module.as_tensor if library == "torch" else module.numpy.asarray


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("had", [0, 1], ids=["never had a batch", "has run out"])
def test_a_rank_without_rows_has_the_kind_of_the_others(comm, library, had):
    make = of_library(library)
    count = had if comm.rank == 0 else 2
    batches = [(make(np.ones((2, 3), np.float32)), [make(np.arange(2))])] * count
    seen = list(in_step(batches, comm))
    assert len(seen) == (had if comm.size == 1 else 2)
    kind, dtypes = type(make(np.ones(1))), {str(make(np.arange(2)).dtype)}
    for place, (x, (digits,)) in enumerate(seen):
        assert isinstance(x, kind)
        assert x.shape == (2 if place < count else 0, 3)
        assert str(x.dtype).removeprefix("torch.") == "float32"
        assert {str(digits.dtype)} == dtypes
        (x @ make(np.ones((3, 1), np.float32))).sum()


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_replicas_without_a_batch_have_the_kind_of_the_others(comm, library):
    make = of_library(library)
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=["/cpu:0", "/cpu:1"])
    count = 0 if comm.rank == 0 and comm.size > 1 else 3
    given = strategy.distribute_datasets_from_function(lambda _: [make(np.ones((2, 3)))] * count)
    parts = [part for step in given for part in strategy.local_results(step)]
    assert [len(part) for part in parts] == ([2, 2, 2, 0] if count else [0] * 4)
    assert {(type(part), part.shape[1:]) for part in parts} == {(type(make(np.ones(1))), (3,))}


def test_a_form_that_one_rank_cannot_make_is_an_error_on_all(world, monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(
        uneven_batches,
        "form_of",
        lambda array: uneven_batches.EmptySpec("torch", "int8", (3,), "cpu"),
    )
    monkeypatch.setattr(uneven_batches.importlib, "import_module", absent)

    def run(comm):
        if comm.size == 1:
            return
        batches = [] if comm.rank == 0 else [np.ones((1, 3))]
        words = "this rank has had no batch .* expected int8 of torch on cpu, .* No module named"
        with pytest.raises(RuntimeError, match=words):
            list(in_step(batches, comm))
        assert list(in_step([], comm)) == []

    world.run(run)


def test_batches_without_rows_at_all_are_an_error_on_all(comm):
    batches = [{"x": np.ones(2), "n": 5}] if comm.rank == 0 else []
    words = r"in_step: expected arrays of shape \(n, ...\) or lists of n objects, got 5"
    with pytest.raises(ValueError, match=words):
        list(in_step(batches, comm))


def test_a_mean_weighted_by_rows_has_fewer_contributors(comm):
    records = records_of(comm, policy="data")
    total = np.zeros(2)
    for batch in in_step(batches_of(records, 3), comm):
        total += comm.allreduce(np.array([batch.sum(), len(batch)], float), op=cc.SUM)
    assert total[0] / total[1] == sum(EVERYTHING) / len(EVERYTHING)


@pytest.mark.parametrize("uneven", ["fewer", "drop", "pad"])
def test_an_error_in_prefetched_input_is_raised_on_all(comm, uneven):
    def read(comm):
        yield np.zeros(1)
        if comm.rank == comm.size - 1:
            raise ValueError("shard 3 is damaged")
        yield np.zeros(1)

    with prefetch(read(comm), 2) as batches:
        steps = in_step(batches, comm, uneven=uneven)
        next(steps)
        with pytest.raises(ValueError, match="shard 3 is damaged"):
            next(steps)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_readers_of_all_ranks_take_files_from_one_line(comm, tmp_path):
    def lines(reader, files):
        while True:
            try:
                yield reader.read(files)[1]
            except OutOfRangeError:
                return

    folder = comm.broadcast_object(str(tmp_path))
    names = [f"{folder}/{name}.txt" for name in FILES]
    if comm.rank == 0:
        for name, records in zip(names, FILES.values(), strict=True):
            with open(name, "w") as file:
                file.writelines(f"{record}\n" for record in records)
    comm.barrier()
    with Service(comm) as service:
        files = shared_files(names, service=service, shared_name="files", num_epochs=2)
        mine = [int(line) for line in lines(TextLineReader(), files)]
        assert everybodys(comm, mine) == EVERYTHING + EVERYTHING


def names_in_order(odd):
    return ["b", "a", "c", "d"] if odd else ["a", "b", "c", "d"]


def sharded(comm, files=("a", "b", "c", "d"), **options):
    return ShardedInput(list(files), list, rank=comm.rank, size=comm.size, comm=comm, **options)


def of_loader(comm, batches, **options):
    return list(strategies.MultiWorkerMirroredStrategy(comm).distribute_dataset(batches, **options))


def shuffled(odd, seed=3):
    """Batches of 4 numbers and their labels, in the order of a seed."""
    order = np.random.default_rng(seed + odd).permutation(12)
    return [
        {"x": x * 1.5, "y": x % 3, "name": [f"row {i}" for i in x]} for x in order.reshape(3, 4)
    ]


def in_files(seed):
    return FileBatches(range(8), lambda n: [np.int64(n)], 2, shuffle=True, seed=seed)


# Calls in which one rank uses another order, other rows or another end, and a word of the error.
ORDERS = {
    "seed": (lambda c, odd: sharded(c, seed=odd), "seed"),
    "number of files": (lambda c, odd: sharded(c, "abcde" if odd else "abcd"), "files"),
    "order of files": (lambda c, odd: sharded(c, names_in_order(odd)), "checksum"),
    "policy": (lambda c, odd: sharded(c, policy="off" if odd else "data"), "policy"),
    "epochs": (lambda c, odd: sharded(c, num_epochs=2 + odd), "num_epochs"),
    "way to end": (lambda c, odd: list(in_step([], c, uneven="drop" if odd else "pad")), "uneven"),
    "loader's order": (lambda c, odd: of_loader(c, shuffled(odd)), "Policy 'data' needs the same"),
    "loader's end": (lambda c, odd: of_loader(c, shuffled(0)[odd:]), "different batches"),
    "policy of a loader": (
        lambda c, odd: of_loader(c, shuffled(0), policy="off" if odd else "data"),
        "policy",
    ),
    "seed of files": (lambda c, odd: of_loader(c, in_files(int(odd)), policy="file"), "seed"),
    "elastic sampler": (lambda c, odd: ElasticSampler(6, seed=odd).state(c), "seed"),
    "saved position": (
        lambda c, odd: ShardedInput(
            "abcd", list, rank=c.rank, size=c.size, seed=odd, comm=None
        ).state(c),
        "seed",
    ),
}


@pytest.mark.parametrize(("make", "word"), ORDERS.values(), ids=ORDERS)
def test_ranks_with_another_order_all_get_the_same_error(comm, make, word):
    make(comm, False)
    if comm.size == 1:
        return
    with pytest.raises(cc.MismatchError, match=word) as raised:
        make(comm, comm.rank == comm.size - 1)
    assert len(set(comm.allgather_object(str(raised.value)))) == 1
    assert f"rank {comm.size - 1}" in str(raised.value)
    make(comm, False)


def test_wrong_arguments_of_one_rank_are_an_error_on_all(comm):
    with pytest.raises(ValueError, match="expected at least one file"):
        sharded(comm, [] if comm.rank == comm.size - 1 else ["a"])
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_images_that_differ_are_no_other_order_where_labels_are_equal(comm):
    """As where each rank augments its images at random."""
    noise = np.random.default_rng(comm.rank)
    batches = [{**batch, "x": noise.random(4), "one": np.ones(4)} for batch in shuffled(0)]
    given = of_loader(comm, batches)
    labels = sum(comm.allgather_object([y for part in given for y in part["y"].tolist()]), [])
    assert Counter(labels) == Counter({0: 4, 1: 4, 2: 4})


def test_the_job_compares_by_itself_but_not_in_a_thread_or_for_other_sizes(comm):
    if UNDER_MPI:  # ranks that are threads are no job
        cc.init()
    try:
        options = {"rank": comm.rank, "size": comm.size}
        if UNDER_MPI and comm.size > 1:
            with pytest.raises(cc.MismatchError, match="seed 0 on rank 0, seed 1 on rank 1"):
                ShardedInput("ab", list, seed=comm.rank, **options)
        if comm.rank == 0:
            made = [
                ShardedInput("ab", list, comm=None, **options),
                ShardedInput("ab", list, rank=0, size=comm.size + 1),
            ]
            thread = threading.Thread(
                target=lambda: made.append(ShardedInput("ab", list, **options))
            )
            thread.start()
            thread.join(20)
            assert len(made) == 3
        assert comm.allreduce(1, op=cc.SUM) == comm.size
    finally:
        if UNDER_MPI:
            cc.shutdown()


def test_lists_with_an_object_for_each_row_are_rows(comm):
    batches = [{"x": np.ones(2), "name": ["a", "b"], "at": ({"k": 1}, None)}] * comm.rank
    seen = list(in_step(batches, comm))
    assert [len(batch["name"]) for batch in seen] == [
        2 if step < comm.rank else 0 for step in range(comm.size - 1)
    ]
    assert {type(batch["name"]) for batch in seen} <= {list}
    assert {type(batch["at"]) for batch in seen} <= {tuple}
    whole = [[np.arange(3), ["a", "b", "c"]]] * 2
    strategy = strategies.MultiWorkerMirroredStrategy(comm, devices=["/cpu:0", "/cpu:1"])
    for policy, count in ("data", 1), ("off", comm.size):
        parts = [
            (x.tolist(), name)
            for step in strategy.distribute_dataset(whole, policy=policy)
            for x, name in strategy.local_results(step)
        ]
        assert all(["abc"[i] for i in x] == name for x, name in parts)
        names = sum(comm.allgather_object([name for _, part in parts for name in part]), [])
        assert Counter(names) == Counter("abcabc" * count)
