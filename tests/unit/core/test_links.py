"""What links cost: settings, the file of `tune`, defaults; one answer on all ranks."""

import json
import math
import os
import re

import pytest

import inprocess
from collectives.calls.shared_settings import negotiate
from collectives.communicator import group_of
from collectives.core import links, settings, tuning_file
from collectives.core.links import DEFAULT, LinkCost, Machine
from collectives.core.settings import Settings

NODE = LinkCost(alpha=1e-6, beta=2e-11, gamma=3e-11, eager=5e-7)
FACTS = {"ranks": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2us", 2e-6),
        ("2 us", 2e-6),
        ("2µs", 2e-6),
        ("0.5ms", 5e-4),
        ("1e-6", 1e-6),
        ("3s", 3.0),
        (" 250ns ", 2.5e-7),
        ("1E-6s", 1e-6),
    ],
)
def test_times_are_read(text, expected):
    assert links.seconds(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GB/s", 1 / 8e9),
        ("8 GB/s", 1 / 8e9),
        ("100Gbit/s", 8 / 100e9),
        ("1Mbit/s", 8e-6),
        ("2GiB/s", 1 / 2**31),
        ("500B/s", 1 / 500),
        ("0.1ns", 1e-10),
        ("0.1ns/B", 1e-10),
        ("8e-11", 8e-11),
        ("80ps", 8e-11),
    ],
)
def test_costs_of_a_byte_are_read(text, expected):
    assert links.seconds_per_byte(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "us", "-2us", "0", "0us", "2h", "nan", "inf", "1e999", "2us3", "1.2us.", "8B/s"]
)
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match=r"not a time, expected one above 0 as 2us.*got "):
        links.seconds(text)


@pytest.mark.parametrize(
    "text", ["", "GB/s", "-8GB/s", "0GB/s", "8GB", "8iB/s", "8Gb/s", "8GB/m", "8gigabit/s", "nan"]
)
def test_what_is_no_cost_of_a_byte_is_refused(text):
    with pytest.raises(ValueError, match=r"not a rate or a time of a byte.*got "):
        links.seconds_per_byte(text)


def test_settings_describe_links():
    read = settings.from_environment(
        {
            "UNISONO_TUNED": " off ",
            "UNISONO_NODE_LINK": "alpha=2us, beta=8GB/s,gamma=30GB/s,eager=500ns",
            "UNISONO_NETWORK_LINK": "beta=100Gbit/s",
        }
    )
    assert read.tuned == "off"
    assert read.node_link == {"alpha": 2e-6, "beta": 1 / 8e9, "gamma": 1 / 30e9, "eager": 5e-7}
    assert read.network_link == {"beta": 8e-11}
    assert read.links.machine == DEFAULT


@pytest.mark.parametrize("variable", ["UNISONO_NODE_LINK", "UNISONO_NETWORK_LINK"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("fast", "expected some of alpha, beta, gamma"),
        ("alpha", "expected some of alpha, beta, gamma"),
        ("delta=2us", "expected some of alpha, beta, gamma"),
        ("alpha=2us,alpha=3us", "each once"),
        ("alpha=2us,", "expected some of alpha, beta, gamma"),
        ("alpha=8GB/s", "alpha: not a time, expected"),
        ("beta=8GB", "beta: not a rate or a time of a byte, expected"),
        ("beta=0", "beta: not a rate"),
    ],
)
def test_a_link_that_cannot_be_understood_is_named(variable, value, expected):
    with pytest.raises(ValueError, match=rf"{variable} does not describe a link: .*{expected}"):
        settings.from_environment({variable: value})


def test_what_is_written_is_read_again(tmp_path):
    file = tmp_path / "deep" / "down" / "cluster.json"
    tuning_file.write(file, {"node": NODE, "network": DEFAULT.network}, FACTS)
    assert tuning_file.read(file) == {"node": NODE, "network": DEFAULT.network}
    tuning_file.write(file, {"node": NODE}, FACTS)
    assert tuning_file.read(file) == {"node": NODE}
    assert os.listdir(file.parent) == ["cluster.json"]  # nothing is left beside it


