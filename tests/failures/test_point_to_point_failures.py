"""`send` and `recv` among ranks of which one is killed, each in an mpirun of its own."""

import pytest
from test_peer_failure import (
    MESSAGES,
    _fault_tolerant_mpi,  # noqa: F401
    check_that_survivors_knew,
    program,
)
from victims import FAULT_TOLERANT

from launcher import mpirun

# Inside a head, and larger than what MPI sends unasked.
COUNTS = [3, 1_000_000]

SURVIVE_AND_SAY = """
    left, right = (comm.rank - 1) % 3, (comm.rank + 1) % 3
    x = np.ones({count})
    for step in range(3):
        comm.send(x, right)
        comm.recv(left)
    comm.barrier()
    if comm.rank == 1:
        die()
    def body():
        {body}
        os.sched_yield()
    survive(body)
    try:
        comm.send(x, right)
    except cc.CollectiveError as error:
        assert "not usable any more" in str(error), error
        print("refused", comm.rank, flush=True)
    comm.close()
"""


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("options", [{}, MESSAGES], ids=["shared", "messages"])
def test_who_waits_for_a_killed_rank_or_for_another_one_knows(tmp_path, count, options):
    text = SURVIVE_AND_SAY.format(count=count, body="comm.recv(left)")
    result = mpirun(3, program(tmp_path, text), options=FAULT_TOLERANT, **options)
    check_that_survivors_knew(result, 3, 1, "recv")
    assert result.stdout.count("refused") == 2, result


@pytest.mark.parametrize("count", COUNTS)
def test_who_sends_to_a_killed_rank_knows(tmp_path, count):
    text = SURVIVE_AND_SAY.format(
        count=count, body="comm.send(x, 1) if comm.rank == 0 else comm.recv(0)"
    )
    result = mpirun(3, program(tmp_path, text), options=FAULT_TOLERANT)
    check_that_survivors_knew(result, 3, 1, "(?:send|recv)")
    assert result.stdout.count("refused") == 2, result


def test_without_fault_tolerance_the_job_ends(tmp_path):
    text = SURVIVE_AND_SAY.format(count=3, body="comm.recv(left)")
    result = mpirun(3, program(tmp_path, text))
    assert result.status != 0
    assert "refused" not in result.stdout


def test_requests_that_nobody_waits_for_fail_when_a_rank_is_killed(tmp_path):
    text = """
        comm.barrier()
        if comm.rank == 1:
            comm.recv(0)
            die()
        heard = threading.Semaphore(0)
        requests = [comm.irecv(1, timeout=60), comm.irecv(2 - comm.rank, tag=1, timeout=60)]
        for request in requests:
            request.add_done_callback(lambda request: heard.release())
        if comm.rank == 0:
            comm.send(1, 1)
        def body():
            for request in requests:
                assert heard.acquire(timeout=10)
            errors = [request.exception() for request in requests]
            print("failed" * all(isinstance(e, cc.PeerFailure) for e in errors), flush=True)
            raise min(errors, key=lambda error: len(str(error)))   # the others tell of this one
        survive(body)
        comm.close()
    """
    result = mpirun(3, program(tmp_path, text), options=FAULT_TOLERANT)
    check_that_survivors_knew(result, 3, 1, "irecv")
    assert result.stdout.count("failed\n") == 2, result
