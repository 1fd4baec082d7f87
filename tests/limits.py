"""Limits of waits that do not count the time for compiling.

The first job on a machine compiles its kinds of calls: seconds each, and minutes for all of `python
-m collectives check` on busy cores. Each compiled function is written to a file, so a limit starts
again with every new file. If nothing is compiled, a hang is found after the limit itself.
"""

import subprocess
import time
from pathlib import Path

from collectives.kernels import code_cache

__all__ = ["ROOT", "Limit", "output_of"]

ROOT = Path(__file__).resolve().parent.parent

# Where the tests let JAX keep its compiled code.
_OF_JAX = (ROOT / "out" / "jax", "*-cache")


class Limit:
    """Seconds to wait, counted from the last time that code was compiled.

    Args:
        seconds: seconds to wait.
        cache: NUMBA_CACHE_DIR of the job; None for the cache of this process.
    """

    def __init__(self, seconds, cache=None):
        self._seconds = seconds
        self._folders = [Path(cache)] if cache else code_cache.folders()
        self._began = time.time()

    def left(self):
        """Return the remaining seconds; 0 after the end of the limit."""
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
        return max(written for written in times if written <= now)


def output_of(process, seconds, cache=None):
    """Wait until a process has ended, and return its output and errors.

    Raises:
        subprocess.TimeoutExpired: the process is still running.
    """
    limit = Limit(seconds, cache)
    while True:
        try:
            return process.communicate(timeout=limit.left())
        except subprocess.TimeoutExpired:
            if not limit.left():
                raise