def test_a_file_of_a_version_without_letters_is_read(tmp_path):
    file = tmp_path / "cluster.json"
    tuning_file.write(file, {"node": NODE._replace(eager=math.inf)}, FACTS)
    assert "eager" not in file.read_text()
    assert (
        tuning_file.read(file)["node"].compiled().alpha == NODE.alpha
    )  # as dear as messages of Python
    assert tuning_file.metadata(file) == FACTS


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "cluster.json"
    tuning_file.write(file, {"node": NODE}, FACTS)
    with pytest.raises(TypeError):
        tuning_file.write(file, {"node": DEFAULT.node}, {"ranks": object()})
    assert tuning_file.read(file) == {"node": NODE}
    assert os.listdir(tmp_path) == ["cluster.json"]


def content(**changes):
    whole = {
        "format": "unisono links", "version": 1, "links": {"node": NODE._asdict()}, "measured": {}
    }  # fmt: skip
    return json.dumps({**whole, **changes})


DAMAGED = {
    "empty": "",
    "cut": content()[:-20],
    "no text": "\udcff",
    "no object": "[1, 2]",
    "another program's": '{"name": "x", "version": 1}',
    "a later version": content(version=2),
    "no links": json.dumps({"format": "unisono links", "version": 1}),
    "links of another kind": content(links=[1]),
    "an unknown link": content(links={"wire": NODE._asdict()}),
    "no beta": content(links={"node": {"alpha": 1e-6, "gamma": 1e-6}}),
    "a negative number": content(links={"node": {**NODE._asdict(), "beta": -1e-9}}),
    "no number": content(links={"node": {**NODE._asdict(), "beta": "8GB/s"}}),
    "a truth value": content(links={"node": {**NODE._asdict(), "beta": True}}),
    "NaN": content(links={"node": {**NODE._asdict(), "beta": float("nan")}}),
    "more than a float": content(links={"node": {**NODE._asdict(), "beta": 10**400}}),
    "infinity": content(links={"node": {**NODE._asdict(), "beta": float("inf")}}),
    "a deep nest": "[" * 60_000,
    "a long file": content() + " " * (1 << 16),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_foreign_file_is_named(tmp_path, text):
    file = tmp_path / "cluster.json"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=re.escape(f"tuned: {file} is not what")) as error:
        tuning_file.read(file)
    assert "UNISONO_TUNED=off" in str(error.value)


def test_every_cluster_has_a_file_of_its_own(tmp_path):
    home = {"HOME": "/home/me"}
    assert tuning_file.path(Settings(tuned="off"), home) is None
    assert str(tuning_file.path(Settings(tuned="/x/y.json"), home)) == "/x/y.json"
    slurm = tuning_file.path(Settings(), {**home, "SLURM_CLUSTER_NAME": "big one"})
    assert str(slurm) == "/home/me/.config/unisono/big_one.json"
    evil = tuning_file.path(Settings(), {**home, "SLURM_CLUSTER_NAME": "../../etc/x"})
    assert str(evil) == "/home/me/.config/unisono/.._.._etc_x.json"
    elsewhere = {**home, "XDG_CONFIG_HOME": "/configuration"}
    assert str(tuning_file.path(Settings(), elsewhere)).startswith("/configuration/unisono/")
    assert tuning_file.path(Settings(), home) == tuning_file.path(Settings(), home)


def test_without_a_home_there_is_no_file(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)  # which no password file knows
    assert tuning_file.path(Settings(), {}) is None
    assert tuning_file.load_links(Settings(), {}) == links.defaults()
    assert tuning_file.path(Settings(tuned="/x/y.json"), {}) is not None


def test_a_usual_place_out_of_reach_is_an_absent_one(monkeypatch, tmp_path):
    def stat(path, **options):
        raise PermissionError(13, "Permission denied", path)

    environ = {"XDG_CONFIG_HOME": str(tmp_path), "SLURM_CLUSTER_NAME": "here"}
    tuning_file.write(tuning_file.path(Settings(), environ), {"network": NODE}, FACTS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)  # root may look everywhere
        assert tuning_file.load_links(Settings(), environ) == links.defaults()
    assert tuning_file.load_links(Settings(), environ) != links.defaults()


