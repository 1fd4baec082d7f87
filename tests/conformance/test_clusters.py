"""Clusters of the ranks that there are: who is which task, and what is placed where."""

import json
import logging
import sys
from collections import defaultdict

import numpy as np
import pytest

import collectives as cc
import fakecupy
from requirements import installed
from strategies.accumulators.accumulators import ConditionalAccumulator, shared_accumulator
from strategies.cluster.cluster import Cluster
from strategies.cluster.device_setter import GreedyLoadBalancing, replica_device_setter
from strategies.cluster.resolvers import SimpleClusterResolver, TFConfigClusterResolver
from strategies.cluster.scopes import PlacementRequest, device
from strategies.cluster.spec import ClusterSpec
from strategies.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
)
from strategies.queues.queue_types import FIFOQueue
from strategies.queues.remote import shared_queue
from strategies.rpc.functions import Task
from strategies.rpc.registry import Address, container
from strategies.rpc.server import Server
from strategies.rpc.service import Service
from strategies.variables.factory import shared_variable
from strategies.variables.request_handler import KIND


def holds(service, container, name):
    """Whether a thing of this name is on this task."""
    try:
        service.here(KIND, Address(service.task, container, name, serial=0))
    except NotFoundError:
        return False
    except AbortedError:  # no thing has this serial number
        return True


def current_gpu():
    return sys.modules["cupy"].selected[-1].id


def default_jax_device():
    (device,) = installed("jax.numpy").zeros(1).devices()
    return device.id


def one_ps(comm, **options):
    """A cluster of a ps and workers, or of one worker if there is one rank."""
    return Cluster(ClusterSpec.from_ranks(comm, ps=min(1, comm.size - 1)), comm, **options)


def test_every_rank_is_a_task(comm):
    with one_ps(comm) as cluster:
        jobs = ["ps", *["worker"] * (comm.size - 1)] if comm.size > 1 else ["worker"]
        indices = [0, *range(comm.size - 1)] if comm.size > 1 else [0]
        assert (cluster.job, cluster.task_index) == (jobs[comm.rank], indices[comm.rank])
        for rank, task in enumerate(zip(jobs, indices, strict=True)):
            assert cluster.rank_of(*task) == rank
            assert cluster.task_of(rank) == task
            assert cluster.device_of(rank) == "/job:{}/task:{}".format(*task)
        assert cluster.ranks_of("ps") == [0][: comm.size - 1]
        assert cluster.ranks_of("chief") == []
        workers = [rank for rank in range(comm.size) if jobs[rank] == "worker"]
        assert cluster.training_ranks == workers
        assert cluster.is_chief == (comm.rank == workers[0])
        if comm.rank in workers:
            assert cluster.workers.rank == cluster.task_index
            assert cluster.workers.allreduce(1, op=cc.SUM) == len(workers)
        else:
            assert cluster.workers is None
        with pytest.raises(ValueError, match="no such job"):
            cluster.rank_of("moon", 0)
        with pytest.raises(ValueError, match="no such rank"):
            cluster.device_of(comm.size)
    cluster.close()


def test_ranks_may_say_which_task_they_are(comm):
    last = comm.size - 1
    addresses = [f"host{i}:1" for i in range(last)]
    spec = {"chief": ["host:1"], **({"worker": addresses} if addresses else {})}
    task = {"type": "chief", "index": 0}
    if comm.rank < last:
        task = {"type": "worker", "index": last - 1 - comm.rank}
    environ = {"TF_CONFIG": json.dumps({"cluster": spec, "task": task})}
    with Cluster(TFConfigClusterResolver(environ=environ), comm) as cluster:
        assert (cluster.job, cluster.task_index) == (task["type"], task["index"])
        assert cluster.rank_of("chief", 0) == last
        assert cluster.training_ranks == list(range(last, -1, -1))
        assert cluster.workers.rank == last - comm.rank
        assert cluster.is_chief == (comm.rank == last)


