"""Ranks die while they train, and those that live train on from the last commit."""

import json
import re
import sys
from collections import Counter

import pytest
from elastic_jobs import DIGITS, epochs_after, of_kind, start
from victims import FAULT_TOLERANT, needs_fault_tolerance

from launcher import ROOT, asked_to_stop, mpirun, run
from pairwise import also
from requirements import needs
from strategies.elastic import event_log
from strategies.session import read_metrics


@pytest.fixture(scope="module", autouse=True)
def _fault_tolerant_mpi():
    needs_fault_tolerance()


TRAIN = """
    steps = elastic.run_elastic(train, state, min_ranks=int(sys.argv[1]))
    assert (weights == 12).all()
    print("done", steps, state.comm.size, flush=True)
"""


@pytest.mark.parametrize(
    ("victims", "memory"),
    [pytest.param([(40, 0), (40, 2)], "/dev/shm"),
     *[pytest.param(victims, memory, marks=pytest.mark.long) for victims, memory in
       [([(40, 0), (41, 2)], "/dev/shm"), ([(40, 1), (40, 3)], "off"), ([(0, 2)], "off"),
        ([(305, 1)], "/dev/shm")]]],
)  # fmt: skip
def test_the_digits_are_learnt_whoever_dies(tmp_path, victims, memory):
    needs("sklearn")
    faults = ";".join(f"step={step},rank={rank},kind=kill" for step, rank in victims)
    arguments = ("--epochs", "12", "--commit-steps", "5", "--checkpoints", tmp_path / "saved")
    result, told = start(tmp_path, DIGITS, faults, *arguments, size=4, UNISONO_SHARED_MEMORY=memory)
    said = re.search(
        rf"{4 - len(victims)} of 4 ranks; each row was used 12 to 12 times; accuracy .*: (\S+)",
        result.stdout,
    )
    assert said, result
    assert float(said[1]) >= 0.96
    assert result.status == 0
    assert {(e["step"], e["rank"]) for e in of_kind(told, "fault")} == set(victims)
    for event in of_kind(told, "recovered"):
        lost = max(step for step, _ in victims) - 5 * event["commit"]
        assert lost < 10, told
        assert event["seconds"] < 60


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "jobs"),
    [(20, 2), *[pytest.param(first, 10, marks=pytest.mark.long) for first in range(0, 50, 10)]],
)
def test_randomly_killed_jobs_end_trained(first, jobs):
    needs("sklearn")
    program = ROOT / "benchmarks" / "recovery.py"
    command = [sys.executable, program, "kills", "--jobs", jobs, "--first", first]
    result = run(list(map(str, command)), timeout=580)
    assert f"{jobs} of {jobs} jobs of 4 ranks trained" in result.stdout, result
    assert result.status == 0


def test_every_kind_of_death_is_among_the_jobs_that_the_docs_tell_of():
    rows = json.loads((ROOT / "docs" / "benchmarks" / "recovery.json").read_text())
    assert len(rows) == 50
    assert all(row["accuracy"] >= 0.96 for row in rows)
    kinds = Counter(
        (len(row["kills"]), len({kill["step"] for kill in row["kills"]})) for row in rows
    )
    assert kinds.keys() == {(1, 1), (2, 1), (2, 2)}
    assert min(kinds.values()) >= 10
    at_once = [row for row in rows if len({kill["step"] for kill in row["kills"]}) == 1]
    assert any(recovery["dead"] == 2 for row in at_once for recovery in row["recoveries"])


def test_after_a_death_files_are_written_the_job_is_asked_to_stop_and_goes_on_later(tmp_path):
    needs("sklearn")
    saved, records = tmp_path / "saved", {"UNISONO_RECORDER_DIR": str(tmp_path)}
    arguments = (DIGITS, "--checkpoints", saved, "--save-steps", 10, "--epochs")
    result = asked_to_stop(
        4, *arguments, 10**5, saves=saved, step=60, options=FAULT_TOLERANT, **records,
        UNISONO_EVENTS=str(tmp_path / "events"), UNISONO_FAULT="step=42,rank=0,kind=kill",
    )  # fmt: skip
    assert result.status == 85, result
    assert "accuracy" not in result.stdout
    told = event_log.read(tmp_path / "events")
    (left,) = {line["step"] for line in of_kind(told, "left")}
    assert {line["step"] for line in of_kind(told, "asked")} == {left}
    restored = {line["rank"]: (line["step"], line["file"]) for line in of_kind(told, "restored")}
    assert restored == dict.fromkeys((1, 2, 3), (40, False))
    assert max(line["step"] for line in of_kind(told, "saved")) == left >= 60
    epochs = epochs_after(left)
    result = mpirun(
        4, *arguments, epochs, "--resume", options=FAULT_TOLERANT, timeout=110, **records
    )
    assert f"4 of 4 ranks; each row was used {epochs} to {epochs} times" in result.stdout, result
    assert result.status == 0, result
    # One line for each step, whoever was the chief, and though steps were made again.
    steps = [line["step"] for line in read_metrics(f"{saved}.jsonl")]
    assert steps == list(range(1, steps[-1] + 1))
    assert steps[-1] > left