def test_any_path_may_be_named(tmp_path):
    file = tmp_path / "{job}" / "{0}" / "x}{.json"
    tuning_file.write(file, {"node": NODE}, FACTS)
    assert tuning_file.load_links(Settings(tuned=str(file))).sources[1] == str(file)


def test_settings_go_before_the_file_and_the_file_before_the_defaults(tmp_path):
    file = tmp_path / "cluster.json"
    tuning_file.write(file, {"node": NODE}, FACTS)
    chosen = Settings(tuned=str(file), node_link={"beta": 7e-11}, network_link={})
    machine, sources = tuning_file.load_links(chosen)
    assert machine == Machine(DEFAULT.shared, NODE._replace(beta=7e-11), DEFAULT.network)
    assert sources == ("default", f"UNISONO_NODE_LINK (beta), else {file}", "default")
    whole = Settings(tuned="off", network_link=NODE._asdict())
    machine, sources = tuning_file.load_links(whole)
    assert machine == DEFAULT._replace(network=NODE)
    assert sources == ("default", "default", "UNISONO_NETWORK_LINK")


def test_the_usual_file_need_not_exist_but_one_that_is_named_must(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "SLURM_CLUSTER_NAME": "here"}
    assert tuning_file.load_links(Settings(), environ) == links.defaults()
    tuning_file.write(tmp_path / "unisono" / "here.json", {"network": NODE}, FACTS)
    assert tuning_file.load_links(Settings(), environ).machine == DEFAULT._replace(network=NODE)
    missing = tmp_path / "missing.json"
    with pytest.raises(ValueError, match=re.escape(f"tuned: cannot read {missing}: No such file")):
        tuning_file.load_links(Settings(tuned=str(missing)), environ)
    with pytest.raises(ValueError, match="tuned: cannot read .*: Is a directory"):
        tuning_file.load_links(Settings(tuned=str(tmp_path)), environ)


@pytest.mark.parametrize("mode", inprocess.MODES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_take_what_rank_0_finds(tmp_path, size, mode):
    file = tmp_path / "cluster.json"
    tuning_file.write(file, {"node": NODE}, FACTS)

    def check(comm):
        # Each rank has an environment of its own, as on machines that are not set up alike.
        own = Settings(
            tuned=str(file) if comm.rank == 0 else str(tmp_path / "missing"),
            network_link={"alpha": 1e-6 * (comm.rank + 1)},
            timeout=20,
        )
        return negotiate(own, group_of(comm).transport).links

    found = inprocess.run_ranks(size, check, mode)
    network = DEFAULT.network._replace(alpha=1e-6)
    assert found[0].machine == Machine(DEFAULT.shared, NODE, network)
    assert all(other == found[0] for other in found)


def test_a_damaged_file_is_the_same_error_on_every_rank(tmp_path):
    file = tmp_path / "cluster.json"
    file.write_text("{}")

    def check(comm):
        with pytest.raises(
            ValueError, match="is not what `python -m collectives tune` writes"
        ) as e:
            negotiate(Settings(tuned=str(file), timeout=20), group_of(comm).transport)
        comm.barrier()  # nothing is left under way
        return str(e.value)

    texts = set(inprocess.run_ranks(3, check))
    assert len(texts) == 1
    assert str(file) in texts.pop()


def test_whatever_rank_0_meets_is_an_error_on_every_rank(monkeypatch):
    def found(configuration, environ):
        raise MemoryError("no more")

    def check(comm):
        with pytest.raises(ValueError, match="^tuned: MemoryError: no more$"):
            negotiate(Settings(timeout=20), group_of(comm).transport)
        comm.barrier()  # nothing is left under way

    monkeypatch.setattr(tuning_file, "load_links", found)
    inprocess.run_ranks(3, check)


def test_a_table_of_links_says_where_they_come_from():
    known = links.with_overrides(links.defaults(), {"network": {"alpha": 5e-6}}, "UNISONO_{}_LINK")
    rows = links.table(known).splitlines()
    assert [row.split()[0] for row in rows] == ["link", *Machine._fields]
    assert re.fullmatch(r"network +5\.00 +5\.00 +8\.5000 +0\.0330  UNISONO_NETWORK_LINK \(alpha\), "
                        "else default", rows[3])  # fmt: skip
