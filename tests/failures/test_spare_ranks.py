"""Spare ranks train in the place of dead ones: as many as before, with the bits of no death."""

import hashlib
import re
import sys

import pytest
from elastic_jobs import DIGITS, epochs_after, of_kind, start
from victims import FAULT_TOLERANT, needs_fault_tolerance

from launcher import ROOT, asked_to_stop, mpirun, run
from pairwise import also
from requirements import needs
from strategies.elastic import event_log


@pytest.fixture(scope="module", autouse=True)
def _fault_tolerant_mpi():
    needs_fault_tolerance()


# Sums of random numbers, of generators of Python, NumPy and PyTorch's kind, and of rows of which
# ranks use more and less: bits that depend on who has which, and on their order.
RANDOM = """
    import os, random, signal, zlib
    rng, other = np.random.default_rng(comm.rank), random.Random(comm.rank)
    rows = strategies.input.ShardedInput(
        range(50), lambda row: (row,), rank=comm.rank, size=comm.size, policy="file", seed=3,
        num_epochs=None)
    things = {"rng": rng, "row": np.zeros(1, np.float16)}
    state = elastic.State(
        comm, weights=weights, things=things, other=other, rows=rows, step=0)

    def train(state):
        for step in range(state["step"], 14):
            elastic.inject(step)
            part = rng.random(1000) + other.random()
            for _ in range(1 + state.comm.rank % 2):
                part *= 1 + next(rows)
                things["row"][:] = step
            weights[:] += state.comm.allreduce(part, op=cc.SUM)
            if step % 3 == 2:
                state.commit(step=step + 1)
        return "trained"

    told = elastic.run_elastic(train, state, max_ranks=3)
    sums = zlib.crc32(weights), things["row"][0], state["step"], state.comm.size
    print("as one:", len(set(state.comm.allgather_object(sums))) == 1, flush=True)
    print("rank", comm.rank, told, zlib.crc32(weights), flush=True)
"""


def bits(result):
    """What the ranks that have trained say of the weights."""
    assert "as one: False" not in result.stdout, result
    return set(re.findall(r"trained (\d+)", result.stdout))


KILLS = {
    "a rank": ([(7, 1)], 1),
    "rank 0": ([(7, 0)], 1),
    "two at once": ([(7, 0), (7, 2)], 2),
    "one after the other": ([(4, 2), (10, 0)], 2),
    "the one that was spare, too": ([(4, 1), (10, 3)], 2),
    "all three": ([(4, 0), (7, 1), (7, 2)], 3),
}


@pytest.mark.parametrize("who", ["rank 0", *[also(who) for who in KILLS if who != "rank 0"]])
def test_where_spare_ranks_are_enough_deaths_change_no_bit(tmp_path, who):
    kills, spares = KILLS[who]
    undisturbed, _ = start(tmp_path, RANDOM, "", options=())
    assert undisturbed.status == 0, undisturbed
    faults = ";".join(f"step={step},rank={rank},kind=kill" for step, rank in kills)
    result, told = start(tmp_path, RANDOM, faults, size=3 + spares)
    assert result.status == 0, result
    (expected,) = bits(undisturbed)
    assert bits(result) == {expected}
    assert result.stdout.count("as one: True") == 3 + spares - len(kills)
    admitted = [(event["rank"], event["size"]) for event in of_kind(told, "admitted")]
    assert sorted(admitted) == [(3 + number, 3) for number in range(len(kills))], told
    assert {event["size"] for event in of_kind(told, "recovered")} == {3}


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_randomly_killed_jobs_end_with_the_bits_of_one_in_which_nobody_dies(first):
    needs("sklearn")
    program = ROOT / "benchmarks" / "recovery.py"
    command = [sys.executable, program, "kills", "--jobs", 10, "--first", first, "--spares", 2]
    result = run(list(map(str, command)), timeout=580)
    assert "10 of 10 jobs of 4 ranks beside 2 spare trained" in result.stdout, result
    assert result.status == 0


TRAIN = """
    import os, signal
    pids = comm.allgather_object(os.getpid())

    def killing(state):
        if sys.argv[1] == "spare" and comm.rank == 0 and state["step"] == 0:
            os.kill(pids[3], signal.SIGKILL)
        if sys.argv[1] == "leaves" and state["step"] == 0:
            cc.exit_all(85)
        return train(state)

    class Thing:
        def state_dict(self):
            return {}
        def load_state_dict(self, state):
            if comm.rank == 3 and sys.argv[1] == "admission":
                os.kill(os.getpid(), signal.SIGKILL)

    state = elastic.State(comm, weights=weights, thing=Thing(), step=0)
    steps = elastic.run_elastic(killing, state, max_ranks=3)
    assert (weights == 12).all() and state["step"] == 12
    print("done", steps, state.comm.size, flush=True)
"""


def test_a_spare_rank_that_dies_is_missed_by_nobody(tmp_path):
    result, told = start(tmp_path, TRAIN, "", "spare", size=5)
    assert result.stdout.count("done 12 4") == 3, result
    assert result.stdout.count("done None 4") == 1, result
    assert result.status == 0
    assert of_kind(told, "admitted") == of_kind(told, "recovered") == []