def test_the_environment_divides_the_ranks(world, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("UNISONO_CLUSTER", "chief:1,worker:*")

    def check(comm):
        with Cluster(comm=comm) as cluster:
            assert cluster.spec == ClusterSpec.from_ranks(comm, chief=1)
            assert cluster.is_chief == (comm.rank == 0)

    world.run(check)


def test_what_is_wrong_on_one_rank_is_an_error_on_all(comm):
    last = comm.rank == comm.size - 1
    good = ClusterSpec.from_ranks(comm)
    for bad, kind, message in (
        ({"moon": ["m:1"]}, ValueError, "without a role"),
        (3, TypeError, "expected a dict of jobs"),
        (ClusterSpec.from_ranks(comm.size + 1), ValueError, "expected a rank for each"),
        (
            SimpleClusterResolver(good, task_type="worker"),
            ValueError,
            "the task of this process is unknown",
        ),
        (SimpleClusterResolver(good, task_type="worker", task_id=99), ValueError, "no such"),
    ):
        with pytest.raises(kind, match=message):
            Cluster(bad if last else good, comm)
    for options in ({"cpus": 0}, {"gpus": -1}):
        with pytest.raises(ValueError, match="Cluster: bad"):
            Cluster(good, comm, **(options if last else {}))
    if comm.size > 1:
        with pytest.raises(cc.MismatchError, match="ranks differ"):
            Cluster(ClusterSpec.from_ranks(comm, ps=int(last)), comm)
        same = SimpleClusterResolver(good, task_type="worker", task_id=0)
        for resolver in (same, same if last else good):
            with pytest.raises(ValueError, match="expected a rank for each task of"):
                Cluster(resolver, comm)
    with Cluster(good, comm) as cluster:
        assert cluster.workers.size == comm.size


def test_devices_of_all_tasks_are_known_everywhere(comm):
    with one_ps(comm, cpus=comm.rank + 1, gpus=comm.rank % 2) as cluster:
        expected = [
            f"{cluster.device_of(rank)}/device:{kind}:{i}".replace("/task", "/replica:0/task")
            for rank in range(comm.size)
            for kind, count in (("CPU", rank + 1), ("GPU", rank % 2))
            for i in range(count)
        ]
        assert cluster.devices() == expected
        thing = PlacementRequest("f", "Function", device_types=("GPU", "CPU"))
        for rank in range(comm.size):
            with device(cluster.device_of(rank)):
                place = cluster.place(thing)
                assert place.device_type == ("GPU" if rank % 2 else "CPU")
                assert cluster.locate(thing) == rank


def test_queues_go_where_blocks_say(world, caplog):
    caplog.set_level(logging.INFO)

    def check(comm):
        with one_ps(comm, log_device_placement=True) as cluster, Server(cluster) as server:
            service = server.service
            first = cluster.ranks_of("worker")[0]
            last = cluster.rank_of("worker", comm.size - 2 if comm.size > 1 else 0)

            def open_(name, task=None):
                return shared_queue(
                    FIFOQueue, 9, np.int64, [()], service=service, shared_name=name, task=task
                )

            def at(rank, name, queue):
                """Check that the queue is on this rank, and nowhere else."""
                assert service.task_of(None, "FIFOQueue", name) in range(comm.size)
                queue.enqueue(comm.rank)
                comm.barrier()
                assert open_(name, rank).size() == comm.size
                comm.barrier()

            at(first, "nothing", open_("nothing"))
            at(first, "number", open_("number", first))
            with device(f"{cluster.device_of(last)}/cpu:0"):
                at(last, "block", open_("block"))
                with device(None):
                    at(first, "none", open_("none"))
            with device("/job:worker"):
                task = cluster.task_of(last)[1]
                at(last, "string", open_("string", f"/task:{task}"))
            if comm.size > 1:
                setter = replica_device_setter(cluster=cluster.spec, ps_types={"FIFOQueue"})
                with device(setter):
                    at(0, "setter", open_("setter"))
            for wrong in ("/job:moon", "/cpu:1", "/gpu:0", f"/task:{comm.size}"):
                with pytest.raises(InvalidArgumentError, match="place: cannot assign a device"):
                    open_("wrong", wrong)
        messages = [m for m in caplog.messages if m.startswith("nothing: ")]
        assert f"nothing: (FIFOQueue): {service_device(cluster, first)}" in messages

    world.run(check)


def service_device(cluster, rank):
    job, index = cluster.task_of(rank)
    return f"/job:{job}/replica:0/task:{index}/device:CPU:0"


SHAPES = {"a": (2, 2), "b": (2, 1), "c": (2, 2), "d": (1, 3)}


def test_variables_and_accumulators_are_spread_over_the_ps_tasks(world):
    def check(comm):
        ps = min(2, comm.size - 1)
        spec = ClusterSpec.from_ranks(comm, ps=ps)
        turns = replica_device_setter(cluster=spec)
        greedy = replica_device_setter(cluster=spec, choice=GreedyLoadBalancing(max(ps, 1)))
        with Cluster(spec, comm) as cluster, Server(cluster) as server:
            service = server.service
            for name, shape in SHAPES.items():
                zeros = np.zeros(shape, np.float32)
                with device(turns), container("turns"):
                    shared_variable(zeros, service=service, shared_name=name)
                    shared_accumulator(
                        ConditionalAccumulator, "float32", shape,
                        service=service, shared_name=f"{name}/sum",
                    )  # fmt: skip
                with device(greedy), container("greedy"):
                    variable = shared_variable(zeros, service=service, shared_name=name)
                    variable.assign_add(zeros + 1)
            for name, shape in SHAPES.items():
                with device(greedy), container("greedy"):
                    shared_accumulator(
                        ConditionalAccumulator, "float32", shape,
                        service=service, shared_name=f"{name}/sum",
                    )  # fmt: skip
            comm.barrier()
            assert (variable.read().value == comm.size).all()
            everything = sum(expected(0, worker=0).values(), [])
            mine = [name for name in everything if holds(service, *name)]
            assert sorted(mine) == sorted(expected(ps, cluster.rank_of("worker", 0))[comm.rank])

    def expected(ps, worker):
        """Return each rank's (container, name) pairs."""
        if ps == 0:
            everything = [("turns", n + end) for n in SHAPES for end in ("", "/sum")]
            greedy = [("greedy", n + end) for n in SHAPES for end in ("", "/sum")]
            return {worker: everything + greedy}
        found = defaultdict(list)
        for i, name in enumerate(SHAPES):
            found[0].append(("turns", name))
            found[ps - 1].append(("turns", f"{name}/sum"))
            found[(0, 1, 1, 0)[i] if ps == 2 else 0].append(("greedy", name))
            found[(1, 0, 0, 1)[i] if ps == 2 else 0].append(("greedy", f"{name}/sum"))
        return found

    world.run(check)


def test_functions_run_where_blocks_say(comm):
    last = comm.size - 1
    with one_ps(comm, gpus=1) as cluster, Server(cluster) as server:
        with device(f"{cluster.device_of(last)}/gpu:0"):
            task = Task(server.service, None)
        assert task.number == last
        assert task.run("math:hypot", 3, 4) == 5
        assert Task(server.service, "/job:worker").number == cluster.rank_of("worker", 0)
        with pytest.raises(InvalidArgumentError, match="Function 'function'"):
            Task(server.service, "/gpu:1")


@pytest.mark.parametrize("where", ["here", "there"])
def test_functions_run_with_their_device_selected(world, monkeypatch, where):
    fake = fakecupy.FakeCupy(devices=3)
    monkeypatch.setitem(sys.modules, "cupy", fake)

    def check(comm):
        last = comm.size - 1
        with one_ps(comm, gpus=2, others={"TPU": 1}) as cluster, Server(cluster) as server:
            number = comm.rank if where == "here" else last
            task = f"{cluster.device_of(number)}"
            for name, expected in (("/gpu:1", 1), ("/gpu:0", 0), ("", 0)):
                place = Task(server.service, task + name)
                assert (place.number, place.device) == (number, name or None)
                assert place.run(current_gpu) == expected
            assert Task(server.service, f"{task}/gpu:*").device == "/gpu:0"
            with device(f"{task}/tpu:0"):
                assert Task(server.service, None).device == "/tpu:0"
            with pytest.raises(InvalidArgumentError, match="TPU:0.*GPU:0.*CPU:0, got .*TPU:1"):
                Task(server.service, f"{task}/tpu:1")

    world.run(check)


def test_functions_on_a_cpu_device_of_jax(comm):
    jax = installed("jax")
    with Cluster(ClusterSpec.from_ranks(comm.size), comm, cpus=3) as cluster:
        with Server(cluster) as server:
            task = Task(server.service, f"{cluster.device_of(comm.size - 1)}/cpu:2")
            assert task.run(default_jax_device) == 2
        assert jax.numpy.zeros(1).devices() == {jax.local_devices()[0]}


def test_without_a_cluster_all_tasks_are_workers(comm):
    last = comm.size - 1
    with Service(comm) as service:
        assert service.task_of(None, "Variable", "f") == 0
        with device(f"/job:worker/task:{last}/cpu:0"):
            assert service.task_of(None, "Variable", "f") == last
            queue = shared_queue(FIFOQueue, 9, np.int64, [()], service=service, shared_name="q")
        queue.enqueue(1)
        comm.barrier()
        assert holds(service, "", "q") == (comm.rank == last)
        for wrong in (comm.rank, comm.size, -1):
            with pytest.raises(ValueError, match="expected other tasks than"):
                service.departures([wrong])


def test_a_ps_serves_until_the_workers_are_done(comm):
    with one_ps(comm) as cluster:
        if comm.size == 1:
            with Server(cluster) as server:
                server.join(timeout=20)  # nobody to wait for
            return
        with Server(cluster) as server:
            go = shared_queue(
                FIFOQueue, comm.size, np.int64, [()],
                service=server.service, shared_name="go", task="/job:ps",
            )  # fmt: skip
            if cluster.job == "ps":
                with pytest.raises(DeadlineExceededError, match="tasks are still there"):
                    server.join(timeout=0.01)
                go.enqueue_many((np.arange(comm.size - 1),))
                server.join(timeout=20)
                assert go.size() == 0
            else:
                go.dequeue(timeout=20)
        server.close()
    with pytest.raises(ValueError, match="Server: timeout must be seconds > 0"):
        Server(cluster, timeout=-1 if comm.rank == 0 else 60)
