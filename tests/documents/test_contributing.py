"""What CONTRIBUTING.md, the hosted CI and the commit hook run is there."""

import os
import re

from launcher import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))


def test_commands_are_there():
    named = set(re.findall(r"\bmake ([a-z0-9-]+)", " ".join(re.findall(r"`([^`]+)`", PAGE))))
    assert {"install", "check", "test", "docs"} <= named
    assert named <= TARGETS


def test_files_and_folders_are_there():
    code = "\n".join(re.findall(r"^```.*?^```|`[^`\n]+`", PAGE, re.MULTILINE | re.DOTALL))
    paths = re.findall(
        r"\b(?:tests|docs|benchmarks|collectives|strategies|examples)/[\w./-]+", code
    )
    paths = [path for path in paths if not re.search("[A-Z]{4}", path.removesuffix(".md"))]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_hosted_run_is_that_of_ci():
    assert "- run: .ci/run\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_hook_before_a_commit_is_make_check():
    assert "entry: make check\n" in (ROOT / ".pre-commit-config.yaml").read_text()
    assert "check" in TARGETS
