"""A lock on a task, and functions that wait for others, between ranks."""

import numpy as np

from strategies.rpc import MutexLock, Service, Task
from strategies.variables import shared_variable

LIMIT = 20.0
TURNS = 10


def test_what_is_read_and_written_under_a_lock_is_written_by_one_at_a_time(comm):
    with Service(comm) as service:
        last = comm.size - 1
        total = shared_variable(np.zeros(1), service=service, shared_name="total", task=0)
        mutex = MutexLock(service, "turns", task=last)
        for _ in range(TURNS):
            with mutex:
                total.assign(total.read().value + 1)
        comm.barrier()
        assert total.read().value == TURNS * comm.size


def test_functions_on_all_ranks_wait_for_each_other(comm):
    with Service(comm) as service:
        futures = [Task(service, rank).submit("math:sqrt", rank) for rank in range(comm.size)]
        after = Task(service, (comm.rank + 1) % comm.size)
        assert after.run("math:sqrt", 4, depends_on=futures, timeout=LIMIT) == 2
        assert [future.result(0) for future in futures] == [r**0.5 for r in range(comm.size)]
