"""Benchmarks in C compile without a warning, and wait for nobody without a limit."""

import platform
import re
import shutil
from pathlib import Path

import pytest

from launcher import ROOT, run
from requirements import require

# One rank comes, the other does not.
ALONE = """
#define PATIENCE 0.2
#define main benchmark
#include "{source}"
#undef main
int main(void) {{
    {waits};
    return 0;
}}
"""

ROW = re.compile(
    r"(over |under) 25 GB/s  (allreduce|elsewhere|broadcast|gather|allgather) +\d+ KiB +\d+\.\d us"
    r"  chunk "
)

COMPILE = ["cc", "-std=gnu11", "-Wall", "-Werror", "-mavx512f", "-pthread"]


@pytest.fixture(autouse=True)
def _compiler():
    if shutil.which("cc") is None or platform.machine() != "x86_64":
        require("compiler", "no compiler of C for x86-64")


def compiled(source, *options):
    """Return the program; it needs AVX-512 only where its code says so, if it is not optimised."""
    program = source.parent / source.stem
    run([*COMPILE, *options, str(source), "-o", str(program)], timeout=100).checked()
    return str(program)


def copied(tmp_path, text):
    source = tmp_path / "program.c"
    source.write_text(text)
    return source


def test_a_wait_for_a_rank_that_does_not_come_ends(tmp_path):
    text = ALONE.format(source=ROOT / "benchmarks" / "exchange.c", waits="await(&turn, 1)")
    result = run([compiled(copied(tmp_path, text))], timeout=60)
    assert result.status == 1, result
    assert result.stderr == "exchange: the other rank has not come within 0.2 s\n"


def test_the_benchmark_compiles_and_measures(tmp_path):
    source = (ROOT / "benchmarks" / "exchange.c").read_text()
    program = compiled(copied(tmp_path, source), "-O3")
    if "avx512f" in Path("/proc/cpuinfo").read_text().split():
        result = run([program, "2"], timeout=100).checked()
        # A size is missing where all of its turns saw the machine change.
        rows = result.stdout.splitlines()
        assert rows
        assert [row for row in rows if not ROW.match(row)] == []
