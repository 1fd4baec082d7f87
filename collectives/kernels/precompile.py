"""Compiles in a separate process what the program may need on short notice.

Ranks that go on when others have died may need a kind of call that they have not made yet: arrays
that four ranks reduce in one round are reduced piece by piece by two. On an empty cache that kind
is compiled first, 2 s of a core (10 s where four ranks shared two cores with other programs), and
nobody trains meanwhile. Machine code lies in files, so that any process can make it before.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from collectives.kernels import machine_code

__all__ = ["compile_ahead"]

# The ranks go first; but one that needs the code now waits for it, so it has to come.
_NICE = 5

_PROGRAM = """
import os, sys
os.nice({nice})
from collectives.kernels import machine_code
for name in {names}:
    machine_code.load(*name)
"""


@functools.cache
def compile_ahead(module: str, *kinds: str) -> subprocess.Popen[bytes] | None:
    """Start a process that compiles what no file has, one after the other; once in a process.

    Nobody waits for it. If it fails, the code is compiled where it is needed.

    Args:
        module: as `machine_code.load`.
        kinds: the only word of each function.

    Returns:
        The process; None if all is there, or none can be started.
    """
    names = [(module, kind) for kind in kinds if not machine_code.is_kept(module, kind)]
    if not names:
        return None
    # The package is found as this process has found it.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(nice=_NICE, names=names)],
            env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return None
