"""Machine code is kept on disk, stands alone, and no process runs what was made of another text."""

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import launcher
from collectives.arrays.host_arrays import address
from collectives.core import compile_time
from collectives.kernels import compile_lock, machine_code

ROOT = Path(__file__).parents[3]

# `times(x)` in C, and `later(milliseconds)` in Python.
MODULE = """
    import os
    import sys

    from numba import types
    from collectives.kernels import numba_compiler
    from numbers_of_made import FACTOR

    usleep = types.ExternalFunction("usleep", types.int32(types.uint32))

    def times(x):
        return FACTOR * x

    def sleeps(x):
        return usleep(x)

    def adds(x):
        return x + 1

    def allocates(x):
        return [x, x][x & 1]

    def make(symbol, name):
        print("compiled", name, flush=True)
        if os.environ.get("HELD"):
            sys.stdin.read()
        function = globals()[name]
        if name == "times":
            return numba_compiler.python_code(function, symbol)
        return numba_compiler.object_code(function, types.int64(types.int64), symbol)
"""
PROGRAM = """
    import sys
    from collectives.kernels import machine_code, compile_lock as turn

    made = machine_code.function("made", "times")
    print(made(7), made(-(2**50)), "numba" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path):
    """A program, and a module of functions that it loads."""
    (tmp_path / "made.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "numbers_of_made.py").write_text("FACTOR = 2")
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


def start(folder, program="program.py", stderr=None, **environment):
    command = [sys.executable, folder / program]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env={**surroundings(folder), **environment},
        stdin=pipe, stdout=pipe, stderr=stderr, text=True,
    )  # fmt: skip


def surroundings(folder):
    """The environment of a user whose home is in the folder."""
    others = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}
    return {**others, "PYTHONPATH": str(ROOT), "HOME": str(folder / "home")}


def run(folder, **environment):
    """Run the program: whether it has compiled, and what the function made of 7."""
    process = start(folder, **environment)
    output = process.communicate(timeout=100)[0].splitlines()
    assert process.returncode == 0
    result, large, numba = output[-1].split()
    compiled = output[:-1] == ["compiled times"]
    assert compiled or not output[:-1]
    assert numba == str(compiled)  # nothing but the compiler needs it
    assert int(large) == int(result) // 7 * -(2**50)
    return compiled, int(result)


def kept(folder):
    return sorted(folder.rglob("*.o"))


def test_a_function_is_compiled_once_and_loaded_without_numba(folder):
    assert run(folder) == (True, 14)
    assert [file.parent for file in kept(folder)] == [folder / "home/.cache/unisono"]
    assert run(folder) == (False, 14)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_made_anew(folder, damage):
    run(folder)
    (file,) = kept(folder)
    content = file.read_bytes()
    changed = content[:199] + bytes([content[199] ^ 1]) + content[200:]
    file.write_bytes({"cut": content[:-9], "changed": changed, "empty": b""}[damage])
    assert run(folder) == (True, 14)
    assert run(folder) == (False, 14)


def test_code_is_made_anew_when_a_file_of_the_folder_or_what_steers_the_compiler_has_changed(
    folder,
):
    run(folder)
    (folder / "numbers_of_made.py").write_text("FACTOR = 33")
    assert run(folder) == (True, 231)
    assert run(folder) == (False, 231)
    assert run(folder, NUMBA_OPT="1") == (True, 231)
    assert run(folder) == (False, 231)
    (folder / "numbers_of_made.py").write_text("FACTOR = 2")
    assert run(folder) == (False, 14)  # each text has a file of its own
    assert len(kept(folder)) == 3


def test_where_nothing_can_be_kept_functions_run_all_the_same(folder):
    for _ in range(2):
        assert run(folder, NUMBA_CACHE_DIR="/dev/null/nowhere") == (True, 14)
    assert kept(folder) == []


def test_a_file_is_whole_or_not_there(folder, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder / "kept"))
    monkeypatch.setattr(os, "replace", full)
    before = compile_time.total_seconds()
    assert machine_code.function("made", "times")(7) == 14
    assert compile_time.total_seconds() > before  # no limit of a wait counts it
    assert list((folder / "kept" / "unisono").iterdir()) == []
    del sys.modules["made"], sys.modules["numbers_of_made"]


# A network file system may report a file as stale that another machine has replaced.
STALE = """
    import errno, os

    opened = os.open

    def stale(path, flags, *rest, **options):
        if str(path).endswith(".o") and not flags & os.O_CREAT:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(path, flags, *rest, **options)

    os.open = stale
