"""Each record once per epoch, whatever the number of ranks and however often it is interrupted."""

import json
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.errors import InvalidArgumentError
from strategies.input.sharded import ShardedInput, merge_positions

POLICIES = ["auto", "file", "data"]


def contents(lengths):
    """File name -> its records."""
    return {f"f{i}": [f"f{i}:{j}" for j in range(n)] for i, n in enumerate(lengths)}


def inputs(files, size, **options):
    return [
        ShardedInput(list(files), files.get, rank=rank, size=size, **options)
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [[5], [1, 2, 3], [4] * 9, [0, 7, 0]])
def test_every_record_comes_once_per_epoch_on_one_rank(size, policy, lengths):
    files = contents(lengths)
    everything = Counter(record for records in files.values() for record in records)
    parts = [list(part) for part in inputs(files, size, policy=policy, num_epochs=2)]
    assert Counter(record for part in parts for record in part) == everything + everything


@pytest.mark.parametrize("size", range(1, 8))
def test_shares_differ_by_at_most_one(size):
    files = contents([3, 1, 8, 2])
    sizes = [len(list(part)) for part in inputs(files, size, policy="data")]
    assert max(sizes) - min(sizes) <= 1
    one_each = contents([1] * 11)
    sizes = [len(list(part)) for part in inputs(one_each, size, policy="file")]
    assert max(sizes) - min(sizes) <= 1


def test_the_seed_decides_the_order_and_epochs_differ():
    files = contents([2] * 20)

    def run(seed, shuffle=True):
        return [list(part) for part in inputs(files, 2, seed=seed, shuffle=shuffle, num_epochs=2)]

    assert run(1) == run(1) != run(2)
    first = run(1)[0]
    assert first[:20] != first[20:]
    assert run(1, shuffle=False) == run(2, shuffle=False)
    assert run(1, shuffle=False)[0][:4] == ["f0:0", "f0:1", "f2:0", "f2:1"]


def test_auto_reads_whole_files_where_there_are_enough():
    opened = Counter()

    def read(file):
        opened[file] += 1
        return ["x"] * 4

    for count, times in ((4, 1), (3, 4)):
        opened.clear()
        files = [f"f{i}" for i in range(count)]
        for rank in range(4):
            list(ShardedInput(files, read, rank=rank, size=4))
        assert set(opened.values()) == {times}


def test_off_gives_everything_to_every_rank():
    files = contents([2, 3])
    parts = [list(part) for part in inputs(files, 3, policy="off")]
    assert parts[0] == parts[1] == parts[2]
    assert len(parts[0]) == 5


def test_off_goes_on_with_the_slowest():
    files = contents([2, 3])
    parts = inputs(files, 2, policy="off", shuffle=False)
    list(islice(parts[0], 4))
    list(islice(parts[1], 1))
    state = merge_positions([part.position() for part in parts])
    (alone,) = inputs(files, 1, policy="off", shuffle=False, state=state)
    assert list(alone) == ["f0:1", "f1:0", "f1:1", "f1:2"]


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    policy=st.sampled_from(POLICIES),
    stages=st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(0, 12), min_size=5, max_size=5)),
        max_size=4,
    ),
    last=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_nothing_is_lost_and_nothing_comes_twice_with_another_number_of_ranks(
    lengths, policy, stages, last, seed
):
    files = contents(lengths)
    options = {"policy": policy, "seed": seed, "num_epochs": 3}
    seen = Counter()
    state = None
    for size, counts in stages:
        parts = inputs(files, size, state=state, **options)
        for part, count in zip(parts, counts, strict=False):
            seen.update(islice(part, count))
        state = json.loads(json.dumps(merge_positions([part.position() for part in parts])))
    for part in inputs(files, last, state=state, **options):
        seen.update(part)
    assert seen == Counter({record: 3 for records in files.values() for record in records})


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    policy=st.sampled_from(POLICIES),
    before=st.tuples(st.integers(1, 4), st.integers(0, 9)),
    stages=st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), max_size=4),
    size=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_as_many_ranks_as_before_go_on_as_if_nobody_had_interrupted_them(
    lengths, policy, before, stages, size, seed
):
    """Whichever of them had used more than others, also after another number of ranks."""
    files = contents(lengths)
    options = {"policy": policy, "seed": seed, "num_epochs": 3}
    parts = inputs(files, before[0], **options)
    list(islice(parts[-1], before[1]))
    state = merge_positions([part.position() for part in parts])
    whole = [list(part) for part in inputs(files, size, state=state, **options)]
    seen = [[] for _ in range(size)]
    for counts in stages:
        parts = inputs(files, size, state=state, **options)
        for part, records, count in zip(parts, seen, counts, strict=False):
            records += islice(part, count)
        state = json.loads(json.dumps(merge_positions([part.position() for part in parts])))
    for part, records in zip(inputs(files, size, state=state, **options), seen, strict=True):
        records += part
    assert seen == whole