@pytest.mark.long
def test_a_spare_rank_that_has_died_takes_nobodys_place(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=0,kind=kill", "spare", size=4)
    assert result.stdout.count("done 12 2") == 2, result
    assert result.status == 0
    assert of_kind(told, "admitted") == []


@pytest.mark.parametrize(("spares", "size"), [(2, 3), also(1, 2)])
def test_a_rank_that_dies_while_it_is_admitted_leaves_its_place_to_the_next(tmp_path, spares, size):
    result, told = start(tmp_path, TRAIN, "step=7,rank=1,kind=kill", "admission", size=3 + spares)
    assert result.stdout.count(f"done 12 {size}") == size, result
    assert result.status == 0
    assert [event["rank"] for event in of_kind(told, "admitted")] == [4] * (spares - 1)


@pytest.mark.long
def test_where_more_die_than_are_spare_fewer_go_on(tmp_path):
    faults = "step=3,rank=1,kind=kill;step=7,rank=3,kind=kill"
    result, told = start(tmp_path, TRAIN, faults, "", size=4)
    assert result.stdout.count("done 12 2") == 2, result
    assert result.status == 0
    assert [event["size"] for event in of_kind(told, "admitted")] == [3]
    assert sorted(event["size"] for event in of_kind(told, "recovered")) == [2, 2, 3, 3]


@pytest.mark.long
def test_where_all_that_train_die_the_job_ends(tmp_path):
    faults = ";".join(f"step=7,rank={rank},kind=kill" for rank in range(3))
    result, _ = start(tmp_path, TRAIN, faults, "", size=4)
    assert "no surviving rank has a commit, expected one to resume from" in result.stderr, result
    assert result.status != 0
    assert "done" not in result.stdout


def test_an_error_of_the_program_ends_the_job_with_its_spare_ranks(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=1,kind=exception", "", size=4)
    assert "InjectedFault: a fault that UNISONO_FAULT asked for (step: 7)" in result.stderr, result
    assert result.status not in (0, 85)
    assert "done" not in result.stdout
    assert [event["rank"] for event in of_kind(told, "error")] == [1]


@pytest.mark.long
def test_a_rank_that_stands_still_ends_the_job_with_its_spare_ranks(tmp_path):
    faults = "step=7,rank=1,kind=stop"
    result, _ = start(tmp_path, TRAIN, faults, "", size=4, UNISONO_TIMEOUT="4")
    assert "CollectiveTimeout: allreduce: no answer within 4 s, still waiting for rank 1" in (
        result.stderr
    ), result
    assert result.status != 0


def test_spare_ranks_leave_with_the_status_of_those_that_train(tmp_path):
    result, told = start(tmp_path, TRAIN, "", "leaves", size=4)
    assert result.status == 85, result
    assert "done" not in result.stdout
    assert sorted(event["rank"] for event in of_kind(told, "end")) == [0, 1, 2, 3]


def test_spare_ranks_are_refused_where_a_death_ends_the_job(tmp_path):
    result, _ = start(tmp_path, TRAIN, "", "", size=4, options=())
    words = "spare ranks need a job that survives a dead rank, expected Open MPI >= 5"
    assert words in result.stderr, result
    assert result.status != 0


def test_a_job_with_spare_ranks_is_asked_to_stop_and_goes_on_later_with_the_same_bits(tmp_path):
    needs("sklearn")
    saved, records = tmp_path / "saved", {"UNISONO_RECORDER_DIR": str(tmp_path)}
    arguments = (DIGITS, "--checkpoints", saved, "--save-steps", 10, "--max-ranks", 3, "--epochs")
    result = asked_to_stop(
        4, *arguments, 10**5, saves=saved, step=40, options=FAULT_TOLERANT,
        UNISONO_EVENTS=str(tmp_path / "events"), UNISONO_FAULT="step=22,rank=0,kind=kill",
        **records,
    )  # fmt: skip
    assert result.status == 85, result
    assert "accuracy" not in result.stdout
    told = event_log.read(tmp_path / "events")
    assert [event["place"] for event in of_kind(told, "admitted")] == [0]
    assert {line["rank"] for line in of_kind(told, "left")} == {1, 2, 3}
    soon = int(last_files(saved)[0].removeprefix("step-")) + 10
    faults = {"UNISONO_FAULT": f"step={soon},rank=1,kind=kill", **records}
    epochs = epochs_after(soon)
    goes_on = (*arguments, epochs, "--resume")
    result = mpirun(4, *goes_on, options=FAULT_TOLERANT, timeout=110, **faults)
    assert f"3 of 4 ranks; each row was used {epochs} to {epochs} times" in result.stdout, result
    assert result.status == 0, result
    alone = tmp_path / "undisturbed"
    arguments = (DIGITS, "--checkpoints", alone, "--save-steps", 10, "--epochs", epochs)
    mpirun(3, *arguments, timeout=110, **records).checked()
    assert last_files(saved) == last_files(alone)


def last_files(folder):
    """The newest checkpoint's step, and a sum of each of its files of arrays."""
    newest = sorted(folder.glob("step-*"))[-1]
    files = sorted(newest.glob("*.safetensors"))
    assert files
    return newest.name, [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
