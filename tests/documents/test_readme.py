"""What the README promises to a stranger: its program runs as pasted, and packages are found."""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile

import numpy as np

from launcher import ROOT, mpirun, run

README = (ROOT / "README.md").read_text()


def test_the_first_program_runs_as_pasted_and_prints_what_is_shown(tmp_path):
    begin = README.index("A whole program, `first.py`:")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README[begin:], re.MULTILINE | re.DOTALL)
    (_, program), (_, command), (_, output) = blocks[:3]
    (tmp_path / "first.py").write_text(program)
    assert command.strip() == "mpirun -np 2 python first.py"
    result = mpirun(2, "first.py", cwd=tmp_path, timeout=120, PYTHONPATH=str(ROOT))
    assert result.status == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == output.splitlines()
    # As the text after it says: what one process would find with the rows of both ranks.
    draws = [np.random.default_rng(rank) for rank in range(2)]
    x = np.concatenate([rng.normal(size=(1000, 3)) for rng in draws])
    noise = np.concatenate([rng.normal(size=1000) for rng in draws])
    weights = np.linalg.lstsq(x, x @ [1.0, -2.0, 0.5] + noise, rcond=None)[0]
    assert str(weights.round(4)) in output


def test_figures_are_those_of_the_files_of_measurements():
    files = ROOT / "docs" / "benchmarks"
    text = " ".join(README.split())
    rates = json.loads((files / "allreduce-2-ranks.json").read_text())["states"].values()
    table = README[README.index("| all-reduce | 8 B |") :].split("\n\n")[0]
    head, _, *lines = (
        [cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()
    )
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    sizes = [int(number) * units[unit] for number, unit in map(str.split, head)]
    for way, shown in zip(("call", "plan", "shared"), lines, strict=True):
        of_sizes = [
            {row["bytes"]: row["ratios"][way]["best"] for row in rate["rows"]} for rate in rates
        ]
        assert shown == [f"{min(ratios[n] for ratios in of_sizes):.2f}" for n in sizes]
    sentence = r"share none, .*?, a plan is (\S+) to (\S+) times .*? arrays (\S+) to (\S+) times"
    (shown,) = re.findall(sentence, text)
    apart = json.loads((files / "allreduce-far.json").read_text())["states"]["far"]["rows"]
    assert [float(x) for x in shown] == [
        round(edge(row["ratios"][way]["best"] for row in apart), 1)
        for way in ("plan", "shared")
        for edge in (min, max)
    ]
    lines = json.loads((files / "network.json").read_text())["cases"]
    alone = [c for c in lines if c["mbit"] == 1000 and "ring" in c["seconds"]]
    filled = max(case["line_seconds"] / case["seconds"]["ring"] for case in alone)
    assert f"a ring of 16 MiB fills {filled:.0%} of the line".replace("%", " %") in text
    ours, mpi = "auto", "MPI, our settings"
    small = [c["seconds"] for c in lines if c["machines"] == 2 and c["bytes"] <= 3000]
    times = [seconds[ours] / seconds[mpi] for seconds in small]
    assert f"small arrays take {min(times):.2f} to {max(times):.2f} times as long" in text
    large = [
        min(seconds for name, seconds in c["seconds"].items() if name.startswith("MPI"))
        / c["seconds"][ours]
        for c in lines
        if c["machines"] == 4 and c["bytes"] == 16 << 20
    ]
    assert f"`auto` is {min(large):.1f} times as fast" in text


def test_no_text_names_a_package_that_no_index_has():
    advice = "pip install " + "unisono"
    places = ["collectives", "strategies", "tests", "examples", "benchmarks", "docs", "slurm"]
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.py")]
    files += [file for place in places for file in (ROOT / place).rglob("*.[pm][yd]")]
    assert len(files) > 300
    assert [file for file in files if advice in file.read_text()] == []


def test_the_project_is_no_module_and_says_what_to_import():
    result = run([sys.executable, "-c", "import unisono"], timeout=60)
    assert "ImportError" in result.stderr
    assert "import collectives as cc" in result.stderr
    assert "import strategies" in result.stderr


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    modules = ("unisono.py", "unisono_torch.py")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", *modules):
        shutil.copy(ROOT / name, checkout)
    for name in ("collectives", "strategies"):
        shutil.copytree(ROOT / name, checkout / name)
    code = f"import setuptools.build_meta as b; b.build_editable({str(tmp_path)!r})"
    result = run([sys.executable, "-c", code], cwd=checkout, timeout=120)
    assert result.status == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as built:
        (path,) = (name for name in built.namelist() if ".dist-info/" not in name)
        assert path.endswith(".pth")
        assert built.read(path).decode().strip() == str(checkout)
