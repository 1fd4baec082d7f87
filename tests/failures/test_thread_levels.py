"""What works, and what says why it does not, where MPI may be called by one thread only."""

import pytest

from launcher import mpirun, written

PROGRAM = """
    import numpy as np
    import collectives as cc

    comm = cc.init()
    ones = [np.ones(5), np.ones((2, 3))]
    said = []

    def attempt(function):
        try:
            said.append("fine" if function() else "wrong")
        except cc.LaunchError as error:
            said.append(str(error).split(";")[0])

    def step(buckets):
        for i in range(2):
            buckets.ready(i, ones[i])
        return all((x == comm.size).all() for x in buckets.wait(20))

    def whole(buckets):
        return all((x == comm.size).all() for x in buckets.allreduce(ones))

    for _ in range(2):
        attempt(lambda: comm.allreduce_async(1, op=cc.SUM).wait(20) == comm.size)
    with comm.plan_buckets(ones, op=cc.SUM) as buckets:
        attempt(lambda: whole(buckets))
        attempt(lambda: step(buckets))
        attempt(lambda: whole(buckets))
    attempt(lambda: comm.allreduce(1, op=cc.SUM) == comm.size)
    lines = comm.allgather_object(said)
    if comm.rank == 0:
        assert all(line == lines[0] for line in lines), lines
        print("\\n".join(lines[0]))
"""

FINE = ["fine"] * 6
WHY = "several threads cannot use this MPI, expected thread level 3 (multiple), got"


def said(tmp_path, level, shared_memory):
    settings = {"MPI4PY_RC_THREAD_LEVEL": level, "UNISONO_SHARED_MEMORY": shared_memory}
    return mpirun(2, written(tmp_path, PROGRAM), **settings).checked().stdout.splitlines()


@pytest.mark.parametrize("level", ["single", "funneled", "serialized"])
def test_with_messages_threads_are_refused_at_once_and_the_rest_works(tmp_path, level):
    lines = said(tmp_path, level, "off")
    for number in (0, 1):
        assert lines[number].startswith(f"asynchronous operation: {WHY}")
    assert lines[3].startswith(f"ready: {WHY}")
    assert [lines[i] for i in (2, 4, 5)] == ["fine"] * 3


def test_in_shared_memory_threads_do_not_need_mpi(tmp_path):
    assert said(tmp_path, "single", "/dev/shm") == FINE


def test_where_mpi_allows_threads_they_exchange_messages(tmp_path):
    assert said(tmp_path, "multiple", "off") == FINE


def test_threads_that_call_init_at_once_get_one_world(tmp_path):
    text = """
        import threading
        import collectives as cc

        together, worlds = threading.Barrier(8), []

        def begin():
            together.wait()
            worlds.append(cc.init())

        threads = [threading.Thread(target=begin) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(worlds) == 8 and len({id(world) for world in worlds}) == 1
        assert worlds[0].allreduce(1, op=cc.SUM) == 2
    """
    mpirun(2, written(tmp_path, text)).checked()
