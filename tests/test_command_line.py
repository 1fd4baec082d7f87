"""`python -m collectives`: the commands as a user types them, and checks that must fail."""

from __future__ import annotations

import json
import sys

import pytest

from collectives import benchmark, quantities
from launcher import mpirun, run

COMMAND = ("-m", "collectives")

# Runs a command with one rank or method made bad; the first argument is the fault.
FAULTY = """
import os, sys
import numpy as np
import collectives as cc
from collectives import __main__, information

fault = {fault!r}
bad_rank = 1

allreduce, reduce = cc.Communicator.allreduce, cc.Communicator.reduce
broadcast, versions = cc.Communicator.broadcast, information.versions

def changed(comm, x, **how):
    y = allreduce(comm, x, **how)
    if comm.rank == bad_rank and y.dtype == np.int16 and y.size > 5:
        y[5] += 1
    return y

def lost(comm, x, root=0, **how):
    if comm.rank == bad_rank and getattr(x, "size", 0) == 37:
        raise OSError("the rank is not well")
    return reduce(comm, x, root, **how)

def other_versions():
    found = versions()
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == bad_rank:
        found["numpy"] = "1.0"
    return found

if fault == "wrong":
    cc.Communicator.allreduce = changed
elif fault == "lost":
    cc.Communicator.reduce = lost
elif fault == "versions":
    information.versions = other_versions
status = __main__.main({command!r})
print("status", cc.rank(), status, flush=True)
sys.exit(status)
"""


def faulty(tmp_path, fault, *command, size=3):
    program = tmp_path / "faulty.py"
    program.write_text(FAULTY.format(fault=fault, command=list(command)))
    return mpirun(size, program, timeout=100)


def lines(text):
    """Name of a check -> (verdict, the rest of its line)."""
    found = {}
    for line in text.splitlines():
        name, *rest = line.split("  ", 1)
        if rest:
            verdict, *words = rest[0].split(None, 1)
            found[name.strip()] = (verdict, words[0] if words else "")
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_check_finds_nothing_wrong(size):
    result = mpirun(size, *COMMAND, "check", timeout=100)
    assert result.status == 0, result.stdout + result.stderr
    found = lines(result.stdout)
    for operation in ("allreduce", "reduce_scatter", "alltoall", "barrier"):
        assert found[operation][0] == "ok", result.stdout
    assert {"numpy", "MPI threads", "clocks", "node engine"} <= found.keys()
    assert result.stdout.splitlines()[-1] == "all well"


def test_check_says_why_the_node_engine_is_not_in_use(tmp_path):
    for directory, reason in [("off", "UNISONO_SHARED_MEMORY=off"), (tmp_path / "no", "No such")]:
        result = mpirun(2, *COMMAND, "check", UNISONO_SHARED_MEMORY=str(directory))
        assert result.status == 0, result.stdout + result.stderr
        verdict, text = lines(result.stdout)["node engine"]
        assert verdict == "note"
        assert reason in text


def test_check_names_operation_dtype_and_rank_of_a_wrong_result(tmp_path):
    result = faulty(tmp_path, "wrong", "check")
    verdict, text = lines(result.stdout)["allreduce"]
    assert verdict == "FAILED"
    assert "on 1 ranks; rank 1: allreduce SUM int16, 37 elements, auto: 1 of 37" in text
    assert lines(result.stdout)["reduce"][0] == "ok"
    assert result.status == 1
    assert all(f"status {rank} 1" in result.stdout for rank in range(3))


def test_check_goes_on_after_a_rank_that_fails_alone(tmp_path):
    result = faulty(tmp_path, "lost", "check", "--limit", "2")
    verdict, text = lines(result.stdout)["reduce"]
    assert verdict == "FAILED"
    assert "rank 1: reduce SUM float16, 37 elements, auto: OSError: the rank is not well" in text
    assert "CollectiveTimeout" in text  # of rank 0 or 2, which waited
    assert lines(result.stdout)["reduce_scatter"][0] == "ok"
    assert all(f"status {rank} 1" in result.stdout for rank in range(3))


def test_check_names_the_rank_with_another_version(tmp_path):
    result = faulty(tmp_path, "versions", "check")
    verdict, text = lines(result.stdout)["numpy"]
    assert verdict == "FAILED"
    assert text.startswith("2 of 3 ranks have")
    assert text.endswith("but rank 1 has 1.0")
    assert result.status == 1


def test_check_ends_past_its_limit():
    # Alone: mpirun itself may crash where a rank ends while it starts.
    result = run([sys.executable, *COMMAND, "check", "--whole", "0.05"], timeout=60)
    assert result.status == 1
    assert "Timeout" in result.stderr


