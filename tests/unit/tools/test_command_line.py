"""`python -m collectives`: the commands as a user types them, and checks that must fail."""

import json
import os
import re
import subprocess
import sys

import pytest

import collectives as cc
from collectives import __main__
from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.core import tuning_file
from collectives.core.links import DEFAULT, LinkCost, Machine
from collectives.launch import processes
from collectives.tools import bench, byte_sizes, info, plot
from launcher import ROOT, commands, mpirun, run
from pairwise import also
from requirements import require
from strategies.__main__ import main as strategies_main

COMMAND = ("-m", "collectives")

# Runs a command with one rank or method made bad; the first argument is the fault.
FAULTY = """
import os, sys
import numpy as np
from mpi4py import MPI
import collectives as cc
from collectives import __main__
from collectives.launch import processes
from collectives.tools import info as information

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
    information.versions = other_versions
elif fault == "lost":
    cc.Communicator.reduce = lost
status = __main__.main({command!r})
print("status", cc.rank(), status, flush=True)
MPI.COMM_WORLD.Barrier()  # whoever leaves with a status ends the others
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


@pytest.mark.parametrize("size", [also(1), also(2), 3, also(8), also(16), also(32)])
def test_check_finds_nothing_wrong(size):
    result = mpirun(size, *COMMAND, "check", timeout=100 if size < 16 else 400)
    assert result.status == 0, result.stdout + result.stderr
    found = lines(result.stdout)
    for operation in ("allreduce", "reduce_scatter", "alltoall", "barrier"):
        assert found[operation][0] == "ok", result.stdout
    assert {"numpy", "MPI threads", "clocks", "node engine"} <= found.keys()
    assert result.stdout.splitlines()[-1] == "all well"


def test_check_as_json():
    result = mpirun(2, *COMMAND, "check", "--json", timeout=100)
    assert result.status == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert (found["ok"], found["ranks"], found["nodes"]) == (True, 2, 1)
    verdicts = {line["name"]: line["verdict"] for line in found["lines"]}
    assert {verdicts[name] for name in selection.ALGORITHMS} == {"ok"}
    assert set(found["lines"][0]) == {"name", "verdict", "text"}


@pytest.mark.parametrize(
    ("directory", "reason"), [also("off", "UNISONO_SHARED_MEMORY=off"), ("no", "No such")]
)
def test_check_says_why_the_node_engine_is_not_in_use(tmp_path, directory, reason):
    where = directory if directory == "off" else str(tmp_path / directory)
    result = mpirun(2, *COMMAND, "check", UNISONO_SHARED_MEMORY=where)
    assert result.status == 0, result.stdout + result.stderr
    found = lines(result.stdout)
    verdict, text = found["node engine"]
    assert verdict == "note"
    assert reason in text
    page = lines((ROOT / "docs" / "command-line.md").read_text())
    for operation in ("allreduce", "reduce", "barrier"):
        assert found[operation] == page[operation]


def test_check_names_operation_dtype_and_rank_of_a_wrong_result_and_of_another_version(tmp_path):
    result = faulty(tmp_path, "wrong", "check")
    verdict, text = lines(result.stdout)["allreduce"]
    assert verdict == "FAILED"
    assert "on 1 rank; rank 1: allreduce SUM int16, 37 elements, auto: 1 of 37" in text
    verdict, text = lines(result.stdout)["numpy"]
    assert verdict == "FAILED"
    assert text.startswith("2 of 3 ranks have")
    assert text.endswith("but rank 1 has 1.0")
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


def test_check_ends_past_its_limit():
    # Alone: mpirun itself may crash where a rank ends while it starts.
    result = run([sys.executable, *COMMAND, "check", "--whole", "0.001"], timeout=60)
    assert result.status == 1, result
    assert "check: Timeout: it is not done after 0.001 s" in result.stderr
    assert "most recent call first" in result.stderr


KEEPS_THE_LOCK = """
import ctypes
from collectives.tools import check
check._STUCK_SECONDS = 0.2
check.world.init = lambda: ctypes.PyDLL(None).sleep(60)  # lets no other thread run
check.run(whole=0.2)
"""


def test_check_ends_past_its_limit_where_no_thread_can_run():
    result = run([sys.executable, "-c", KEEPS_THE_LOCK], timeout=50)
    assert result.status == 1, result
    assert "Timeout (0:00:00.4" in result.stderr


def test_info_as_json():
    result = mpirun(2, *COMMAND, "info", "--json")
    assert result.status == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["ranks"] == 2
    assert sum(facts["nodes"].values()) == 2
    assert re.fullmatch(
        r"(plain|streaming) on rank.*; a line that another core has takes .* ns", facts["stores"]
    )
    result = mpirun(2, *COMMAND, "info", "--json", UNISONO_STORES="streaming")
    assert json.loads(result.stdout)["stores"] == "streaming on ranks 0 1; not measured"
    result = mpirun(1, *COMMAND, "info", "--json")
    facts = json.loads(result.stdout, parse_constant=pytest.fail)
    assert facts["stores"] is None
    assert facts["links"]["shared"]["eager"] is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("check --limit 0", "--limit"),
        ("check --limit soon", "--limit"),
        ("nothing", "command"),
        ("bench allreduced", "operation"),
        ("bench --sizes 8:", "--sizes"),
        ("bench --sizes 1M:8", "--sizes"),
        ("bench --dtype float7", "--dtype"),
        ("bench --peers horovod", "--peers"),
        ("bench --algorithm rotation", "--algorithm"),
        ("bench --through a", "--through"),
        ("bench broadcast --through plan", "--through"),
        ("bench --through call,", "--through"),
        ("explain allreduce --bytes 4M --ranks 2 --nodes 3", "--nodes <= --ranks"),
        ("explain allreduce --bytes 4M --ranks 0", "--ranks"),
        ("explain allreduce --bytes 4M --ranks two", "--ranks"),
        ("explain allreduce --bytes -4 --ranks 2", "--bytes"),
        ("explain allreduce --bytes x --ranks 2", "--bytes"),
        ("explain allreduce --bytes 4,8 --ranks 2", "--bytes"),
        ("explain allreduce --bytes 4 --ranks 5 --nodes 2 --upto 9", "--upto"),
        ("explain allreduce --bytes 4 --ranks 4 --upto 0", "--upto"),
        ("explain allreduce --bytes 4 --ranks 4 --plot curve.png", "--plot"),
        ("explain allgatherv --bytes 4 --ranks 2", "operation"),
        ("explain allreduce --bytes 4 --ranks 2 --tuned /no/such/file", "/no/such/file"),
        ("tune --seconds 0", "--seconds"),
        ("tune --out", "--out"),
    ],
)
def test_wrong_arguments_are_refused_by_the_names_of_the_command_line(arguments, named, capsys):
    try:
        status = __main__.main(arguments.split())
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    stderr = capsys.readouterr().err
    said = ("expected", "choose from", "required", "No such file")
    assert any(word in stderr for word in said)
    assert named in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (__main__.main, ["simulate", "--clus", "cluster.toml", "--nodes", "2", "--bytes", "8"]),
        (__main__.main, ["tune", "--sec", "1"]),
        (strategies_main, ["submit", "train.py", "--elast", "--dry-run"]),
    ],
    ids=["simulate", "tune", "submit"],
)
def test_abbreviated_options_are_refused(main, arguments, capsys, monkeypatch):
    monkeypatch.setattr("collectives.tools.tune.run", lambda *options: 0)
    with pytest.raises(SystemExit):
        main(arguments)
    assert "unrecognized arguments: --" in capsys.readouterr().err


def test_wrong_arguments_end_the_program():
    result = run([sys.executable, *COMMAND, "bench", "--sizes", "8:"], timeout=30)
    assert result.status == 2
    assert "expected" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", ["check --limit 0", "bench --through a"])
def test_ranks_report_a_wrong_argument_once(arguments):
    result = mpirun(3, *COMMAND, *arguments.split())
    assert result.status == 2
    assert result.stderr.count(f"{arguments.split()[1]}") == 1, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "collectives errors",
        "collectives explain allreduce --bytes 4 --ranks 2",
        "strategies submit Makefile --dry-run",
    ],
)
def test_a_command_ends_quietly_when_the_reader_of_its_pipe_has_gone(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        command = [sys.executable, "-m", *arguments.split()]
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=60, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_bench_measures_every_operation(tmp_path):
    files = {operation: tmp_path / f"{operation}.json" for operation in bench.OPERATIONS}
    lists = [["bench", name, "--sizes", "8,4K", "--json", file] for name, file in files.items()]
    commands(2, *lists)
    for operation, file in files.items():
        figures = json.loads(file.read_text())
        assert figures["facts"]["ranks"] == 2
        assert [row["bytes"] for row in figures["rows"]] == [8, 4096]
        for row in figures["rows"]:
            assert 0 < row["median"] <= row["p99"] <= row["max"]
            assert row["algbw"] == pytest.approx(row["bytes"] / row["median"])
            assert row["busbw"] == pytest.approx(row["algbw"] * bench.bus_factor(operation, 2))
            assert row["ratios"]["native"] == pytest.approx(row["peers"]["native"] / row["median"])
            reduces = operation in ("allreduce", "reduce", "reduce_scatter")
            assert row["error"] <= (1e-6 if reduces else 0)


BOUND_BENCH = """
import os, sys
from mpi4py import MPI
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[MPI.COMM_WORLD.rank]})
from collectives import __main__
sys.exit(__main__.main(["bench", "--sizes", "8,64K", "--json", *sys.argv[1:]]))
"""


def test_bench_counts_the_cores_of_all_ranks_that_are_bound(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        require("cores", "one core cannot be shared out")
    program = tmp_path / "bound.py"
    program.write_text(BOUND_BENCH)
    result = mpirun(2, program, tmp_path / "figures.json")
    assert result.status == 0, result.stderr
    assert ", 2 cores (1 for a rank), " in result.stdout
    facts = json.loads((tmp_path / "figures.json").read_text())["facts"]
    assert ", 2 cores (1 for a rank), " in facts["machine"]


def test_bench_names_its_peer_and_recommends_plans_for_small_arrays(tmp_path):
    file = tmp_path / "figures.json"
    result = mpirun(2, *COMMAND, "bench", "--sizes", "8,1M", "--json", file)
    assert result.status == 0, result.stderr
    figures = json.loads(file.read_text())
    name = figures["names"]["native"]
    assert re.fullmatch(r"(Open MPI|MPICH|Intel MPI) \d+\.\d+.*", name)
    heads = next(line for line in result.stdout.splitlines() if "median us" in line)
    assert f"  {name} us  x {name}  " in heads
    rows = result.stdout.splitlines()[4:6]
    assert {len(row) for row in rows} == {len(heads)}
    assert result.stdout.count("faster through a plan") == 1
    others = ["--sizes=1M"], ["--sizes=8", "--through", "plan"], ["reduce", "--sizes=8"]
    result = commands(2, *(["bench", *other] for other in others))
    assert "through a plan" not in result.stdout


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost", "Open MPI 5.0.11"),
        ("Open MPI v5.1.0rc2", "Open MPI 5.1.0rc2"),
        ("MPICH Version:      4.3.2", "MPICH 4.3.2"),
        ("MVAPICH Version      :\t3.0", "MVAPICH 3.0"),
        ("Intel(R) MPI Library 2021.14 for Linux* OS", "Intel MPI 2021.14"),
    ],
)
def test_the_name_of_an_mpi_library(monkeypatch, said, name):
    monkeypatch.setattr(processes, "library", lambda: said)
    assert info.library_name() == name


def test_bench_takes_other_dtypes_and_ways():
    ways = [
        ["--through", "plan,shared"], ["--dtype", "bool"], ["--dtype", "bfloat16"],
        ["--dtype", "int32", "--algorithm", "ring"],
        ["--dtype", "complex64", "--peers", ""],
    ]  # fmt: skip
    result = commands(3, *(["bench", "--sizes", "64,100K", *way] for way in ways))
    assert len(re.findall(r"^ *100K ", result.stdout, re.M)) == len(ways) + 1, result.stdout
    assert re.findall(r"^ *100K +(plan|shared) ", result.stdout, re.M) == ["plan", "shared"]


def test_bench_says_that_ranks_wait_for_cores():
    ranks = (os.cpu_count() or 1) + 1
    result = mpirun(ranks, *COMMAND, "bench", "--sizes", "8").checked()
    said = rf"bench: ranks may wait for a core, .*load average .*, {ranks} ranks and {ranks - 1} "
    assert len(re.findall(said, result.stderr)) == 1, result


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


def test_bench_on_one_rank_measures_and_says_what_the_figures_mean():
    result = run([sys.executable, *COMMAND, "bench", "--sizes", "8"], timeout=60)
    assert result.status == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[1].startswith("1 rank, 1 node; ")
    assert lines[-1].startswith("one rank sends nothing, so busbw is 0")


def test_bandwidth_factors_are_those_of_nccl_tests():
    factors = {name: bench.bus_factor(name, 4) for name in bench.OPERATIONS}
    assert factors == {
        "allreduce": 1.5, "reduce": 1, "broadcast": 1, "reduce_scatter": 0.75, "gather": 0.75,
        "allgather": 0.75, "scatter": 0.75, "alltoall": 0.75,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "8:", "0", "x", "4Q", "1.5K", "-8", "8:4", "8,,16"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="sizes: "):
        byte_sizes.sizes(text)


def test_sizes_are_written_as_they_are_read():
    texts = ["0", "8", "1000", "1K", "48K", "1M", "3G"]
    assert [
        byte_sizes.size_text(n) for n in (0, 8, 1000, 1 << 10, 48 << 10, 1 << 20, 3 << 30)
    ] == texts
    assert [byte_sizes.sizes(text)[0] for text in texts[1:]][:3] == [8, 1000, 1024]


def test_explain_needs_no_mpi():
    program = (
        "import sys; sys.modules['mpi4py'] = None; from collectives import __main__; "
        "sys.exit(__main__.main(sys.argv[1:]))"
    )
    question = ["explain", "allreduce", "--bytes", "4M", "--ranks", "64", "--nodes", "8"]
    question += ["--tuned", "off"]
    result = run([sys.executable, "-c", program, *question], timeout=30)
    assert result.status == 0, result.stderr
    rows = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert {"hierarchical", "ring", "tree", "halving"} <= rows.keys()
    assert "fastest" in rows["hierarchical"]
    assert "picked by auto" in rows["hierarchical"]
    times = [float(rows[name].split()[1]) for name in ("hierarchical", "ring", "halving")]
    assert times == sorted(times)
    faster = run(
        [sys.executable, "-c", program, *question, "--gigabits", "100", "--latency", "2e-6"],
        timeout=30,
    )
    row = next(x for x in faster.stdout.splitlines() if x.startswith("hierarchical"))
    assert float(row.split()[1]) < times[0] / 10


def test_explain_as_json(capsys):
    question = ["explain", "allreduce", "--bytes", "4K", "--ranks", "6", "--nodes", "3"]
    question += ["--tuned", "off"]
    assert __main__.main([*question, "--upto", "4"]) == 0
    table = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert __main__.main([*question, "--upto", "4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    known = facts["operation"], facts["bytes"], facts["ranks"], facts["nodes"]
    assert known == ("allreduce", 4096, 6, 3)
    for name, seconds in facts["seconds"].items():
        assert f"{1e3 * seconds:.4f}" == table[name][1]
    assert facts["auto"]["algorithm"] == "together"
    assert f"{1e3 * facts['auto']['seconds']:.4f}" == table["together"][1]
    assert facts["links"]["network"]["alpha"] == DEFAULT.network.alpha
    assert [point["ranks"] for point in facts["curve"]] == [2, 4, 8]
    assert set(facts["curve"][0]) == {"nodes", "ranks", "auto", "seconds"}


def example(command):
    """What docs/command-line.md shows below a command."""
    text = (ROOT / "docs" / "command-line.md").read_text()
    return text.split(f"$ {command}\n", 1)[1].split("```", 1)[0]


@pytest.mark.parametrize(
    "command",
    [
        "python -m collectives explain allreduce --bytes 4M --ranks 64 --nodes 8",
        "UNISONO_NETWORK_LINK=alpha=2us,beta=100Gbit/s "
        "python -m collectives explain broadcast --bytes 1K --ranks 64 --nodes 8",
        "python -m collectives explain allreduce --bytes 25M --ranks 8 --upto 1024",
    ],
)
def test_the_examples_of_the_documentation_are_true(command):
    *settings, arguments = command.partition("python ")[::2]
    extra = dict(setting.strip().split("=", 1) for setting in settings if setting)
    result = run([sys.executable, *arguments.split()], timeout=30, UNISONO_TUNED="off", **extra)
    assert result.status == 0, result.stderr
    printed, shown = result.stdout.split(), example(command).split()
    assert len(printed) == len(shown)
    for word, expected in zip(printed, shown, strict=True):
        # A constant of an algorithm may have been measured anew.
        if re.fullmatch(r"\d+\.\d+", expected):
            assert float(word) == pytest.approx(float(expected), rel=0.02)
        else:
            assert word == expected


def test_a_curve_says_what_it_rests_on_and_can_be_drawn(tmp_path):
    file, picture = tmp_path / "cluster.json", tmp_path / "curve.png"
    tuning_file.write(file, {"network": DEFAULT.network}, {"ranks": 6, "nodes": 3, "when": "today"})
    command = [*COMMAND, "explain", "allreduce", "--bytes", "4K", "--ranks", "6", "--nodes", "3"]
    where = {"UNISONO_TUNED": str(file)}
    drawn = ["--plot", str(picture)] * plot.is_possible()
    result = run([sys.executable, *command, "--upto", "48", *drawn], timeout=60, **where)
    assert result.status == 0, result.stderr
    _, curve = result.stdout.split("\n\n")
    *rows, rests = curve.strip().splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [
        [str(n), str(2 * n)] for n in (1, 2, 4, 8, 16, 32, 48)
    ]
    assert [row.split()[2] for row in rows] == ["node"] + 6 * ["together"]
    times = [float(row.split()[3]) for row in rows]
    assert times == sorted(times)
    assert rests.startswith("The links of the file were measured with 6 ranks on 3 nodes, today")
    assert not drawn or picture.read_bytes().startswith(b"\x89PNG")


def test_explain_and_auto_go_by_the_same_links_from_the_same_places(tmp_path):
    file = tmp_path / "cluster.json"
    tuning_file.write(
        file, {"network": LinkCost(1e-3, 1e-9, 1e-11), "node": LinkCost(1e-5, 1e-9, 1e-11)}, {}
    )
    program = tmp_path / "pick.py"
    program.write_text(
        "import collectives as cc\n"
        "from collectives.algorithms import selection\n"
        "from collectives.communicator import group_of\n"
        "layout = group_of(cc.init()).layout\n"
        "picked = selection.pick('allreduce', 1 << 20, layout)\n"
        "print(cc.rank(), layout.machine, picked, flush=True)\n"
    )
    where = {"UNISONO_TUNED": str(file), "UNISONO_NODE_LINK": "alpha=50us"}
    picked = mpirun(2, program, **where)
    assert picked.status == 0, picked.stderr
    answers = sorted(picked.stdout.splitlines())
    assert [answer.partition(" ")[2] for answer in answers][1:] == [answers[0].partition(" ")[2]]
    node, network = LinkCost(5e-5, 1e-9, 1e-11), LinkCost(1e-3, 1e-9, 1e-11)
    machine = Machine(
        DEFAULT.shared,
        node._replace(eager=DEFAULT.node.eager),
        network._replace(eager=DEFAULT.network.eager),
    )
    assert f"0 {machine} " in answers[0]
    command = [*COMMAND, "explain", "allreduce", "--bytes", "1M", "--ranks", "2", "--nodes", "2"]
    explained = run([sys.executable, *command], timeout=30, **where)
    assert explained.status == 0, explained.stderr
    rows = {line.split()[0]: line for line in explained.stdout.splitlines()}
    assert f"UNISONO_NODE_LINK (alpha), else {file}" in rows["node"]
    assert rows["network"].endswith(f"0.0100  {file}")
    (auto,) = (name for name, row in rows.items() if "picked by auto" in row)
    expected = selection.pick("allreduce", 1 << 20, RankLayout(2, 2, machine))
    assert auto == expected
    facts = mpirun(1, *COMMAND, "info", "--json", **where)
    link = json.loads(facts.stdout)["links"]["network"]
    assert link == {**machine.network._asdict(), "program": None, "from": str(file)}


def test_a_damaged_file_stops_every_rank_at_init(tmp_path):
    file = tmp_path / "cluster.json"
    file.write_text("{}")
    result = mpirun(3, *COMMAND, "info", UNISONO_TUNED=str(file))
    assert result.status != 0
    assert f"tuned: {file} is not what `python -m collectives tune` writes" in result.stderr


def tune(size, *arguments, **extra):
    return mpirun(size, *COMMAND, "tune", "--seconds", "0.5", *arguments, timeout=100, **extra)


@pytest.mark.parametrize("size", [2, 3, also(4)])
def test_tune_measures_the_links_and_holds_the_model_against_them(size, tmp_path):
    file = tmp_path / "made" / "cluster.json"
    result = tune(size, "--out", file)
    assert result.status == 0, result.stdout + result.stderr
    measured = tuning_file.read(file)
    assert measured.keys() == {"shared", "node"}
    for link in measured.values():
        assert all(0 < number < 1 for number in link[:3])
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("allreduce")]
    assert {row[2] for row in rows} == set(selection.ALGORITHMS["allreduce"]) - {"hierarchical"}
    assert len({row[1] for row in rows}) == 4
    assert [row[-1] for row in rows].count("picked") == 4
    assert all(row[3] == "-" for row in rows if row[2] == "native")
    assert "picked is within 10 % of the fastest of ours in" in result.stdout
    assert f"kept in {file}" in result.stdout
    assert result.stdout.count("kept in") == 1  # by one rank


def test_tune_keeps_one_file_for_each_cluster_and_what_it_did_not_measure(tmp_path):
    file = tmp_path / "unisono" / "apple.json"
    tuning_file.write(file, {"network": LinkCost(1e-6, 1e-10, 1e-11)}, {})
    result = tune(2, UNISONO_TUNED="", XDG_CONFIG_HOME=str(tmp_path), SLURM_CLUSTER_NAME="apple")
    assert result.status == 0, result.stderr
    assert tuning_file.read(file).keys() == {"shared", "node", "network"}
    assert tuning_file.read(file)["network"] == LinkCost(1e-6, 1e-10, 1e-11)
    facts = json.loads(file.read_text())["measured"]
    assert (facts["ranks"], facts["nodes"]) == (2, 1)


@pytest.mark.parametrize("size", [1, 2])
def test_tune_refuses_before_it_measures(size, tmp_path):
    file = tmp_path / "thesis.json"
    file.write_text('{"chapters": 7}')
    result = tune(size, "--out", file)
    assert result.status == 1
    reason = "there is one rank" if size == 1 else f"tuned: {file} is not what"
    assert result.stderr.count(reason) == 1
    assert "Traceback" not in result.stderr
    assert file.read_text() == '{"chapters": 7}'


def test_tune_says_that_it_cannot_keep_what_it_found(tmp_path):
    (tmp_path / "file").touch()
    result = tune(2, "--out", tmp_path / "file" / "cluster.json")
    assert result.status == 1
    assert "cannot keep it" in result.stderr
    assert "picked is within" in result.stdout


STUCK = """
import sys, threading
from collectives import __main__
from collectives.tools import measure as measuring

