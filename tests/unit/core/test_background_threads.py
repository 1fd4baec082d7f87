"""Background threads and exit hooks: start, stop, exit, fork."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from collectives.core.background_threads import BackgroundThread

LIMIT = 20.0


class Counter(BackgroundThread):
    """Counts how often it was started, and runs until it is stopped."""

    def __init__(self, *, stops_itself=False):
        super().__init__("counter")
        self.runs = 0
        self.result = None
        self.stops_itself = stops_itself

    def _run(self):
        self.runs += 1
        if self.stops_itself:
            self.result = self.stop()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._stopping)


def names():
    return [thread.name for thread in threading.enumerate()]


def test_it_starts_once_and_stops_once():
    counter = Counter()
    assert counter.stop() is True  # never started
    counter.start()
    assert counter.runs == 0, "a stopped thread is not started again"
    counter = Counter()
    for _ in range(2):
        counter.start()
    assert "unisono-counter" in names()
    assert not counter.is_current()
    assert counter.stop(LIMIT)
    assert counter.stop(LIMIT)
    assert counter.runs == 1
    assert "unisono-counter" not in names()


def test_a_thread_that_does_not_end_is_reported():
    gate = threading.Event()

    class Stuck(BackgroundThread):
        def _run(self):
            gate.wait(LIMIT)

    stuck = Stuck("stuck")
    stuck.start()
    assert not stuck.stop(0.05)
    gate.set()
    assert stuck.stop(LIMIT)


def test_an_interrupted_wait_leaves_the_thread_running():
    counter = Counter()
    counter.start()
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))

    def wait():
        interrupt.start()
        counter.join(LIMIT)

    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not counter.join(0)
    assert counter.stop(LIMIT)


def test_a_thread_may_stop_itself():
    counter = Counter(stops_itself=True)
    counter.start()
    assert counter.join(LIMIT)
    assert counter.result is True


def test_a_forked_child_neither_starts_nor_waits_for_it():
    counter = Counter()
    counter.start()
    child = os.fork()
    if child == 0:
        counter.start()
        os._exit(0 if not counter.stop() and threading.active_count() == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert counter.stop(LIMIT)


PROGRAM = """
import atexit, threading, time
atexit.register(print, "before the import")
from collectives.core.background_threads import BackgroundThread
from collectives.core.process_hooks import ExitStage, at_exit
atexit.register(print, "after the import")

class Service(BackgroundThread):
    def _run(self):
        with self._changed:
            self._changed.wait_for(lambda: self._stopping)
    def stop_at_exit(self, timeout):
        print(f"{self._name}: {self.stop(timeout)}, limit {0 < timeout <= 5}")
        if self._name == "unisono-c":
            raise KeyError("of a thread")

def fail():
    print("fails")
    raise RuntimeError("at exit")

at_exit(ExitStage.LIVENESS, lambda: print("liveness"))
at_exit(ExitStage.TIMELINE, fail)
services = [Service(name) for name in "abc"]
for service in services:
    service.start()
services[1].stop()
"""


def test_at_exit_threads_stop_first_the_last_one_first_and_an_error_stops_nothing():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.splitlines() == [
        "after the import",
        "unisono-c: True, limit True",
        "unisono-a: True, limit True",
        "fails",
        "liveness",
        "before the import",
    ]
    assert "RuntimeError: at exit" in result.stderr
    assert "KeyError: 'of a thread'" in result.stderr


def test_a_thread_that_cannot_start_may_be_started_later(monkeypatch):
    counter = Counter()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_to_start)
        with pytest.raises(RuntimeError, match="no more threads"):
            counter.start()
    assert counter.join(0)
    counter.start()
    assert counter.stop(LIMIT)
    assert counter.runs == 1


def refuse_to_start(self):
    raise RuntimeError("no more threads")


@pytest.mark.parametrize("package", ["collectives", "strategies"])
def test_each_package_registers_hooks_through_process_hooks_alone(package):
    code = """
import atexit, os, sys
seen = []
for module, name in ((atexit, "register"), (os, "register_at_fork")):
    real = getattr(module, name)
    def noted(*args, real=real, **kwargs):
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.split(".")[0] in ("collectives", "strategies"):
            seen.append(caller)
        return real(*args, **kwargs)
    setattr(module, name, noted)
import PACKAGE
print(sorted(set(seen)))
""".replace("PACKAGE", package)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "['collectives.core.process_hooks']"
