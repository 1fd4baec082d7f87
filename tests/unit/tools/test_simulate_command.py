"""`python -m collectives simulate`: its table, its picture, and what it refuses."""

import sys

import pytest

from collectives import __main__
from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.core.links import DEFAULT
from collectives.simulation.cluster import SimulatedCluster
from collectives.tools import simulate
from collectives.tools.explain import Question
from requirements import needs

LINK = ["--link", "100Gbit/s", "--latency", "5us", "--tuned", "off"]


def printed(capsys, *options):
    """The lines of the algorithms: name -> columns."""
    assert __main__.main(["simulate", *LINK, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line.split(None, 4) for line in lines if "." in line.split()[1]}


def test_the_table_has_all_algorithms_the_fastest_first(capsys):
    rows = printed(capsys, "--nodes", "8", "--ranks", "4", "--bytes", "1MiB")
    names = [name for name in rows if name in selection.ALGORITHMS["allreduce"]]
    assert set(names) == set(selection.ALGORITHMS["allreduce"]) - {"native"}
    assert names[0] == "hierarchical"
    times = [float(rows[name][1]) for name in names]
    assert times == sorted(times)
    name, _, share, percent, rest = rows["hierarchical"]
    least = 2 * 7 / 8 * (1 << 20) * 8e-11
    assert (int(share), percent) == (round(100 * least / (1e-3 * times[0])), "%")
    assert rest.endswith("fastest, picked by auto")
    assert "8.00" not in rows, "what the network costs"


def test_a_small_call_travels_with_its_comparison_which_is_simulated(capsys):
    rows = printed(capsys, "--nodes", "8", "--bytes", "4K")
    assert "picked by auto" in rows["together"][-1]
    alone, together = float(rows["comparison"][1]), float(rows["together"][1])
    fastest = min(float(rows[name][1]) for name in selection.ALGORITHMS["allreduce"].keys() & rows)
    assert alone < together < alone + fastest
    assert "together" not in printed(capsys, "--nodes", "8", "--bytes", "4M")


def test_slow_ranks_switches_and_noise_make_it_slower(capsys):
    question = ["--nodes", "8", "--op", "allgather", "--bytes", "1M"]
    usual = printed(capsys, *question)
    for options in (
        ["--slow", "3:100"],
        ["--switch", "4", "--oversubscribed", "8"],
        ["--noise", "0.5", "--seed", "7"],
    ):
        changed = printed(capsys, *question, *options)
        assert float(changed["ring"][1]) > float(usual["ring"][1]), options


def test_ranks_that_share_cores_take_longer(capsys):
    def ring(*options):
        question = ["simulate", *LINK, "--nodes", "8", "--bytes", "512", *options]
        assert __main__.main(question) == 0
        lines = capsys.readouterr().out.splitlines()
        return float(next(line for line in lines if line.startswith("ring")).split()[1])

    alone = ring()
    assert ring("--cores", "1") == alone
    assert ring("--cores", "8", "--nodes-per-host", "8") == alone
    assert ring("--cores", "2", "--nodes-per-host", "8") > 3 * alone


def test_what_takes_too_long_is_stopped_and_said(capsys):
    rows = printed(capsys, "--nodes", "64", "--bytes", "16M", "--within", "1e-6")
    assert rows["ring"][1].startswith(">")
    assert rows["ring"][-1].endswith("stopped")


@pytest.mark.parametrize(
    ("operation", "seconds"),
    [("allreduce", 1.5), ("allgather", 0.75), ("broadcast", 1.0), ("alltoall", 1.5),
     ("barrier", 0.0)],
)  # fmt: skip
def test_the_least_time_of_the_line(operation, seconds):
    layout = RankLayout(8, 4, DEFAULT)
    whole = (1 << 20) * DEFAULT.network.beta
    least = simulate.least_seconds(Question(operation, 1 << 20), layout)
    assert least == pytest.approx(seconds * whole)


def test_on_one_node_the_engine_stands_beside_the_messages():
    rows = simulate.rows(Question("allreduce", 1 << 16), SimulatedCluster(4, 1), 60.0)
    assert rows[0].algorithm == "node"
    by_messages = selection.ALGORITHMS["allreduce"].keys() - {"hierarchical", "native"}
    assert {row.algorithm for row in rows} == {"node", *by_messages}


def test_a_picture_is_drawn(capsys, tmp_path):
    needs("matplotlib")
    file = tmp_path / "sizes.png"
    printed(capsys, "--nodes", "4", "--bytes", "1K:64K", "--picture", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def refused(capsys, *options):
    """Return the line that says why a command is refused, which ends with status 2."""
    try:
        status = __main__.main(["simulate", *LINK, *options])
    except SystemExit as ended:  # argparse
        status = ended.code
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, "one line, and no traceback"
    return err


CALL = ["--nodes", "2", "--bytes", "8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0", "--bytes", "8"], "--nodes: expected an integer >= 1, got '0'"),
        (["--nodes", "2", "--ranks", "-1", "--bytes", "8"], "--ranks: expected an integer >= 1"),
        (["--nodes", "1000000", "--bytes", "8"], "at most 65536 ranks"),
        (
            ["--nodes", "two", "--bytes", "8"],
            "argument --nodes: expected an integer >= 1, got 'two'",
        ),
        (["--nodes", "2", "--bytes", "x"], "simulate: --bytes: not a number of bytes"),
        (["--nodes", "2", "--bytes", ""], "not a number of bytes"),
        (["--nodes", "2", "--bytes", "0"], "not a number of bytes"),
        (["--nodes", "2", "--bytes", "3"], "--bytes is of float32, expected 4 bytes to 1T, got 3"),
        (["--nodes", "2", "--bytes", "99999G"], "expected 4 bytes to 1T"),
        ([*CALL, "--op", "sum"], "argument --op: invalid choice: 'sum' (choose from "),
        ([*CALL, "--op", ""], "argument --op: invalid choice: ''"),
        ([*CALL, "--link", "fast"], "--link: expected a rate above 0 as 100Gbit/s or 8GB/s"),
        ([*CALL, "--link", "100"], "expected a rate above 0"),
        ([*CALL, "--link", "0Gbit/s"], "expected a rate above 0"),
        ([*CALL, "--latency", "0us"], "--latency: expected a time above 0"),
        ([*CALL, "--noise", "-1"], "noise: expected 0, or 1e-06 to 100, got -1"),
        ([*CALL, "--noise", "nan"], "noise: expected 0"),
        ([*CALL, "--noise", "1e300"], "noise: expected 0"),
        ([*CALL, "--seed", "-3"], "expected a seed of 0 or more, got -3"),
        ([*CALL, "--oversubscribed", "0"], "--oversubscribed: expected a number above 0"),
        ([*CALL, "--slow", "2:3"], "rank 2"),
        ([*CALL, "--slow", "1"], "--slow: expected a rank and how many times as long"),
        ([*CALL, "--slow", "1:1e9"], "--slow: expected a rank"),
        ([*CALL, "--dead", "1:x"], "--dead: expected a rank and when it dies, as 3:2ms"),
        ([*CALL, "--dead", "0:1us", "--dead", "1:1us"], "expected a surviving rank"),
        ([*CALL, "--within", "x"], "--within: expected a number above 0"),
        ([*CALL, "--compute", "1ms"], "expected --step with --compute"),
        ([*CALL, "--stragglers", "1%:3"], "expected --step with --stragglers"),
        ([*CALL, "--cluster", sys.executable], "expected lines below [cluster]"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message, capsys):
    assert message in refused(capsys, *options)


@pytest.mark.parametrize(
    ("file", "message"), [("/nowhere/x.png", "no folder '/nowhere'"), ("x.foo", "ends in one of")]
)
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_simulated(
    file, message, capsys, monkeypatch
):
    needs("matplotlib")
    monkeypatch.setattr(simulate, "rows", None)
    assert message in refused(capsys, *CALL, "--picture", file)


def test_a_barrier_has_no_bytes(capsys):
    assert __main__.main(["simulate", *LINK, "--nodes", "3", "--op", "barrier"]) == 0
    assert capsys.readouterr().out.startswith("barrier, 3 ranks on 3 nodes, simulated\n")


def test_without_greenlet_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "greenlet", None)
    assert __main__.main(["simulate", *LINK, "--nodes", "2", "--bytes", "8"]) == 2
    assert "pip install greenlet" in capsys.readouterr().err


