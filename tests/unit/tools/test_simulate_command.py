"""`python -m collectives simulate`: its table, its picture, and what it refuses."""

from __future__ import annotations

import sys

import pytest

from collectives import __main__
from collectives.algorithms import selection
from collectives.algorithms.layout import Layout
from collectives.links import DEFAULT
from collectives.simulation.cluster import Cluster
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
    layout = Layout(8, 4, DEFAULT)
    whole = (1 << 20) * DEFAULT.network.beta
    least = simulate.least_seconds(Question(operation, 1 << 20), layout)
    assert least == pytest.approx(seconds * whole)


def test_on_one_node_the_engine_stands_beside_the_messages():
    rows = simulate.rows(Question("allreduce", 1 << 16), Cluster(4, 1), 60.0)
    assert rows[0].algorithm == "node"
    assert {row.algorithm for row in rows} == {
        "node", "ring", "tree", "double_tree", "doubling", "halving",
    }  # fmt: skip


def test_a_picture_is_drawn(capsys, tmp_path):
    needs("matplotlib")
    file = tmp_path / "sizes.png"
    printed(capsys, "--nodes", "4", "--bytes", "1K:64K", "--picture", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0", "--bytes", "8"], "expected 1 <= nodes"),
        (["--nodes", "2", "--bytes", "x"], "not a number of bytes"),
        (["--nodes", "2", "--bytes", "8", "--op", "sum"], "no such operation"),
        (["--nodes", "2", "--bytes", "8", "--noise", "-1"], "noise"),
        (["--nodes", "2", "--bytes", "8", "--slow", "2:3"], "rank 2"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message, capsys):
    assert __main__.main(["simulate", *LINK, *options]) == 2
    assert message in capsys.readouterr().err


def test_without_greenlet_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "greenlet", None)
    assert __main__.main(["simulate", *LINK, "--nodes", "2", "--bytes", "8"]) == 2
    assert "pip install greenlet" in capsys.readouterr().err
