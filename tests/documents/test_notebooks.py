"""docs/how-to/notebooks.md runs as a notebook, and a kernel can be interrupted."""

import re
import time
from pathlib import Path

import pytest

import programs
from launcher import ROOT, environment
from limits import Limit
from requirements import needs

PAGE = (ROOT / "docs" / "how-to" / "notebooks.md").read_text()


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels inherit the environment of a world of its own."""
    needs("nbclient", "ipykernel")
    for name, text in environment(PYTHONPATH=str(ROOT)).items():
        monkeypatch.setenv(name, text)


def test_cells_print_what_the_page_shows(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    notebook = nbformat.v4.new_notebook()
    expected = []
    for language, text in blocks:
        if language == "python":
            notebook.cells.append(nbformat.v4.new_code_cell(text))
            expected.append("")
        else:
            expected[-1] = text
    NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(notebook.cells) == 3
    for cell, text in zip(notebook.cells, expected, strict=True):
        printed = "".join(o.text for o in cell.outputs if o.name == "stdout")
        # The name of a cell's file is that of one kernel.
        printed = re.sub(r'File "[^"]*"', 'File "..."', printed)
        programs.compare([cell.source], text.splitlines(), printed.splitlines())


def test_the_interrupt_button_ends_the_ranks_and_the_kernel_goes_on():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel()
    try:
        number = client.execute(
            "import os, time, strategies\n"
            "def hang():\n"
            "    print('pid', os.getpid())\n"
            "    time.sleep(600)\n"
            "strategies.launch(hang, 2)"
        )
        printed = ""
        while len(pids := re.findall(r"pid (\d+)\n", printed)) < 2:
            message = client.get_iopub_msg(timeout=60)
            assert message["msg_type"] != "error", message
            printed += message["content"].get("text", "")
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=60)
        while reply["parent_header"]["msg_id"] != number:  # of the start
            reply = client.get_shell_msg(timeout=60)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        limit = Limit(20)
        while any(Path("/proc", pid).exists() for pid in pids):
            assert limit.left(), "ranks are left"
            time.sleep(0.05)
        assert client.execute_interactive("1 + 1", timeout=60)["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
