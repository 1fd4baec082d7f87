"""Jobs in which ranks are killed, stop or leave: how they start, and what their programs share."""

import re

from launcher import mpirun, mpirun_path, run, written
from requirements import require

FAULT_TOLERANT = ("--with-ft", "ulfm")

HEAD = """
    import os, signal, sys, threading, time
    import numpy as np
    import collectives as cc
    import strategies
    from strategies.errors import *

    def say(*words):
        print(f"rank {comm.rank}:", *words, flush=True)

    def until(condition):
        give_up = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < give_up, "waited too long"
            time.sleep(0.01)

    def timed(function):
        # The result or the text of the error, and the seconds that it took.
        began = time.monotonic()
        try:
            result = function()
        except OpError as error:
            result = f"{type(error).__name__}: {error}"
        return result, time.monotonic() - began

    def die():
        time.sleep(0.5)  # others may still be in what went before, and would fail there
        os.kill(os.getpid(), signal.SIGKILL)

    def leave():
        # MPI_Finalize may wait for the dead.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    comm = cc.init()
"""


def needs_fault_tolerance():
    """Skip, or fail, where no MPI outlives its ranks."""
    version = run([mpirun_path(), "--version"], timeout=30).stdout
    if not re.search(r"Open MPI.* (?:[5-9]|\d\d)\.", version):
        require("ulfm", "fault tolerance needs Open MPI 5")


def start(tmp_path, size, *parts, options=FAULT_TOLERANT, timeout=60, **extra):
    """Run a program of `HEAD` and further parts, in which an error on one rank ends only it."""
    program = written(tmp_path, HEAD, *parts)
    extra = {"UNISONO_ABORT_ON_EXCEPTION": "0", **extra}
    return mpirun(size, program, options=options, timeout=timeout, **extra)