# A pipeline is made anew by those that go on; a strategy is one of the ranks that live.
PIPELINE = """
    rows, used = list(range(240)), np.zeros(240, int)
    state = elastic.State(comm, w=weights, used=used, input=None, step=0)

    def train(state):
        comm = state.comm
        strategy = strategies.MultiWorkerMirroredStrategy(comm)
        share = strategies.input.ShardedInput(
            rows, lambda row: (row,), rank=comm.rank, size=comm.size, policy="file", seed=3)
        batches = strategies.input.batch(share, 4, allow_smaller_final_batch=True)
        if state["input"] is not None:
            batches.resume(state["input"], comm)
        with batches:
            for step in range(state["step"], 1000):
                elastic.inject(step)
                mine = np.zeros(240, int)
                mine[next(batches, np.zeros(0, int))] += 1
                everyones = strategy.reduce("sum", mine)
                if not everyones.any():
                    return
                used[:] += everyones
                weights[:] += 1
                if step % 3 == 2:
                    state.commit(input=batches.state(comm), step=step + 1)

    elastic.run_elastic(train, state)
    print("rows", used.min(), used.max(), "of", state.comm.size, flush=True)
"""


def test_those_that_go_on_make_pipelines_and_strategies_anew(tmp_path):
    result, told = start(tmp_path, PIPELINE, "step=10,rank=0,kind=kill")
    assert result.stdout.count("rows 1 1 of 2") == 2, result
    assert {event["commit"] for event in of_kind(told, "recovered")} == {3}
    assert result.status == 0


JAX = """
    import jax, optax
    rule = optax.adam(0.1)
    params = {"w": jax.numpy.ones(8)}
    state = elastic.State(
        comm, params=params, slots=rule.init(params), key=jax.random.key(comm.rank), step=0)

    def train(state):
        optimizer = strategies.DistributedOptimizer(rule, comm=state.comm)
        params, slots, key = state["params"], state["slots"], state["key"]
        for step in range(state["step"], 12):
            elastic.inject(step)
            key, _ = jax.random.split(key)
            updates, slots = optimizer.update({"w": params["w"] - step}, slots, params)
            params = optax.apply_updates(params, updates)
            state.commit(params=params, slots=slots, key=key, step=step + 1)
        return key

    key = elastic.run_elastic(train, state)
    alone, slots, other = params, rule.init(params), jax.random.key(comm.rank)
    for step in range(12):
        other, _ = jax.random.split(other)
        updates, slots = rule.update({"w": alone["w"] - step}, slots, alone)
        alone = optax.apply_updates(alone, updates)
    assert (state["params"]["w"] == alone["w"]).all()
    assert (jax.random.key_data(key) == jax.random.key_data(other)).all()
    print("as undisturbed", state.comm.size, flush=True)
"""


def test_trees_of_jax_go_on_with_the_same_bits(tmp_path):
    needs("jax", "optax")
    result, told = start(tmp_path, JAX, "step=7,rank=0,kind=kill")
    assert result.stdout.count("as undisturbed 2") == 2, result
    assert {event["commit"] for event in of_kind(told, "recovered")} == {7}


# A step of place p moves by p * p + 1, so that parameters differ in the middle of a round.
LOCAL = """
    ranks = int(sys.argv[1])
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, sync_every=4, compression=cc.FP16.with_feedback())
    state = elastic.State(
        comm, w=PerRank(weights), optimizer=PerRank(optimizer), step=0)

    def train(state):
        optimizer.rebind(state.comm)
        place = comm.rank if comm.size == ranks else state.comm.rank
        for step in range(state["step"], 12):
            elastic.inject(step)
            optimizer.apply_gradients([(np.full(1000, -1.0 - place**2), weights)])
            state.commit(step=step + 1, verify=True)

    elastic.run_elastic(train, state, max_ranks=ranks)
    print("weights", weights[0].round(2), np.ptp(weights), state.comm.size, flush=True)
"""


@pytest.mark.parametrize(
    ("size", "told_by", "words"), [(3, 2, "weights 34.67 0.0 2"), (4, 3, "weights 32.0 0.0 3")],
    ids=["survivors", "a spare rank"],
)  # fmt: skip
def test_a_round_of_local_steps_goes_on_in_its_middle(tmp_path, size, told_by, words):
    head = "    from strategies.checkpoint import PerRank"
    result, told = start(tmp_path, head + LOCAL, "step=6,rank=1,kind=kill", "3", size=size)
    assert result.stdout.count(words) == told_by, result
    assert {event["commit"] for event in of_kind(told, "recovered")} == {6}


GOSSIP = LOCAL.replace("sync_every=4, compression=cc.FP16.with_feedback()", 'neighbours="ring"')