def test_a_file_says_what_the_cluster_is_and_options_count_more(capsys, tmp_path):
    file = tmp_path / "cluster.ini"
    file.write_text("[cluster]\nnodes = 8\nranks = 2\nlink = 1Gbit/s\nslow = 3:10 5:2\n")
    question = ["simulate", "--tuned", "off", "--cluster", str(file), "--bytes", "64K"]
    assert __main__.main(question) == 0
    assert "16 ranks on 8 nodes" in capsys.readouterr().out
    assert __main__.main([*question, "--nodes", "4"]) == 0
    assert "8 ranks on 4 nodes" in capsys.readouterr().out
    for text, message in (
        ("nodes = 8", "expected lines below [cluster]"),
        ("[cluster]\nbytes = 8", "unknown setting"),
    ):
        file.write_text(text)
        assert __main__.main(question) == 2
        assert message in capsys.readouterr().err


def test_a_death_is_the_error_that_the_others_get(capsys):
    options = ["--nodes", "4", "--bytes", "16M", "--dead", "3:20us"]
    assert __main__.main(["simulate", *LINK, *options]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ring")]
    assert len(rows) == 1
    assert "PeerFailure: allreduce: rank 3 died (rank " in rows[0]


STEP = ["--step", "--nodes", "8", "--compute", "10ms", "--gradients", "1M,3M"]


def efficiencies(capsys, *options):
    assert __main__.main(["simulate", *LINK, *STEP, *options]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["1", "2", "4", "8"]
    return [float(line.split()[4]) for line in lines]


def test_a_step_loses_on_more_machines_and_wins_by_overlap_and_16_bits(capsys):
    plain = efficiencies(capsys)
    assert plain[0] == 100
    assert plain == sorted(plain, reverse=True)
    # 4 MiB over a line of 12.5 GB/s: 2 x 7/8 x 4 MiB x 0.08 ns, beside 10 ms of computing.
    line = 2 * 7 / 8 * (4 << 20) * 8e-11
    assert plain[-1] <= 100 / (1 + line / 10e-3)
    assert efficiencies(capsys, "--half")[-1] > plain[-1]
    assert efficiencies(capsys, "--overlap")[-1] > plain[-1]
    assert efficiencies(capsys, "--spread", "0.2")[-1] < plain[-1]


def test_a_step_waits_for_stragglers_and_for_times_that_were_measured(capsys, tmp_path):
    plain = efficiencies(capsys)
    slow = efficiencies(capsys, "--stragglers", "5%:4")
    # A rank alone waits for nobody; of 8 one is a straggler in a third of the steps.
    assert slow[0] == pytest.approx(100)
    assert slow[-1] < 0.7 * plain[-1]
    file = tmp_path / "times"
    file.write_text("1.0 1.0\n1.0 5.0\n")
    measured = efficiencies(capsys, "--times", str(file))
    assert measured[0] == pytest.approx(100)
    # Means are 2; of 8 ranks one takes 5 in nine steps out of ten.
    assert measured[-1] == pytest.approx(100 * 2 / (0.9 * 5 + 0.1 * 1), rel=0.1)


def test_the_picture_of_a_step_is_drawn(capsys, tmp_path):
    needs("matplotlib")
    file = tmp_path / "step.png"
    efficiencies(capsys, "--picture", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "2"], "--bytes is missing"),
        (["--bytes", "8"], "--nodes is missing"),
        (["--step", "--nodes", "2", "--compute", "1ms"], "--gradients is missing"),
        (["--nodes", "2", "--bytes", "8", "--cluster", "/nowhere"], "No such file"),
        ([*STEP, "--slow", "1:2"], "expected --stragglers in place of --slow"),
        ([*STEP, "--dead", "1:2ms"], "no --dead"),
        ([*STEP, "--times", "/nowhere"], "No such file"),
        ([*STEP, "--times", "/dev/null"], "expected times of steps above 0"),
        ([*STEP, "--times", "/dev/null", "--spread", "0.1"], "got both"),
        ([*STEP, "--times", sys.executable], "expected times of steps"),
        ([*STEP, "--spread", "-1"], "spread: expected 0, or 1e-06 to 100, got -1"),
        ([*STEP, "--spread", "nan"], "spread: expected 0"),
        ([*STEP, "--stragglers", "200%:3"], "--stragglers: expected a share and a factor as 1%:3"),
        ([*STEP, "--stragglers", "nan%:3"], "expected a share and a factor"),
        ([*STEP, "--gradients", "1"], "--gradients is of float32, expected 4 bytes"),
        ([*STEP, "--compute", "0ms"], "--compute: expected a time above 0"),
        ([*STEP, "--bytes", "8"], "expected no --bytes and no --op"),
    ],
)
def test_what_is_missing_is_said(options, message, capsys):
    assert message in refused(capsys, *options)
