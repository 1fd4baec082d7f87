"""Spare ranks beside deaths in the first commit, errors while a state is handed on, and exits."""

import re

import pytest
from elastic_jobs import of_kind, start
from victims import needs_fault_tolerance

from pairwise import also


@pytest.fixture(scope="module", autouse=True)
def _fault_tolerant_mpi():
    needs_fault_tolerance()


# Generators are asked for their states once in a commit; a rank may die just then. The weights are
# sums of random numbers: of those that train, whose generators are not alike.
FIRST = """
    import os, signal
    rng, kept = np.random.default_rng(comm.rank), sys.argv[1] == "kept"

    class Thing:
        commits = 0

        def state_dict(self):
            Thing.commits += 1
            if comm.rank == int(sys.argv[2]) and Thing.commits == 1 + kept:
                os.kill(os.getpid(), signal.SIGKILL)
            return {}

        def load_state_dict(self, state):
            pass

    state = elastic.State(comm, weights=weights, thing=Thing(), rng=rng, step=0)
    if kept:
        state.commit()  # by the program, without a thought of spare ranks

    def train(state):
        for step in range(state["step"], 4):
            elastic.inject(step)
            weights[:] += state.comm.allreduce(rng.random(1000), op=cc.SUM)
            state.commit(step=step + 1)
        return "trained"

    told = elastic.run_elastic(train, state, max_ranks=int(sys.argv[3]))
    own = [np.random.default_rng(int(rank)).random((4, 1000)) for rank in sys.argv[4].split(",")]
    expected = np.zeros(1000)
    for step in range(4):
        expected += np.sum([numbers[step] for numbers in own], axis=0)
    assert np.allclose(weights, expected), (weights[:3], expected[:3])
    print("done", told, state.comm.size, flush=True)
"""


@pytest.mark.parametrize("before", ["", also("kept")])
def test_a_death_in_the_first_commit_lets_the_others_begin(tmp_path, before):
    """Rank 0 of 5 dies there, and the next one of those that began on its generators."""
    arguments = (before, 0, 3, "1,2,3")
    faults = "step=0,rank=1,kind=kill"
    result, told = start(tmp_path, FIRST, faults, *arguments, size=5)
    assert result.stdout.count("done trained 3") == 3, result
    assert result.status == 0
    assert [(event["rank"], event["place"]) for event in of_kind(told, "admitted")] == [(4, 0)]


@pytest.mark.long
def test_a_death_in_the_first_commit_without_spare_ranks_lets_the_others_begin(tmp_path):
    result, _ = start(tmp_path, FIRST, "", "", 1, 3, "0,2", size=3)
    assert result.stdout.count("done trained 2") == 2, result
    assert result.status == 0


# Rank 3 is spare, and has no memory for what it is given.
HANDED_ON = """
    empty, calls = np.empty, 0

    def without_memory(shape, *args, **kwargs):
        global calls
        calls += shape == (1000,)
        if shape == (1000,) and calls == 2:  # the first is its own part of the first commit
            raise MemoryError("Unable to allocate")
        return empty(shape, *args, **kwargs)

    if comm.rank == 3:
        np.empty = without_memory
    try:
        elastic.run_elastic(train, state, max_ranks=3)
    except RuntimeError as error:
        print("rank", comm.rank, "raised", error, flush=True)
"""


def test_an_error_while_the_state_is_handed_on_is_raised_by_all(tmp_path):
    fault = "step=7,rank=1,kind=kill"
    result, told = start(tmp_path, HANDED_ON, fault, size=5, UNISONO_TIMEOUT="60")
    said = sorted(re.findall(r"rank (\d) raised (.*)", result.stdout))
    assert [rank for rank, _ in said] == ["0", "2", "4"], result
    assert all("MemoryError: Unable to allocate (train of rank 2 (world rank 3)" in text
               for _, text in said), result  # fmt: skip
    assert "CollectiveTimeout" not in result.stdout + result.stderr
    assert [event["rank"] for event in of_kind(told, "error")] == [3]


LEAVES = """
    def leaving(state):
        if state["step"] == 0 and (sys.argv[1] == "all" or comm.rank == 1):
            sys.exit(*[int(code) for code in sys.argv[2:]])
        return train(state)

    try:
        elastic.run_elastic(leaving, state, max_ranks=3)
    except SystemExit as left:
        print("rank", comm.rank, "left with", left.code, flush=True)
    except RuntimeError as error:
        print("rank", comm.rank, "raised", error, flush=True)
    else:
        print("rank", comm.rank, "returned", flush=True)
"""


@pytest.mark.parametrize(("codes", "status"), [((), "(None|0)"), also((3,), "3")])
def test_all_leave_where_those_that_train_do(tmp_path, codes, status):
    result, _ = start(tmp_path, LEAVES, "", "all", *codes, size=5)
    assert len(re.findall(rf"rank \d left with {status}\n", result.stdout)) == 5, result


def test_one_rank_that_exits_is_an_error_on_all(tmp_path):
    result, told = start(tmp_path, LEAVES, "", "one", 3, size=5, UNISONO_TIMEOUT="60")
    said = sorted(re.findall(r"rank (\d) raised (.*)", result.stdout))
    assert [rank for rank, _ in said] == ["0", "1", "2", "3", "4"], result
    words = "rank 1 (world rank 1) has left by sys.exit(3) while others train, expected all of them"
    assert all(words in text for _, text in said), result
    assert "no answer within 60 s" not in result.stderr
    assert [event["rank"] for event in of_kind(told, "error")] == [1]


AGAIN = """
    import gc, os, threading

    def held():
        gc.collect()
        with open("/proc/self/maps") as maps:
            segments = sum("unisono" in line for line in maps)
        return threading.active_count(), len(os.listdir("/proc/self/fd")), segments

    def through():
        state = elastic.State(comm, weights=weights, step=0)
        def train(state):
            state.comm.allreduce_async(np.ones(10)).wait()  # by a thread
        elastic.run_elastic(train, state, max_ranks=2)
        assert state.comm.allreduce(1, op=cc.SUM) == 3

    through()
    before = held()
    for _ in range(4):
        through()
    print("rank", comm.rank, "holds no more:", held() == before, before, held(), flush=True)
"""


def test_what_those_that_have_trained_share_is_freed_at_the_end(tmp_path):
    result, _ = start(tmp_path, AGAIN, "", size=3)
    assert len(re.findall(r"rank \d holds no more: True", result.stdout)) == 3, result
    assert result.status == 0
