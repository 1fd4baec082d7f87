"""Other projects called `collectives` or `strategies` are named, with the remedy."""

import shutil
import sys

import pytest

from launcher import ROOT, run

INIT = ["-c", "import collectives as cc; cc.init()"]
INFO = ["-m", "collectives", "info"]
REMEDY = "Run `pip uninstall collectives strategies`, then install unisono again (docs/faq.md)"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with both packages, as after an installation."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("collectives", "strategies"):
        shutil.copytree(ROOT / name, folder / name)
    for file in ROOT.glob("unisono*.py"):
        shutil.copy(file, folder)
    return folder


def distribution(folder, name, *files):
    """Write the metadata of an installed distribution."""
    metadata = folder / f"{name}-2.3.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.3\n"
    (metadata / "METADATA").write_text(text)
    (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return metadata


@pytest.mark.parametrize("command", [INIT, INFO], ids=["init", "info"])
@pytest.mark.parametrize(
    ("name", "file", "is_named"),
    [
        ("collectives", "collectives/ring.py", True),
        ("strategies", "strategies/__init__.py", True),
        ("strategies", "trading/strategies.py", False),
        ("unisono", "collectives/__init__.py", False),
    ],
)
def test_an_installed_distribution_with_files_of_ours(
    site, tmp_path, command, name, file, is_named
):
    metadata = distribution(site, name, file)
    try:
        result = run([sys.executable, *command], timeout=60, cwd=tmp_path, PYTHONPATH=str(site))
    finally:
        shutil.rmtree(metadata)
    assert result.status == 0, result.stderr
    text = f"{name} 2.3 of another project overwrites files in {site}. {REMEDY}\n"
    assert (text in result.stdout + result.stderr) == is_named
    assert ("another project" in result.stdout + result.stderr) == is_named


def test_info_names_a_distribution_that_has_replaced_the_package_itself(site, tmp_path):
    metadata = distribution(site, "collectives", "collectives/__init__.py")
    ours = (site / "collectives" / "__init__.py").read_text()
    (site / "collectives" / "__init__.py").write_text("version = 2.3\n")
    try:
        result = run([sys.executable, *INFO], timeout=60, cwd=tmp_path, PYTHONPATH=str(site))
    finally:
        shutil.rmtree(metadata)
        (site / "collectives" / "__init__.py").write_text(ours)
    assert result.status == 0, result.stderr
    assert "other projects   collectives 2.3 of another project overwrites" in result.stdout


@pytest.mark.parametrize("file", ["strategies.py", "strategies/__init__.py"])
def test_files_of_the_program_that_hide_strategies(tmp_path, file):
    program = tmp_path / "train.py"
    program.write_text("import collectives as cc\ncc.init()\n")
    hiding = tmp_path / file
    hiding.parent.mkdir(exist_ok=True)
    hiding.touch()
    result = run([sys.executable, str(program)], timeout=60, PYTHONPATH=str(ROOT))
    place = hiding if file == "strategies.py" else hiding.parent
    expected = f"expected {ROOT / 'strategies'}, got {place}. Rename it, or remove"
    assert result.stderr.count(expected) == 1, result.stderr


def test_nothing_is_said_of_this_environment():
    result = run([sys.executable, *INFO], timeout=60)
    assert "other projects   none" in result.stdout
    assert "another project" not in result.stderr
