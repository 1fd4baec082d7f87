"""The page of errors has every kind, cites what the sources say, and a traceback leads there."""

import inspect
import re
import sys

import pytest

import collectives as cc
import collectives.core.errors
import strategies
from collectives.tools import explain_error as remedies
from launcher import ROOT, mpirun, run
from strategies import errors

PAGE = (ROOT / "docs" / "errors.md").read_text()
KINDS = [
    kind
    for module in (collectives.core.errors, errors)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, (cc.CollectiveError, errors.OpError)) and kind is not errors.OpError
]
MESSAGES = [entry.title for entry in remedies.entries() if entry.is_message]


@pytest.fixture(scope="module")
def messages():
    """The module that finds the texts of the sources."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import messages
    finally:
        sys.path.pop(0)
    return messages


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_error_has_its_place(kind):
    assert f"\n### {kind.__name__}\n" in PAGE
    assert (
        collectives.core.errors.page(kind("x")) == f"python -m collectives errors {kind.__name__}"
    )
    (entry,) = remedies.found(kind.__name__)
    assert len(entry.text) > 40


def test_what_is_derived_from_ours_leads_to_ours_and_others_nowhere():
    class Special(cc.PeerFailure):
        pass

    assert collectives.core.errors.page(Special("x")) == "python -m collectives errors PeerFailure"
    assert collectives.core.errors.page(ValueError("x")) is None
    with pytest.raises(ValueError, match="num_epochs") as ours:
        strategies.input.FileBatches(["a.csv"], lambda path: [], 1, num_epochs=0)
    assert collectives.core.errors.page(ours.value) == "python -m collectives errors ValueError"


def test_the_page_has_cause_and_remedy_for_what_people_meet():
    assert len(MESSAGES) >= 50
    for entry in remedies.entries():
        if entry.is_message:
            assert re.search(r"^\*\*Why:\*\* \S", entry.text), entry.title
            assert re.search(r"^\*\*What to do:\*\* \S", entry.text, re.MULTILINE), entry.title


@pytest.mark.parametrize("title", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_sources(messages, title):
    (entry,) = [entry for entry in remedies.entries() if entry.title == title]
    # Why an operation is not defined for a dtype stands in a table.
    assert any(entry.fits(one.text) for one in messages.raised(ROOT)) or title in sources()


def sources():
    """The text of the packages, with each literal in one piece, whatever lines it is written in."""
    files = [p for name in ("collectives", "strategies") for p in (ROOT / name).rglob("*.py")]
    return re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in files))


def test_a_warning_of_the_page_is_one_of_the_sources():
    flat = sources()
    rows = re.findall(r"^\| `(.+?)` \|", PAGE.partition("## Warnings")[2], re.MULTILINE)
    assert len(rows) > 5
    for row in rows:
        parts = [re.escape(part) for part in row.split("...")]
        filled_in = r"(?:\{[^}\n]*\}|%[.\d]*[a-z])"
        assert re.search(filled_in.join(parts), flat), row


def test_a_traceback_of_several_ranks_ends_with_the_command(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "import numpy as np, collectives as cc\n"
        "comm = cc.init()\n"
        "comm.allreduce(np.zeros(3 + comm.rank))\n"
    )
    result = mpirun(2, "wrong.py", cwd=tmp_path, timeout=60, PYTHONPATH=str(ROOT))
    assert result.status != 0
    assert "[0/2] what to do: python -m collectives errors MismatchError\n" in result.stderr


WRONG_ALONE = [
    ("comm.allreduce(['text'])", "TypeError"),
    ("comm.allreduce([1.0], algorithm='best')", "ValueError"),
]


@pytest.mark.parametrize(("call", "kind"), WRONG_ALONE)
def test_so_does_one_of_a_rank_alone(tmp_path, call, kind):
    text = f"import collectives as cc\ncomm = cc.init()\n{call}\n"
    result = run([sys.executable, "-c", text], cwd=tmp_path, timeout=60, PYTHONPATH=str(ROOT))
    assert result.status == 1
    assert result.stderr.endswith(f"what to do: python -m collectives errors {kind}\n")


def test_an_error_of_the_program_s_own_ends_as_python_s(tmp_path):
    text = "import collectives as cc\ncc.init()\nraise ValueError('mine')\n"
    result = run([sys.executable, "-c", text], cwd=tmp_path, timeout=60, PYTHONPATH=str(ROOT))
    assert result.status == 1
    assert result.stderr.endswith("ValueError: mine\n")


def test_the_command_prints_cause_and_remedy(capsys):
    assert remedies.run(["collectives.core.errors.PeerFailure:", "allreduce: rank 1 died"]) == 0
    said = capsys.readouterr().out
    assert "Why: the process of that rank is gone" in said
    assert said.strip().endswith("errors.md#died")
    assert remedies.run(["TypeError"]) == 0
    assert "mean of integers" in capsys.readouterr().out
    assert remedies.run(["no", "such", "thing"]) == 1
    assert remedies.run([]) == 0
    assert set(MESSAGES) <= {line.strip() for line in capsys.readouterr().out.splitlines()}