def test_info_as_json():
    result = mpirun(2, *COMMAND, "info", "--json")
    assert result.status == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["ranks"] == 2
    assert sum(facts["nodes"].values()) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--limit", "0"],
        ["check", "--limit", "soon"],
        ["nothing"],
        [],
        ["bench", "allreduced"],
        ["bench", "--sizes", "8:"],
        ["bench", "--sizes", "1M:8"],
        ["bench", "--dtype", "float7"],
        ["bench", "--peers", "horovod"],
        ["bench", "--algorithm", "rotation"],
        ["bench", "broadcast", "--through", "plan"],
        ["explain", "allreduce", "--bytes", "4M", "--ranks", "2", "--nodes", "3"],
        ["explain", "allreduce", "--bytes", "-4", "--ranks", "2"],
        ["explain", "barrier", "--bytes", "4", "--ranks", "2"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_refused(arguments):
    result = run([sys.executable, *COMMAND, *arguments], timeout=30)
    assert result.status == 2
    assert "expected" in result.stderr or "usage" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("operation", benchmark.OPERATIONS)
def test_bench_measures_every_operation(operation, tmp_path):
    file = tmp_path / "figures.json"
    result = mpirun(2, *COMMAND, "bench", operation, "--sizes", "8,4K", "--json", file)
    assert result.status == 0, result.stdout + result.stderr
    figures = json.loads(file.read_text())
    assert figures["facts"]["ranks"] == 2
    assert [row["bytes"] for row in figures["rows"]] == [8, 4096]
    for row in figures["rows"]:
        assert 0 < row["median"] <= row["p99"] <= row["max"]
        assert row["algbw"] == pytest.approx(row["bytes"] / row["median"])
        assert row["busbw"] == pytest.approx(row["algbw"] * benchmark.bus_factor(operation, 2))
        assert row["ratios"]["native"] == pytest.approx(row["peers"]["native"] / row["median"])
        reduces = operation in ("allreduce", "reduce", "reduce_scatter")
        assert row["error"] <= (1e-6 if reduces else 0)


@pytest.mark.parametrize(
    "arguments",
    [["--through", "plan"], ["--through", "shared"], ["--dtype", "bool"], ["--dtype", "bfloat16"],
     ["--dtype", "int32", "--algorithm", "ring"], ["--dtype", "complex64", "--peers", ""]],
    ids=" ".join,
)  # fmt: skip
def test_bench_takes_other_dtypes_and_ways(arguments):
    result = mpirun(3, *COMMAND, "bench", "--sizes", "64,100K", *arguments)
    assert result.status == 0, result.stdout + result.stderr
    assert "100K" in result.stdout


def test_bench_draws_or_says_what_is_missing(tmp_path):
    picture = tmp_path / "figure.png"
    result = mpirun(1, *COMMAND, "bench", "--sizes", "8,64K", "--plot", picture)
    assert result.status == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    without = tmp_path / "without.py"
    without.write_text(
        "import sys\nsys.modules['matplotlib'] = None\nfrom collectives import __main__\n"
        "sys.exit(__main__.main(['bench', '--plot', 'figure.png']))\n"
    )
    result = mpirun(2, without)
    assert result.status == 1
    assert result.stderr.count("a plot needs matplotlib") == 1


def test_bandwidth_factors_are_those_of_nccl_tests():
    factors = {name: benchmark.bus_factor(name, 4) for name in benchmark.OPERATIONS}
    assert factors == {
        "allreduce": 1.5, "reduce": 1, "broadcast": 1, "reduce_scatter": 0.75, "gather": 0.75,
        "allgather": 0.75, "scatter": 0.75, "alltoall": 0.75,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "8:", "0", "x", "4Q", "1.5K", "-8", "8:4", "8,,16"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="sizes: "):
        quantities.sizes(text)


def test_explain_needs_no_mpi():
    program = (
        "import sys; sys.modules['mpi4py'] = None; from collectives import __main__; "
        "sys.exit(__main__.main(sys.argv[1:]))"
    )
    question = ["explain", "allreduce", "--bytes", "4M", "--ranks", "64", "--nodes", "8"]
    result = run([sys.executable, "-c", program, *question], timeout=30)
    assert result.status == 0, result.stderr
    rows = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert {"hierarchical", "ring", "tree", "halving"} <= rows.keys()
    assert "fastest" in rows["hierarchical"]
    assert "picked by auto" in rows["hierarchical"]
    times = [float(rows[name].split()[1]) for name in ("hierarchical", "ring", "tree", "halving")]
    assert times == sorted(times)
    faster = run(
        [sys.executable, "-c", program, *question, "--gigabits", "100", "--latency", "2e-6"],
        timeout=30,
    )
    row = next(x for x in faster.stdout.splitlines() if x.startswith("hierarchical"))
    assert float(row.split()[1]) < times[0] / 10


def test_importing_the_package_imports_no_command():
    program = "import sys, collectives; print(*(m for m in sys.modules if m.startswith('coll')))"
    result = run([sys.executable, "-c", program], timeout=30)
    loaded = set(result.stdout.split())
    commands = [
        "benchmark",
        "costs",
        "exact",
        "figure",
        "information",
        "peers",
        "quantities",
        "selftest",
        "surroundings",
    ]
    assert not loaded & {f"collectives.{name}" for name in commands}
