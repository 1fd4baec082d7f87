"""Communicators of mpi4py made ours, and ours made mpi4py's."""

import pytest

import collectives as cc
import inprocess
from collectives import extend


def test_ours_as_one_of_mpi4py(comm, world):
    if not hasattr(world, "mode"):
        from mpi4py import MPI

        for ours in (comm, comm.split(0, -comm.rank)):
            theirs = ours.to_mpi()
            assert ours.to_mpi() is theirs
            assert (theirs.Get_rank(), theirs.Get_size()) == (ours.rank, ours.size)
            # Messages of the one never meet those of the other.
            request = theirs.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
            if ours.size > 1:
                got = ours.sendrecv(1, (ours.rank + 1) % ours.size)
                assert got == 1
            theirs.send("theirs", (ours.rank + 1) % ours.size)
            assert request.wait() == "theirs"
            assert ours.allreduce(1.0) == 1
            if ours is not comm:
                ours.close()
                assert theirs == MPI.COMM_NULL
        freed = comm.to_mpi()
        freed.Free()
        assert comm.to_mpi() is not freed
    else:
        with pytest.raises(TypeError, match="to_mpi: the ranks are not processes of MPI"):
            comm.to_mpi()


def test_one_of_mpi4py_as_ours(comm, world):
    if hasattr(world, "mode"):
        for wrong in (None, [0], "world"):
            with pytest.raises(TypeError, match="from_mpi: expected a communicator of mpi4py"):
                cc.from_mpi(wrong)
        return
    from mpi4py import MPI

    with pytest.raises(ValueError, match="from_mpi: expected a communicator of the processes"):
        cc.from_mpi(MPI.COMM_NULL)
    size, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    theirs = MPI.COMM_WORLD.Split(rank % 2, -rank)
    with cc.from_mpi(theirs, inprocess.world_settings(world.shared)) as ours:
        members = theirs.allgather(rank)
        theirs.Free()
        assert ours.size == len(members)
        assert ours.allgather([rank]).tolist() == members
        if members != list(range(len(members))):
            assert extend.describe_ranks(ours, 0) == f"rank 0 (world rank {members[0]})"
    assert comm.allreduce(1, op=cc.SUM) == size