def test_gossip_goes_on_among_the_surviving_ranks(tmp_path):
    # On a ring of three ranks or two, an average is over all of them: 6 steps of 8/3 and 6 of 3.
    head = "    from strategies.checkpoint import PerRank"
    result, told = start(tmp_path, head + GOSSIP, "step=6,rank=1,kind=kill", "3", size=3)
    assert result.stdout.count("weights 34.0 0.0 2") == 2, result
    assert {event["commit"] for event in of_kind(told, "recovered")} == {6}


DELAYED = """
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm, delay=1)
    state = elastic.State(comm, w=weights, optimizer=optimizer, step=0)

    def train(state):
        optimizer.rebind(state.comm)
        for step in range(state["step"], 12):
            elastic.inject(step)
            optimizer.apply_gradients([(np.full(1000, -2.0**step), weights)])
            state.commit(step=step + 1, verify=True)
        optimizer.close()

    elastic.run_elastic(train, state)
    print("weights", weights[0], np.ptp(weights), state.comm.size, flush=True)
"""


def test_the_average_in_flight_is_part_of_a_commit(tmp_path):
    result, told = start(tmp_path, DELAYED, "step=6,rank=1,kind=kill")
    # All steps but the last are applied.
    assert result.stdout.count(f"weights {2.0**11 - 1} 0.0 2") == 2, result
    assert {event["commit"] for event in of_kind(told, "recovered")} == {6}


def test_those_that_live_go_on_from_the_last_commit(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=0,kind=kill", "2")
    assert result.stdout.count("done 12 2") == 2, result
    found = of_kind(told, "recovered")
    assert [(event["rank"], event["size"], event["commit"]) for event in found] in (
        [(1, 2, 7), (2, 2, 7)],
        [(2, 2, 7), (1, 2, 7)],
    )
    assert len(of_kind(told, "end")) == 2


def grow_back(tmp_path, *arguments):
    program = ROOT / "benchmarks" / "growing_back.py"
    records = {"UNISONO_RECORDER_DIR": str(tmp_path)}
    return mpirun(4, program, *arguments, options=FAULT_TOLERANT, timeout=60, **records)


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "words"),
    [("missing", "Spawn: MPI_ERR"), ("failing", "Spawn: no answer within 5 s")],
)
def test_where_nothing_can_be_spawned_three_of_four_go_on(tmp_path, command, words):
    """The status is not 0, as docs/reliability.md says."""
    result = grow_back(tmp_path, "--spawn", command)
    assert result.stdout.count(words) == 3, result
    assert result.stdout.count("old rank: 3 ranks, total 200") == 3, result


@pytest.mark.long
def test_a_process_that_is_spawned_after_a_death_is_one_of_four(tmp_path):
    """What the MPI library can do; docs/reliability.md says what it cannot."""
    result = grow_back(tmp_path)
    assert result.stdout.count("old rank: 4 ranks, total 240") == 3, result
    assert result.stdout.count("new rank: 4 ranks, total 240") == 1, result


def test_fewer_than_wanted_do_not_go_on(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=1,kind=kill", "3")
    assert "too few ranks live, expected at least 3, got 2" in result.stderr, result
    assert result.status != 0
    assert "done" not in result.stdout
    assert of_kind(told, "recovered") == []


def test_an_error_of_the_program_is_not_tried_again(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=1,kind=exception", "1")
    assert result.status != 0
    assert "done" not in result.stdout
    assert "InjectedFault: a fault that UNISONO_FAULT asked for (step: 7)" in result.stderr, result
    assert [event["rank"] for event in of_kind(told, "error")] == [1]
    assert of_kind(told, "recovered") == []
    assert max(event["commit"] for event in of_kind(told, "commit")) == 7


@pytest.mark.parametrize("kind", ["corrupt", also("stop")])
def test_what_no_rank_dies_of_ends_the_job(tmp_path, kind):
    faults = f"step=7,rank=1,kind={kind}"
    result, told = start(tmp_path, TRAIN, faults, "1", "verify", UNISONO_TIMEOUT="4")
    words = {
        "corrupt": "MismatchError: commit: ranks differ, weights: checksum",
        "stop": "CollectiveTimeout: allreduce: no answer within 4 s, still waiting for rank 1",
    }
    assert words[kind] in result.stderr, result
    assert result.status != 0
    assert of_kind(told, "recovered") == []


def test_a_slow_rank_is_waited_for(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=1,kind=slow:1", "3")
    assert result.stdout.count("done 12 3") == 3, result
    assert result.status == 0
    assert of_kind(told, "failure") == []


def test_where_a_death_ends_the_job_it_ends(tmp_path):
    result, told = start(tmp_path, TRAIN, "step=7,rank=1,kind=kill", "1", options=())
    assert result.status != 0
    assert "done" not in result.stdout
    assert of_kind(told, "recovered") == []
