"""Programs of the first page, of the tutorials and of short answers print what is shown there."""

import re

import pytest

import programs
from launcher import ROOT, mpirun_path, run
from requirements import installed, require

DOCS = ROOT / "docs"
# What is not run here: installing (tests/package), two machines (tests/netns/test_first_page.py),
# Slurm (tests/slurm/test_tutorial_job.py).
# A terminal: test_faq.py. Cells of a notebook: test_notebooks.py.
ELSEWHERE = (
    "git clone", "pip install", "export ", "venv", "--host", "strategies submit", "tail ",
    "debug.py",
)  # fmt: skip
PAGES = {
    "faq.md": 6,
    "index.md": 1,
    "start.md": 4,
    "how-to/checkpoints.md": 1,
    "how-to/hangs.md": 1,
    "how-to/my-launcher.md": 1,
    "how-to/simulations.md": 2,
    "how-to/sixteen-bits.md": 1,
    "how-to/slow-networks.md": 1,
    "how-to/tests.md": 0,
    "tutorials/a-parameter-server.md": 1,
    "tutorials/files-and-queues.md": 2,
    "tutorials/from-one-machine-to-slurm.md": 1,
    "tutorials/spare-replicas.md": 1,
    "tutorials/the-slow-rank.md": 1,
}
ULFM_PAGES = {"tutorials/survive.md": 3}
TORCH_PAGES = {
    "how-to/gpus.md": 1,
    "how-to/uneven-data.md": 2,
    "tutorials/a-horovod-script.md": 1,
    "tutorials/a-torch-script.md": 2,
}


@pytest.mark.parametrize("page", PAGES)
def test_programs_print_what_the_page_shows(page, tmp_path):
    # As the installed package's entry point does.
    plugins = {"PYTEST_PLUGINS": "unisono_pytest"}
    page_read = programs.read(DOCS / page)
    assert programs.try_out(page_read, tmp_path, 90, ELSEWHERE, **plugins) == PAGES[page]


@pytest.mark.parametrize("page", ULFM_PAGES)
def test_programs_that_outlive_ranks_print_what_the_page_shows(page, tmp_path):
    version = run([mpirun_path(), "--version"], timeout=30).stdout
    if not re.search(r"Open MPI.* (?:[5-9]|\d\d)\.", version):
        require("ulfm", "fault tolerance needs Open MPI 5")
    assert programs.try_out(programs.read(DOCS / page), tmp_path, 90) == ULFM_PAGES[page]


@pytest.mark.parametrize("page", TORCH_PAGES)
def test_programs_of_torch_print_what_the_page_shows(page, tmp_path):
    installed("torch")
    assert (
        programs.try_out(programs.read(DOCS / page), tmp_path, 90, ELSEWHERE) == TORCH_PAGES[page]
    )


def test_every_tutorial_and_short_answer_is_tried():
    folders = ("tutorials", "how-to")
    found = {f"{name}/{path.name}" for name in folders for path in (DOCS / name).glob("*.md")}
    pages = {*PAGES, *ULFM_PAGES, *TORCH_PAGES}
    assert found - {"how-to/notebooks.md"} == pages - {"faq.md", "index.md", "start.md"}


def test_an_output_that_differs_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`a.py`:\n\n```python\nprint(1)\n```\n\n```sh\npython a.py\n```\n\n```\n2\n```\n"
    )
    with pytest.raises(AssertionError, match=r"python a.py.* print\n1"):
        programs.try_out(programs.read(page), tmp_path, 30)