timed, calls = measuring.MeasuringClock._time, []

def faulty(clock, *arguments):
    calls.append(1)
    if clock.comm.rank == 1 and len(calls) == 20:
        if sys.argv[1] == "raises":
            raise OSError("the rank is not well")
        threading.Event().wait(90)
    return timed(clock, *arguments)

measuring.MeasuringClock._time = faulty
sys.exit(__main__.main(["tune", "--seconds", "0.5", "--out", sys.argv[2]]))
"""


@pytest.mark.parametrize(
    ("fault", "limit", "reason"),
    [
        ("raises", "60", "not well"),
        ("stops", "5", "tune: no answer within 5 s, still waiting for"),
    ],
)
def test_tune_ends_when_a_rank_fails_or_stops(fault, limit, reason, tmp_path):
    program = tmp_path / "stuck.py"
    program.write_text(STUCK)
    file = tmp_path / "cluster.json"
    result = mpirun(2, program, fault, file, timeout=100, UNISONO_TIMEOUT=limit)
    assert result.status != 0
    assert reason in result.stderr
    assert not file.exists()


def test_importing_the_package_imports_no_command():
    program = "import sys, collectives; print(*(m for m in sys.modules if m.startswith('coll')))"
    result = run([sys.executable, "-c", program], timeout=30)
    loaded = set(result.stdout.split())
    commands = [
        "benchmark",
        "exact",
        "figure",
        "information",
        "measuring",
        "peers",
        "selftest",
        "surroundings",
        "tune",
    ]
    assert not loaded & {f"collectives.{name}" for name in commands}


@pytest.mark.parametrize("package", ["collectives", "strategies"])
def test_a_package_without_a_command_lists_its_commands(package):
    result = run([sys.executable, "-m", package], timeout=60)
    assert (result.status, result.stderr) == (2, "")
    commands = {"collectives": ["info", "check", "bench"], "strategies": ["checkpoint", "demo"]}
    for command in commands[package]:
        assert re.search(rf"^ +{command} +\w", result.stdout, re.M), result.stdout
    result = run([sys.executable, "-m", package, "--version"], timeout=60)
    assert (result.status, result.stdout) == (0, f"unisono {cc.__version__}\n")


def test_the_demo_refuses_zero_ranks():
    result = run([sys.executable, "-m", "strategies", "demo", "--ranks", "0"], timeout=60)
    assert result.status == 2
    assert "argument --ranks: expected an integer >= 1, got '0'" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        *((f"collectives {name}", []) for name in ("info", "tune", "timeline", "errors")),
        ("collectives check", [*selection.ALGORITHMS]),
        ("collectives bench", bench.OPERATIONS),
        ("collectives explain", [*selection.ALGORITHMS]),
        ("collectives simulate", [*selection.ALGORITHMS]),
        ("strategies demo", ["digits"]),
        ("strategies submit", ["Slurm", "sbatch"]),
        ("strategies checkpoint", ["show", "verify", "diff"]),
        ("strategies checkpoint show", ["manifests"]),
    ],
)
def test_the_help_of_a_command_has_a_sentence_and_the_operations(command, words, capsys):
    package, *arguments = command.split()
    main = {"collectives": __main__.main, "strategies": strategies_main}[package]
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    printed = capsys.readouterr().out
    sentence = printed.split("\n\n")[1]
    assert re.match(r"[A-Z].*\.$", sentence, re.DOTALL), printed
    assert all(re.search(rf"\b{word}\b", printed) for word in words)
