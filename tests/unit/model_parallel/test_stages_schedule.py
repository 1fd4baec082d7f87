"""The 1F1B schedule as pure integers, simulated without messages."""

import pytest

from requirements import installed

installed("torch")

from strategies.model_parallel.stages import one_forward_one_backward  # noqa: E402

CASES = [(size, parts) for size in (*range(1, 9), 17, 33) for parts in (1, 2, 3, size, 40)]


@pytest.mark.parametrize(("size", "parts"), CASES)
def test_every_pass_finds_its_input_and_the_pipeline_idles_as_little_as_it_can(size, parts):
    orders = [list(one_forward_one_backward(rank, size, parts)) for rank in range(size)]
    passes = {(d, part) for d in ("forward", "backward") for part in range(parts)}
    for order in orders:
        assert len(order) == 2 * parts
        assert set(order) == passes
    done, time = {}, 0  # (rank, direction, part): time of its end, one unit per pass
    ahead = [iter(order) for order in orders]
    current = [next(order) for order in ahead]
    while any(current):
        time += 1
        ready = [r for r, own in enumerate(current) if own and inputs(r, size, *own) <= done.keys()]
        assert ready, f"a deadlock after {time - 1} units, at {current}"
        for rank in ready:
            done[(rank, *current[rank])] = time
            current[rank] = next(ahead[rank], None)
    assert time == 2 * (parts + size - 1)


def inputs(rank, size, direction, part):
    """The passes whose results a pass needs."""
    if direction == "forward":
        return {(rank - 1, "forward", part)} if rank else set()
    return {(rank, "forward", part), (rank + 1, "backward", part)} - {(size, "backward", part)}


@pytest.mark.parametrize(("size", "parts"), CASES)
def test_a_rank_keeps_as_many_micro_batches_as_ranks_follow_it(size, parts):
    for rank in range(size):
        live = most = 0
        for direction, _ in one_forward_one_backward(rank, size, parts):
            live += 1 if direction == "forward" else -1
            most = max(most, live)
        assert (live, most) == (0, min(size - rank, parts))