def test_a_position_does_not_change_afterwards():
    parts = inputs(contents([2, 2]), 1, num_epochs=3)
    list(islice(parts[0], 3))
    position = parts[0].position()
    before = json.dumps(position)
    list(parts[0])
    assert json.dumps(position) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 2, "size": 2}, "rank 2 of 2"),
        ({"rank": -1, "size": 2}, "rank -1 of 2"),
        ({"rank": 0, "size": 1, "policy": "best"}, "expected one of auto file data off"),
        ({"rank": 0, "size": 1, "num_epochs": 0}, "bad num_epochs, expected an integer >= 1"),
    ],
)
def test_wrong_use(options, words):
    with pytest.raises(ValueError, match=words):
        ShardedInput(["a"], list, **options)


def test_no_files():
    with pytest.raises(ValueError, match="at least one file"):
        ShardedInput([], list, rank=0, size=1)


def test_a_state_of_other_input_is_refused():
    state = merge_positions([inputs(contents([1, 1]), 1)[0].position()])
    with pytest.raises(ValueError, match="belongs to other input"):
        inputs(contents([1, 1, 1]), 1, state=state)
    with pytest.raises(ValueError, match="belongs to other input"):
        inputs(contents([1, 1]), 1, seed=9, state=state)


def test_positions_of_some_ranks_only_are_refused():
    parts = inputs(contents([3, 3]), 3)
    with pytest.raises(InvalidArgumentError, match="one position per rank"):
        merge_positions([part.position() for part in parts[:2]])


class Survivors:
    """Stands for a communicator of the surviving ranks, whose positions are known."""

    def __init__(self, parts):
        self.positions = [part.position() for part in parts]

    def allgather_object(self, own):
        assert own in self.positions
        return self.positions


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("before", [None, 2, 3])
@pytest.mark.parametrize("dead", [{0}, {2}, {0, 1}])
def test_only_the_records_that_dead_ranks_have_used_are_read_again(policy, before, dead):
    """Of three ranks, which start at the beginning or from a state of `before` ranks."""
    files = contents([3, 1, 4, 0, 5])
    options = {"policy": policy, "seed": 2, "num_epochs": 2}
    seen, state = Counter(), None
    if before is not None:
        parts = inputs(files, before, **options)
        for number, part in enumerate(parts):
            seen.update(islice(part, 1 + 2 * number))
        state = merge_positions([part.position() for part in parts])
    parts = inputs(files, 3, state=state, **options)
    survivors = [part for rank, part in enumerate(parts) if rank not in dead]
    for number, part in enumerate(parts):
        used = list(islice(part, 1 + number))
        seen.update(used if part in survivors else [])
    found = {json.dumps(part.state_of_survivors(Survivors(survivors))) for part in survivors}
    (state,) = map(json.loads, found)
    for part in inputs(files, len(survivors), state=state, **options):
        seen.update(part)
    assert seen == Counter({record: 2 for records in files.values() for record in records})
