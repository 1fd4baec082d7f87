"""The examples of pages are true: statements print what the page shows."""

import doctest

import pytest

from launcher import ROOT
from requirements import needs

DOCS = ROOT / "docs"

# Page -> examples that it has at least.
EXAMPLES = {
    "between-nodes.md": 7,
    "checkpoints.md": 11,
    "cluster.md": 11,
    "distributed-optimizer.md": 24,
    "gradients.md": 11,
    "jax.md": 19,
    "migrate-from-horovod.md": 4,
    "model-parallel.md": 7,
    "operations.md": 5,
    "operations/asynchronous.md": 5,
    "operations/gathers.md": 10,
    "operations/groups.md": 5,
    "operations/horovod.md": 4,
    "operations/objects.md": 3,
    "operations/plans.md": 10,
    "operations/point-to-point.md": 8,
    "operations/reductions.md": 10,
    "optimizers.md": 21,
    "reliability.md": 9,
    "same-bits.md": 6,
    "sessions.md": 11,
    "shared-state.md": 11,
    "spare-replicas.md": 11,
    "strategies.md": 11,
}

# Pages whose examples leave out what differs between runs, by "..." or white space.
LOOSE = {
    "cluster.md", "distributed-optimizer.md", "gradients.md", "model-parallel.md",
    "shared-state.md", "spare-replicas.md", "strategies.md",
}  # fmt: skip

# Packages that the examples of a page import.
NEEDED = {"checkpoints.md": ["matplotlib"], "jax.md": ["jax"], "strategies.md": ["torch"]}


@pytest.mark.parametrize("page", EXAMPLES)
def test_examples(page, tmp_path, monkeypatch):
    needs(*NEEDED.get(page, ()))
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE if page in LOOSE else 0
    result = doctest.testfile(str(DOCS / page), module_relative=False, optionflags=flags)
    assert result.attempted >= EXAMPLES[page]
    assert result.failed == 0


def test_every_page_with_examples_is_run():
    with_examples = {path for path in DOCS.rglob("*.md") if ">>> " in path.read_text()}
    # Both ranks run those of input.md: `test_input_docs.py`.
    assert with_examples == {DOCS / page for page in [*EXAMPLES, "input.md"]}