"""


def test_a_file_that_another_machine_replaces_meanwhile_is_made_anew(folder):
    assert run(folder) == (True, 14)
    started_with = folder / "started_with"
    started_with.mkdir()
    (started_with / "sitecustomize.py").write_text(textwrap.dedent(STALE))
    assert run(folder, PYTHONPATH=f"{started_with}:{ROOT}") == (True, 14)
    assert len(kept(folder)) == 1
    assert run(folder) == (False, 14)


def results(processes):
    """What the function made of 7 in each of them, and how many have compiled it."""
    outputs = [process.communicate(timeout=200)[0].splitlines() for process in processes]
    made = [int(output[-1].split()[0]) for output in outputs]
    return made, sum("compiled times" in output for output in outputs)


def test_of_many_processes_one_compiles(folder):
    assert results([start(folder) for _ in range(4)]) == ([14] * 4, 1)
    assert len(kept(folder)) == 1
    assert run(folder) == (False, 14)


def test_many_processes_each_compile_where_nothing_can_be_kept(folder):
    nowhere = {"NUMBA_CACHE_DIR": "/dev/null/nowhere"}
    assert results([start(folder, **nowhere) for _ in range(3)]) == ([14] * 3, 3)


def test_where_the_one_that_compiles_is_killed_another_does(folder):
    held = start(folder, HELD="1")
    try:
        assert held.stdout.readline() == "compiled times\n"
        others = [start(folder) for _ in range(2)]
    finally:
        held.kill()
        held.communicate()
    made, compiled = results(others)
    assert made == [14, 14]
    assert compiled >= 1
    assert run(folder) == (False, 14)


# Announces compilation at once.
IMPATIENT = """
    from collectives.kernels import code_cache, machine_code

    code_cache._SILENT_SECONDS = 0
    machine_code.load("made", "adds")
"""


@pytest.mark.parametrize(
    ("chosen", "place"),
    [(None, "kept in {}/home/.cache/unisono"), ("/dev/null/nowhere", "not kept on disk")],
)
def test_one_process_of_a_job_announces_that_it_compiles(folder, chosen, place):
    (folder / "impatient.py").write_text(textwrap.dedent(IMPATIENT))
    where = {} if chosen is None else {"NUMBA_CACHE_DIR": chosen}
    held = start(folder, HELD="1", stderr=subprocess.PIPE, **where)
    said = held.stderr.readline()
    other = start(folder, program="impatient.py", stderr=subprocess.PIPE, **where)
    assert other.communicate(timeout=100) == ("compiled adds\n", "")
    assert held.communicate(timeout=100)[1] == ""
    assert said == f"compiling 1 loop, once; {place.format(folder)}\n"
    if chosen is None:
        again = start(folder, program="impatient.py", stderr=subprocess.PIPE)
        assert again.communicate(timeout=100) == ("", "")


PREPARES = """
    from collectives.kernels import machine_code

    machine_code.ensure([("made", "times"), ("made", "adds")])
    print([machine_code.is_kept("made", name) for name in ("times", "adds")], flush=True)
    machine_code.load("made", "adds")
    print(machine_code.function("made", "times")(7))
