"""Tasks that die, stop or leave while others use their queues, each in an mpirun of its own."""

import pytest
import victims
from victims import FAULT_TOLERANT

from launcher import lines

PRELUDE = """
    from strategies.queues.state_machine import Dequeue
    from strategies.queues.queue_types import FIFOQueue
    from strategies.queues.remote import shared_queue
    from strategies.rpc.service import Service

    def open_queue(name="q", task=0, capacity=100):
        return shared_queue(FIFOQueue, capacity, np.int64, [()], service=service,
                            shared_name=name, task=task)
"""


def start(tmp_path, size, text, *, options=()):
    return victims.start(tmp_path, size, PRELUDE, text, options=options)


def test_a_killed_client_takes_its_attempts_with_it_and_no_row(tmp_path):
    text = """
        service = Service(comm)
        queue = open_queue(capacity=2)
        comm.barrier()
        if comm.rank == 2:
            queue.enqueue_many((np.arange(2),))
            queue.state_machine.submit(Dequeue(4))                   # has taken two rows, and waits
            queue.size()
            comm.barrier()
            die()
        comm.barrier()                                        # the dead one is first in the line
        if comm.rank == 0:
            until(lambda: [a.count for a in queue.state_machine.waiting()[1]] == [5])
            queue.enqueue_many((np.arange(2, 5),), timeout=20)
            say("done")
        else:
            say(queue.dequeue_many(5, timeout=20).tolist())   # was behind the dead one in the line
        service.close()
        leave()
    """
    result = start(tmp_path, 3, text, options=FAULT_TOLERANT)
    assert lines(result) == ["rank 0: done", "rank 1: [0, 1, 2, 3, 4]"], result


def test_rows_on_their_way_to_a_killed_client_go_back(tmp_path):
    text = """
        service = Service(comm)
        queue = open_queue()
        comm.barrier()
        if comm.rank == 2:
            service._exchange.requests.answered = lambda source, message: die()
            queue.dequeue_many(3)
        if comm.rank == 0:
            until(lambda: queue.state_machine.waiting()[1])
            queue.enqueue_many((np.arange(5),))
            until(lambda: queue.size() == 5)
            queue.close()
        else:
            got = []
            until(queue.is_closed)
            say(queue.dequeue_up_to(9).tolist())
        service.close()
        leave()
    """
    result = start(tmp_path, 3, text, options=FAULT_TOLERANT)
    assert lines(result) == ["rank 1: [0, 1, 2, 3, 4]"], result
    assert "task 2 died; responses dropped: 1" in result.stderr


def test_a_killed_host_is_an_error_for_its_clients_at_once_and_for_nobody_else(tmp_path):
    text = """
        service = Service(comm)
        queue, full = open_queue(), open_queue("full", capacity=0)
        other = open_queue("other", task=1)
        comm.barrier()
        if comm.rank == 0:
            dequeues, enqueues = queue.state_machine.waiting, full.state_machine.waiting
            until(lambda: (len(dequeues()[1]), len(enqueues()[0])) == (2, 2))
            die()
        blocked = []
        thread = threading.Thread(target=lambda: blocked.append(timed(lambda: full.enqueue(1))))
        thread.start()
        blocked.append(timed(queue.dequeue))
        thread.join()
        again = timed(queue.size)
        assert again[1] < 0.5
        for result, _ in [*blocked, again]:
            assert result.startswith("UnavailableError: ") and "task 0 died" in result, result
        assert max(time for _, time in blocked) < 20, blocked
        other.enqueue(comm.rank)
        if comm.rank == 1:
            say(sorted(other.dequeue_many(2, timeout=20).tolist()))
        service.close()
        leave()
    """
    result = start(tmp_path, 3, text, options=FAULT_TOLERANT)
    assert lines(result) == ["rank 1: [1, 2]"], result


@pytest.mark.parametrize("victim", [0, 1], ids=["host", "client"])
def test_without_fault_tolerance_a_killed_task_ends_the_job(tmp_path, victim):
    text = f"""
        with Service(comm) as service:
            queue = open_queue()
            comm.barrier()
            if comm.rank == {victim}:
                die()
            queue.dequeue()
    """
    result = start(tmp_path, 3, text)
    assert result.status != 0


def test_a_host_that_stops_is_an_error_in_time_and_harmless_when_it_goes_on(tmp_path):
    text = """
        service = Service(comm, timeout=2)
        queue = open_queue()
        pids = comm.allgather_object(os.getpid())
        if comm.rank == 1:
            queue.enqueue_many((np.arange(3),))
            queue.dequeue()
            os.kill(pids[0], signal.SIGSTOP)
            result, time_taken = timed(lambda: queue.dequeue_many(9))
            say(result)
            assert 1.9 < time_taken < 15, time_taken
            result, time_taken = timed(lambda: queue.dequeue(timeout=0.3))
            say(result.split(":")[0])
            assert time_taken < 15, time_taken
            os.kill(pids[0], signal.SIGCONT)
            until(lambda: timed(queue.size)[0] == 2)        # what came too late went back
            say(queue.dequeue_many(2).tolist())
        service.close()
    """
    result = start(tmp_path, 2, text)
    assert lines(result) == [
        "rank 1: UnavailableError",
        "rank 1: UnavailableError: dequeue: task 0 has given no sign of life for 2 s "
        "(object: 'q' on task 0)",
        "rank 1: [1, 2]",
    ], result
    assert result.status == 0


