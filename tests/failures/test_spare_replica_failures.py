"""Workers and chiefs that die or stop while others train, each in an mpirun of its own."""

import pytest
import victims
from victims import FAULT_TOLERANT

from launcher import lines

PRELUDE = """
    optimizer = strategies.SGD(1.0)

    def train(until_step, gradient=1.0):
        while strategy.local_step < until_step:
            strategy.apply_gradients(optimizer, [(np.full(2, gradient), w)])

    def open_strategy(aggregate, **options):
        global strategy, w
        strategy = strategies.SpareReplicaStrategy(aggregate, **options)
        w = strategy.variable(np.zeros(2), name="w")
        comm.barrier()
"""


LEAVE = """
    strategy.close()
    leave()
"""


def start(tmp_path, size, *parts, options=()):
    return victims.start(tmp_path, size, PRELUDE, *parts, options=options)


def test_killed_workers_are_spares_less_until_there_are_too_few(tmp_path):
    text = """
        open_strategy(2)
        train(5)
        if comm.rank == 3:
            die()
        train(10)
        until(lambda: strategy.report().lost)
        if comm.rank == 2:
            die()
        train(20)
        until(lambda: len(strategy.report().lost) == 2)
        lost = strategy.report().lost
        say(w.value.tolist(), lost)
        if comm.rank == 1:
            train(25)
            die()
        began = time.monotonic()
        try:
            train(10 ** 9)
        except UnavailableError as error:
            say(str(error).partition("(")[2])
            assert time.monotonic() - began < 20
    """
    result = start(tmp_path, 4, text, LEAVE, options=FAULT_TOLERANT)
    dead = "{2: 'task 2 died', 3: 'task 3 died'}"
    shown = lines(result)
    assert len(shown) == 3, result
    for rank, line in enumerate(shown[::2]):
        assert line.startswith(f"rank {rank}: [-2"), result
    assert [line for line in shown if dead in line or "{3: 'task 3 died', 2:" in line], result
    reasons = "worker 1: task 1 died; worker 2: task 2 died; worker 3: task 3 died)"
    assert f"rank 0: {reasons}" in shown, result


@pytest.mark.parametrize(
    ("victim", "tasks"),
    [(0, "(0,)"), (0, "(1,)"), (1, "(1,)")],
    ids=["chief that averages", "chief", "worker that averages"],
)
def test_a_killed_task_that_all_need_is_an_error_on_all_workers_at_once(tmp_path, victim, tasks):
    text = f"""
        open_strategy(2, tasks={tasks})
        train(5)
        comm.barrier()
        if comm.rank == {victim}:
            die()
        began = time.monotonic()
        try:
            train(10 ** 9)
        except UnavailableError as error:
            assert "task {victim} died" in str(error), error
            assert time.monotonic() - began < 20
            say("it died")
        try:
            train(10 ** 9)
        except UnavailableError as error:
            say("and stays dead")
    """
    result = start(tmp_path, 3, text, LEAVE, options=FAULT_TOLERANT)
    words = ("and stays dead", "it died")
    others = [rank for rank in range(3) if rank != victim]
    assert lines(result) == [f"rank {rank}: {word}" for rank in others for word in words], result


def test_a_worker_that_stops_for_longer_than_the_limit_does_no_harm(tmp_path):
    text = """
        open_strategy(2, timeout=2)
        pids = comm.allgather_object(os.getpid())
        train(3)
        if comm.rank == 0:
            os.kill(pids[2], signal.SIGSTOP)
            began = time.monotonic()
            train(200)
            assert time.monotonic() - began < 20
            time.sleep(2.5)
            os.kill(pids[2], signal.SIGCONT)
            until(lambda: sum(strategy.report().used.values()) >= 2 * 200)
        elif comm.rank == 1:
            train(200)
        else:
            train(200)
        assert w.value[0] == -200, w.value
        comm.barrier()
        report = strategy.report()
        assert report.lost == {}, report
        assert sum(report.used.values()) == 2 * 200, report
        say("fine")
        comm.barrier()
        strategy.close()
    """
    result = start(tmp_path, 3, text)
    assert lines(result) == [f"rank {rank}: fine" for rank in range(3)], result
    assert result.status == 0


def test_without_fault_tolerance_a_killed_worker_ends_the_job(tmp_path):
    text = """
        open_strategy(2)
        train(2)
        if comm.rank == 2:
            die()
        train(10 ** 9)
    """
    result = start(tmp_path, 3, text)
    assert result.status != 0


@pytest.mark.parametrize(
    ("steps", "end", "why", "options"),
    [(0, "die()", "task 2 died", FAULT_TOLERANT),
     (2, "sys.exit()", "it has ended without leaving", ())],
    ids=["killed before its first gradient", "exits"],
)  # fmt: skip
def test_a_worker_that_is_gone_is_a_spare_less(tmp_path, steps, end, why, options):
    text = f"""
        open_strategy(2)
        train({steps})
        if comm.rank == 2:
            {end}
        train(10)
        until(lambda: strategy.report().lost)
        say(w.value.tolist(), strategy.report().lost)
    """
    result = start(tmp_path, 3, text, LEAVE if options else "strategy.close()", options=options)
    shown = f"[-10.0, -10.0] {{2: '{why}'}}"
    assert lines(result) == [f"rank {rank}: {shown}" for rank in range(2)], result
