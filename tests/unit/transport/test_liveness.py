"""Signs of life between processes: forks of the test, each a rank."""

import os
import signal
import time

import pytest

from collectives.transport import liveness
from collectives.transport.liveness import Liveness, create

LIMIT = 10.0


class Children:
    """Processes that each run a function, say that they are ready, and wait to be killed."""

    def __init__(self):
        self.pids = []

    def start(self, body):
        ready, announce = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                kept = body()  # noqa: F841  (the lock lives as long as its object's descriptor)
                os.write(announce, b"x")
                while True:  # a handler may run just before `signal.pause`, which would then wait
                    time.sleep(0.01)
            finally:
                os._exit(1)
        self.pids.append(pid)
        os.close(announce)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        return pid

    def end(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.fixture
def children():
    children = Children()
    yield children
    children.end()


@pytest.fixture
def path(tmp_path):
    return create(str(tmp_path))


def wait_for_dead(liveness, expected):
    give_up = time.monotonic() + LIMIT
    while liveness.dead() != expected:
        assert time.monotonic() < give_up, liveness.dead()


def test_a_killed_rank_is_dead_at_once_though_nobody_has_waited_for_it(path, children):
    with Liveness(path, 0, 3) as mine:
        victim = children.start(lambda: Liveness(path, 2, 3))
        children.start(lambda: Liveness(path, 1, 3))
        os.unlink(path)
        assert mine.dead() == []
        os.kill(victim, signal.SIGKILL)
        wait_for_dead(mine, [2])


def test_a_rank_whose_child_lives_on_is_dead(path, children):
    reader, writer = os.pipe()

    def with_a_child():
        liveness = Liveness(path, 1, 2)
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)  # until the test closes its end
            os._exit(0)
        return liveness

    with Liveness(path, 0, 2) as mine:
        victim = children.start(with_a_child)
        assert mine.dead() == []
        os.kill(victim, signal.SIGKILL)
        wait_for_dead(mine, [1])
    os.close(writer)
    os.close(reader)


def test_a_stopped_rank_is_alive(path, children):
    with Liveness(path, 0, 2) as mine:
        pid = children.start(lambda: Liveness(path, 1, 2))
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert mine.dead() == []


def test_ranks_that_have_not_come_or_have_closed_are_not_dead(path, children):
    def come_and_go():
        liveness = Liveness(path, 1, 3)
        liveness.close()
        liveness.close()
        return liveness

    with Liveness(path, 0, 3) as mine:
        assert mine.dead() == []
        pid = children.start(come_and_go)
        os.kill(pid, signal.SIGKILL)
        assert mine.dead() == []
    assert mine.dead() == []


def test_a_rank_that_leaves_while_it_is_looked_at_is_not_dead(path, children, monkeypatch):
    def ends_when_told():
        theirs = Liveness(path, 1, 2)
        signal.signal(signal.SIGUSR1, lambda *_: (theirs.end(), os._exit(0)))
        return theirs

    def gone_by_now(descriptor, byte):
        # What the other rank does between the two looks: it says so, and then its lock is gone.
        os.kill(pid, signal.SIGUSR1)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return False

    with Liveness(path, 0, 2) as mine:
        pid = children.start(ends_when_told)
        monkeypatch.setattr(liveness, "_is_locked", gone_by_now)
        assert mine.dead() == []


def test_ranks_that_are_threads_of_one_process_share_its_life(path, children):
    first, second = Liveness(path, 0, 3), Liveness(path, 1, 3)
    other = children.start(lambda: Liveness(path, 2, 3))
    assert first.dead() == second.dead() == []
    first.close()
    # The descriptor is shared: had it been closed, the lock of the second would be gone.
    os.kill(other, signal.SIGKILL)
    wait_for_dead(second, [2])
    second.close()


def test_the_other_process_sees_both_ranks_of_one_process(path, children):
    def two_ranks():
        kept = [Liveness(path, 1, 4), Liveness(path, 2, 4), Liveness(path, 3, 4)]
        kept.pop().close()
        return kept

    with Liveness(path, 0, 4) as mine:
        pid = children.start(two_ranks)
        assert mine.dead() == []
        os.kill(pid, signal.SIGKILL)
        wait_for_dead(mine, [1, 2])


def test_a_forked_child_that_closes_does_not_end_its_parents_life(path, children):
    def with_a_closing_child():
        liveness = Liveness(path, 1, 2)
        child = os.fork()
        if child == 0:
            liveness.close()
            os._exit(0)
        os.waitpid(child, 0)
        return liveness

    with Liveness(path, 0, 2) as mine:
        children.start(with_a_closing_child)
        assert mine.dead() == []


def test_two_processes_cannot_be_one_rank(path, children):
    children.start(lambda: Liveness(path, 0, 2))
    with pytest.raises(OSError, match="temporarily unavailable"):
        Liveness(path, 0, 2)


def test_the_file_is_for_its_owner_only(path):
    assert os.stat(path).st_mode & 0o777 == 0o600