def test_a_client_that_stops_for_a_while_does_no_harm(tmp_path):
    text = """
        service = Service(comm, timeout=2)
        queue = open_queue(capacity=4)
        pids = comm.allgather_object(os.getpid())
        others = comm.split(comm.rank // 2)
        if comm.rank == 2:
            taken = queue.dequeue_many(3)
            say(taken.tolist())
        elif comm.rank == 0:
            until(lambda: queue.state_machine.waiting()[1])             # rank 2 waits
            others.barrier()
        else:
            others.barrier()
            queue.enqueue(0)
            os.kill(pids[2], signal.SIGSTOP)
            queue.enqueue_many((np.arange(1, 7),))            # rank 2's three, and four
            time.sleep(3)
            os.kill(pids[2], signal.SIGCONT)
            say(queue.dequeue_many(4).tolist())
        service.close()
    """
    result = start(tmp_path, 3, text)
    assert lines(result) == ["rank 1: [3, 4, 5, 6]", "rank 2: [0, 1, 2]"], result
    assert result.status == 0


def test_a_task_that_leaves_with_an_exception_tells_the_others_why(tmp_path):
    text = """
        service = Service(comm)
        queue = open_queue()
        comm.barrier()
        try:
            with service:
                if comm.rank == 0:
                    until(lambda: queue.state_machine.waiting()[1])
                    raise KeyError("the host gave up")
                queue.dequeue()
        except (KeyError, UnavailableError) as error:
            say(type(error).__name__, error)
        assert threading.active_count() == 1
    """
    result = start(tmp_path, 2, text)
    assert lines(result) == [
        "rank 0: KeyError 'the host gave up'",
        "rank 1: UnavailableError dequeue: task 0 has left (KeyError: 'the host gave up') "
        "(object: 'q' on task 0)",
    ], result
    assert result.status == 0


def test_a_task_that_is_interrupted_in_close_tells_the_others(tmp_path):
    result = start(
        tmp_path,
        2,
        """
        service = Service(comm)
        queue = open_queue()
        comm.barrier()
        try:
            if comm.rank == 0:
                until(lambda: queue.state_machine.waiting()[1])
                timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
                timer.start()
            else:
                queue.dequeue(timeout=20)
            service.close()                                   # waits for rank 1
        except (KeyboardInterrupt, OpError) as error:
            say(type(error).__name__, error)
        comm.barrier()                                        # rank 0 lives on
        service.close()
        if comm.rank == 0:
            timer.join()
        assert threading.active_count() == 1
        """,
    )
    assert lines(result) == [
        "rank 0: KeyboardInterrupt ",
        "rank 1: UnavailableError dequeue: task 0 has left (it was interrupted) "
        "(object: 'q' on task 0)",
    ], result
    assert result.status == 0


def test_a_process_may_end_without_closing_its_service(tmp_path):
    text = """
        service = Service(comm)
        queue = open_queue()
        comm.barrier()
        if comm.rank == 1:
            sys.exit()                                        # neither waits nor hangs
        result, _ = timed(lambda: open_queue(task=1).dequeue())
        say(result)
        service.close()
    """
    result = start(tmp_path, 3, text)
    shown = lines(result)
    assert len(shown) == 2, result
    for line in shown:  # whether it learns of that before it asks, meanwhile or later
        assert "UnavailableError: " in line, result
        assert "task 1 has left (its process ended)" in line, result
    assert result.status == 0


def test_a_signal_interrupts_a_wait_for_another_task(tmp_path):
    text = """
        with Service(comm) as service:
            queue = open_queue()
            comm.barrier()
            if comm.rank == 1:
                try:
                    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                    queue.dequeue()
                except KeyboardInterrupt:
                    say("interrupted")
                queue.enqueue(5)
            else:
                until(lambda: queue.size() == 1)              # nobody took it
                say(queue.dequeue())
    """
    result = start(tmp_path, 2, text)
    assert lines(result) == ["rank 0: 5", "rank 1: interrupted"], result
    assert result.status == 0


def test_who_has_heard_of_a_death_does_not_wait_for_the_end_of_mpi_for_ever(tmp_path):
    text = """
        service = Service(comm)
        if comm.rank == 1:
            die()
        say(service.departures([1], 20))
        service.__exit__(None, None, None)

        from mpi4py import MPI

        def finalize():  # MPI's own may hang after a death
            say("seconds until the alarm:", signal.alarm(0))
            leave()

        MPI.Finalize = finalize
    """
    result = start(tmp_path, 2, text, options=FAULT_TOLERANT)
    assert lines(result) == ["rank 0: seconds until the alarm: 5", "rank 0: {1: 'task 1 died'}"], (
        result
    )
