"""Limits of waits, on which time for compiling does not count.

The first job on a machine compiles its kinds of calls: seconds each, and minutes for all of `python
-m collectives check` on busy cores. Each function ends up in a file, so a limit begins again with
every such file. Where nothing is compiled, a hang is found after the limit itself.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from collectives.kernels import code_cache

__all__ = ["ROOT", "Limit", "output_of"]

ROOT = Path(__file__).resolve().parent.parent

# The compiled code of JAX: the tests' own folder.
_OF_JAX = (ROOT / "out" / "jax", "*-cache")


class Limit:
    """Seconds to wait, begun again whenever code has been compiled.

    Args:
        seconds: to wait.
        cache: NUMBA_CACHE_DIR of the job that is waited for; None for the tests' own.
    """

    def __init__(self, seconds, cache=None):
        self._seconds = seconds
        self._folders = [Path(cache)] if cache else code_cache.folders()
        self._began = time.time()

    def left(self):
        """Return how many seconds are left; 0 from the end of the limit on."""
        now = time.time()
        if now >= self._began + self._seconds:
            self._began = max(self._began, self._last_compiled(now))
        return max(0.0, self._began + self._seconds - now)

    def _last_compiled(self, now):
        of_numba = [(folder, f"**/*.{kind}") for folder in self._folders for kind in ("o", "nbc")]
        times = [0.0]
        for folder, pattern in [_OF_JAX, *of_numba]:
            for file in folder.glob(pattern):
                try:
                    times.append(file.stat().st_mtime)
                except FileNotFoundError:  # replaced or removed meanwhile
                    continue
        return max(time for time in times if time <= now)


def output_of(process, seconds, cache=None):
    """Return the output and errors of a process once it has ended.

    Raises:
        subprocess.TimeoutExpired: it has not; it goes on.
    """
    limit = Limit(seconds, cache)
    while True:
        try:
            return process.communicate(timeout=limit.left())
        except subprocess.TimeoutExpired:
            if not limit.left():
                raise
