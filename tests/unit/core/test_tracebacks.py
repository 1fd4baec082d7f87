"""Uncaught errors of ours are shown without frames of libraries; other errors keep all frames."""

import sys
import traceback
from types import SimpleNamespace

import pytest

import collectives as cc
from collectives.core.tracebacks import shortened
from launcher import ROOT, run
from strategies import errors

# Modules of the frames below a function of the program.
OURS = ("strategies.torch", "collectives.node")


def raised(error, *modules, spec=None):
    """The error after a function of each module has called the next one; the last one raises it."""
    inner, text = error, "raise inner"
    for name in reversed(modules):
        module = {"__name__": name, "inner": inner}
        if name == "__main__":
            module["__spec__"] = SimpleNamespace(name=spec)
        exec(f"def {name.replace('.', '_')}():\n {text}\n", module)
        inner, text = module[name.replace(".", "_")], "inner()"
    try:
        inner()
    except type(error) as caught:
        return caught.with_traceback(caught.__traceback__.tb_next)
    raise AssertionError


def frames(error):
    return [entry.name for entry in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize(
    ("error", "modules", "shown"),
    [
        (cc.PeerFailure("died"), ("train", *OURS), ["train"]),
        (errors.AbortedError("stopped"), ("train", "step", "torch.autograd", *OURS),
         ["train", "step"]),
        (cc.PeerFailure("died"), ("runpy", "train", "optax", "model", *OURS), ["train", "model"]),
        (cc.PeerFailure("died"), ("collectives_of_mine", *OURS), ["collectives_of_mine"]),
        (cc.PeerFailure("died"), ("threading", *OURS), None),
        (errors.InternalError("a bug"), ("train", *OURS), None),
        (ValueError("wrong use, or a bug"), ("train", *OURS), None),
        (KeyError("a bug"), ("train", *OURS), None),
    ],
    ids=[
        "plain", "torch", "between", "a similar name", "no frame of the program", "InternalError",
        "ValueError", "KeyError",
    ],
)  # fmt: skip
def test_frames_of_libraries_are_hidden_in_errors_of_ours(error, modules, shown):
    caught = raised(error, *modules)
    whole = frames(caught)
    assert len(whole) == len(modules)
    shown = shown or whole
    with shortened(caught) as note:
        assert frames(caught) == shown
        hidden = f"{len(whole) - len(shown)} frames of libraries hidden; UNISONO_TRACEBACK=full"
        assert note.startswith(hidden) if shown != whole else note == ""
    assert frames(caught) == whole
    with shortened(caught, "full") as note:
        assert (frames(caught), note) == (whole, "")


@pytest.mark.parametrize(
    ("spec", "shown"), [("strategies.torch.__main__", ["train"]), ("mine", ["__main__", "train"])]
)
def test_a_module_that_python_m_runs_has_the_name_of_its_spec(spec, shown):
    caught = raised(cc.PeerFailure("died"), "__main__", "train", *OURS, spec=spec)
    with shortened(caught):
        assert frames(caught) == shown


def test_each_error_of_a_chain_is_shortened_by_its_own_class():
    cause = raised(OSError("a full disk"), "writer", *OURS)
    middle = raised(errors.DataLossError("not written"), "saver", *OURS)
    error = raised(cc.PeerFailure("died"), "train", *OURS)
    middle.__cause__, error.__context__ = cause, middle
    cause.__context__ = error  # a cycle, which Python permits
    with shortened(error) as note:
        assert note.startswith("4 frames")
        assert [len(frames(one)) for one in (error, middle, cause)] == [1, 1, 3]
    error.__suppress_context__ = True  # `raise error from None`
    with shortened(error) as note:
        assert note.startswith("2 frames")
        assert len(frames(middle)) == 3


ONE_RANK = """
import sys, threading
import collectives as cc
hook = sys.excepthook
if sys.argv[1] == "hook":
    sys.excepthook = lambda *raised: hook(*raised)
comm = cc.init().split(0)
comm.close()
def call():
    comm.barrier()
threading.Thread(target=call).start() if sys.argv[1] == "thread" else call()
"""


@pytest.mark.parametrize(
    ("way", "setting", "is_short"),
    [("main", "", True), ("main", "full", False), ("hook", "short", False), ("thread", "", True)],
)
def test_one_rank_shows_its_own_lines(tmp_path, way, setting, is_short):
    program = tmp_path / "train.py"
    program.write_text(ONE_RANK)
    command = [sys.executable, str(program), way]
    result = run(command, timeout=60, PYTHONPATH=str(ROOT), UNISONO_TRACEBACK=setting)
    *before, line, error, command = result.stderr.splitlines()
    assert error.startswith("collectives.core.errors.CollectiveError: barrier: ")
    assert command == "what to do: python -m collectives errors CollectiveError"
    assert (line == "    comm.barrier()") == is_short, result.stderr
    assert before[0].endswith("UNISONO_TRACEBACK=full shows all") == is_short