"""


def test_who_would_wait_makes_another_function_that_it_needs(folder):
    (folder / "prepares.py").write_text(textwrap.dedent(PREPARES))
    held = start(folder, HELD="1")
    try:
        assert held.stdout.readline() == "compiled times\n"
        other = start(folder, program="prepares.py")
        assert other.stdout.readline() == "compiled adds\n"
        assert other.stdout.readline() == "[False, True]\n"  # nobody has waited so far
    finally:
        held.communicate(timeout=100)
    assert other.communicate(timeout=100)[0] == "14\n"
    assert len(kept(folder)) == 2
    # Where all is there, nothing is made.
    again = start(folder, program="prepares.py").communicate(timeout=100)[0]
    assert again == "[True, True]\n14\n"


def test_what_is_prepared_is_made_once_where_nothing_can_be_kept(folder):
    (folder / "prepares.py").write_text(textwrap.dedent(PREPARES))
    done = start(folder, program="prepares.py", NUMBA_CACHE_DIR="/dev/null/nowhere")
    lines = done.communicate(timeout=100)[0].splitlines()
    assert lines == ["compiled times", "compiled adds", "[False, False]", "14"]


# Names are of the machine: other tests of this file may run in another process meanwhile.
OWN = f"work of process {os.getpid()}"


def test_there_are_so_many_places_and_no_more():
    first, second = (compile_lock.claim_slot(OWN, 2) for _ in range(2))
    assert first is not None
    assert second is not None
    with second:
        assert compile_lock.claim_slot(OWN, 2) is None
        first.close()
        again = compile_lock.claim_slot(OWN, 2)
        assert again is not None
        again.close()


def test_nobody_waits_for_longer_than_the_limit():
    with compile_lock.wait_or_lead(OWN) as mine:
        with compile_lock.wait_or_lead(f"{OWN} else") as another:
            assert another
        with compile_lock.wait_or_lead(OWN, most_seconds=0) as too_slow:
            assert not too_slow
        assert mine
    with compile_lock.wait_or_lead(OWN) as mine:
        assert mine


def test_a_forked_child_that_lives_on_keeps_no_turn_and_no_place():
    here, there = os.pipe()
    is_up, says_so = os.pipe()
    kept = compile_lock.claim_slot(f"{OWN}, a place for one", 1)
    with compile_lock.wait_or_lead(OWN) as mine:
        child = os.fork()
        if child == 0:
            os.write(says_so, b"!")
            os.close(there)
            os.read(here, 1)  # until the parent is through
            os._exit(0)
    assert os.read(is_up, 1) == b"!"
    kept.close()
    with compile_lock.wait_or_lead(OWN, most_seconds=0) as again:
        pass
    another = compile_lock.claim_slot(f"{OWN}, a place for one", 1)
    for end in (there, here, is_up, says_so):
        os.close(end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (mine, again) == (True, True)
    assert another is not None
    another.close()


@pytest.mark.parametrize("name", ["sleeps", "allocates"])
def test_code_that_does_not_stand_alone_is_refused(folder, monkeypatch, name):
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(RuntimeError, match=f"{name}: compiled code has unresolved symbols"):
        machine_code.load("made", name)
    del sys.modules["made"], sys.modules["numbers_of_made"]
    assert kept(folder) == []


def test_other_threads_run_meanwhile():
    # A kind of call that waits for a second rank which does not come.
    from collectives.node import control_block

    headers = np.zeros(2, control_block.HEADER)
    slots = np.zeros(4 * 64, np.uint8)
    state = control_block.State()
    block = control_block.Block(
        size=2, spins=2**62, headers=address(headers), slots=address(slots),
        state=ctypes.addressof(state), rounds=1,
    )  # fmt: skip
    shared = machine_code.function("collectives.node.reduce_kernels", "one_shot_copy", arguments=3)
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(shared(ctypes.addressof(block))))
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    headers["filled"][1] = 1  # here it is
    thread.join(20)
    assert statuses == [control_block.DONE]


JOB = """
import sys
import numpy as np
import collectives as cc

comm = cc.init()
for dtype in (np.float32, np.float64, np.int32, np.float16):
    for count in (3, 300_000):
        assert (comm.allreduce(np.full(count, 2, dtype), op=cc.SUM) == 2 * comm.size).all()
comm.broadcast(np.ones(3), root=0)
print("numba" in sys.modules)
"""


def test_ranks_do_without_numba_where_all_is_compiled(tmp_path):
    program = tmp_path / "job.py"
    program.write_text(JOB)
    for _ in range(2):  # the first may compile what no other test has
        result = launcher.mpirun(2, program, timeout=100).checked()
    assert result.stdout.split() == ["False"] * 2


def test_a_rank_alone_compiles_nothing(tmp_path):
    program = tmp_path / "alone.py"
    program.write_text(
        "import sys, numpy as np, collectives as cc\n"
        "comm = cc.init()\n"
        "x = np.ones(3)\n"
        "for _ in range(3):\n"
        "    comm.allreduce(x, op=cc.SUM, out=x)\n"
        "    comm.barrier()\n"
        "print(x.sum(), 'llvmlite' in sys.modules)\n"
    )
    result = launcher.run([sys.executable, str(program)], timeout=60)
    assert result.stdout.split() == ["3.0", "False"], result


AHEAD = """
    from collectives.kernels import machine_code

    process = machine_code.compile_ahead("made", "times")
    print(None if process is None else process.wait(90))
"""


def test_another_process_compiles_what_is_needed_later(folder):
    (folder / "starts.py").write_text(textwrap.dedent(AHEAD))

    def say():
        return subprocess.run(
            [sys.executable, folder / "starts.py"],
            env=surroundings(folder), capture_output=True, text=True, timeout=100,
        )  # fmt: skip

    assert say().stdout == "0\n"
    assert run(folder) == (False, 14)
    assert say().stdout == "None\n"
