"""What a ps learns when the tasks that train die, each in an mpirun of its own."""

import pytest
import victims
from victims import FAULT_TOLERANT

PRELUDE = """
    from strategies.cluster.cluster import Cluster
    from strategies.rpc.server import Server
    from strategies.queues.queue_types import FIFOQueue
    from strategies.queues.remote import shared_queue

    def leave(*words):
        print(f"{cluster.job} {cluster.task_index}:", *words, flush=True)
        os._exit(0)                               # MPI_Finalize may wait for the dead

    cluster = Cluster()
    server = Server(cluster)
    ready = shared_queue(FIFOQueue, 9, np.int64, [()], service=server.service,
                         shared_name="ready", task="/job:ps/task:0")
    cluster.comm.barrier()
"""


def start(tmp_path, size, cluster, *parts, options=FAULT_TOLERANT):
    extra = {"options": options, "UNISONO_CLUSTER": cluster}
    return victims.start(tmp_path, size, PRELUDE, *parts, **extra)


def lines(result):
    return sorted(line for line in result.stdout.splitlines() if ": " in line)


JOIN = """
    if cluster.job == "ps":
        try:
            server.join(timeout=30)
            leave("done")
        except UnavailableError as error:
            leave("UnavailableError:", error)
"""


def test_a_ps_whose_workers_have_all_died_ends_with_an_error(tmp_path):
    result = start(tmp_path, 3, "ps:1,worker:*", JOIN + "    die()\n")
    (line,) = lines(result)
    assert line.startswith("ps 0: UnavailableError: join: no training task has ended normally")
    assert "/job:worker/task:0: task 1 died" in line
    assert "/job:worker/task:1: task 2 died" in line


def test_a_ps_goes_on_for_the_workers_that_are_left(tmp_path):
    text = """
    if cluster.job == "worker":
        ready.enqueue(1)
        die()
    ready.dequeue(timeout=30)
    reasons = server.service.departures([cluster.rank_of("worker", 0)], 30)
    ready.enqueue(2)                              # the ps still serves
    server.close()
    leave(reasons)
    """
    result = start(tmp_path, 4, "chief:1,ps:2,worker:*", JOIN, text)
    assert lines(result) == ["chief 0: {3: 'task 3 died'}", "ps 0: done", "ps 1: done"]


@pytest.mark.parametrize("options", [(), FAULT_TOLERANT])
def test_workers_that_leave_with_an_exception_are_not_done(tmp_path, options):
    text = """
    try:
        with server:
            raise KeyError("no such column")
    except KeyError:
        leave("left")
    """
    result = start(tmp_path, 2, "ps:1,worker:*", JOIN, text, options=options)
    error, left = lines(result)
    assert error.startswith("ps 0: UnavailableError: join: ")
    assert "KeyError: 'no such column'" in error
    assert left == "worker 0: left"
