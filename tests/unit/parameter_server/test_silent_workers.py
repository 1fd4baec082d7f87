"""A coordinator that fails while a worker is silent."""

import threading

import pytest
from calls import LIMIT, until

import inprocess
import strategies
from served import opened
from strategies.errors import UnavailableError
from strategies.parameter_server import ClusterCoordinator, ParameterServerStrategy
from strategies.rpc import Task
from tapped import silence

over = threading.Event()


def fall_silent():
    with silence(strategies.get_strategy().cluster.comm.channel):
        assert over.wait(LIMIT)


def test_its_threads_end_without_an_error(monkeypatch):
    """An error of a thread would abort an MPI job, whose ranks may handle that of the block."""
    over.clear()
    sent, raised = [], []
    submit = Task.submit

    def counted(task, *arguments, **options):
        future = submit(task, *arguments, **options)
        sent.append(arguments)
        return future

    monkeypatch.setattr(Task, "submit", counted)
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def fail(comm):
        with opened(comm, ps=1, chief_timeout=1.0) as server:
            strategy = ParameterServerStrategy(server, strategies.SGD(1.0))
            with ClusterCoordinator(strategy) as coordinator:
                if not coordinator.coordinates:
                    coordinator.serve(LIMIT)
                coordinator.schedule(fall_silent)
                until(lambda: len(sent) > 1)  # the call, and after its timeout a ping
                raise ZeroDivisionError("of a test")

    def run(comm):
        with pytest.raises((ZeroDivisionError, UnavailableError)) as caught:
            fail(comm)
        if caught.type is ZeroDivisionError:
            until(lambda: not any("coordinator" in t.name for t in threading.enumerate()))
            over.set()

    inprocess.run_ranks(3, run)
    assert raised == []
