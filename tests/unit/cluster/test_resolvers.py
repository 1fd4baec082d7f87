"""Where specifications come from: given, the environment, unions, Slurm."""

import json

import pytest

import inprocess
from strategies.cluster.cluster import Cluster
from strategies.cluster.resolvers import (
    RanksClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
    from_environment,
)
from strategies.cluster.slurm import SlurmClusterResolver, expand_hostlist, expand_tasks_per_node
from strategies.cluster.spec import ClusterSpec

PS = ClusterSpec({"ps": ["ps0:1", "ps1:1"], "worker": ["w0:1"]})


def simple(tasks, **options):
    return SimpleClusterResolver(ClusterSpec(tasks), **options)


def config(**parts):
    return {"TF_CONFIG": json.dumps(parts)}


def test_a_given_specification():
    resolver = SimpleClusterResolver(PS, "here:1", task_type="ps", task_id=1)
    assert resolver.cluster_spec() is PS
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert resolver.master() == "here:1"
    assert resolver.master("ps", 0) == "ps0:1"
    with pytest.raises(TypeError, match="expected a ClusterSpec"):
        SimpleClusterResolver(PS.as_dict())
    with pytest.raises(TypeError, match="master must be text"):
        SimpleClusterResolver(PS, 1)


def test_ranks_are_workers_unless_the_environment_divides_them():
    assert RanksClusterResolver(2, environ={}).cluster_spec() == ClusterSpec.from_ranks(2)
    divided = RanksClusterResolver(4, environ={"UNISONO_CLUSTER": "ps:2,worker:*"})
    assert divided.cluster_spec() == ClusterSpec.from_ranks(4, ps=2)
    assert divided.task_type is None
    assert divided.master() == ""
    with pytest.raises(ValueError, match="UNISONO_CLUSTER: .* got 'two'"):
        RanksClusterResolver(4, environ={"UNISONO_CLUSTER": "two"}).cluster_spec()


def test_tf_config():
    cluster = {"ps": ["ps0:1", "ps1:1"], "worker": ["w0:1"]}
    environ = config(cluster=cluster, task={"type": "ps", "index": "1"}, rpc_layer="grpc")
    resolver = TFConfigClusterResolver(environ=environ)
    assert resolver.cluster_spec() == PS
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert resolver.master() == "grpc://ps1:1"
    assert resolver.master("worker", 0) == "grpc://w0:1"
    other = TFConfigClusterResolver("worker", 0, "mpi", environ=environ)
    assert (other.task_type, other.task_id, other.master()) == ("worker", 0, "mpi://w0:1")
    assert TFConfigClusterResolver(environ=config(session_master="s:1")).master() == "s:1"
    alone = config(cluster={"worker": ["w0:1"]}, task={"type": "worker", "index": 0})
    assert TFConfigClusterResolver(environ=alone).master() == ""


def test_without_tf_config_there_is_no_cluster():
    for environ in ({}, {"TF_CONFIG": "  "}, config()):
        resolver = TFConfigClusterResolver(environ=environ)
        assert not resolver.cluster_spec()
        assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"cluster": 3}', '{"task": []}', '{"task": {"index": "x"}}', '{"rpc_layer": 1}',
     '{"task": {"index": -1}}'],
)  # fmt: skip
def test_a_damaged_tf_config_is_refused(text):
    with pytest.raises(ValueError, match="TF_CONFIG: "):
        TFConfigClusterResolver(environ={"TF_CONFIG": text})


def test_the_environment_is_asked_in_order():
    both = {**config(cluster={"worker": ["w0:1"]}), "UNISONO_CLUSTER": "ps:1,worker:*"}
    assert from_environment(2, environ=both).cluster_spec() == ClusterSpec.from_ranks(2, ps=1)
    del both["UNISONO_CLUSTER"]
    assert from_environment(2, environ=both).cluster_spec() == ClusterSpec({"worker": ["w0:1"]})
    assert from_environment(2, environ={}).cluster_spec() == ClusterSpec.from_ranks(2)


def test_a_union_appends_dense_jobs_and_joins_sparse_ones():
    first = simple({"worker": ["a:1"], "ps": ["p:1"]}, master="m", task_type="ps", task_id=0)
    union = UnionResolver(first, simple({"worker": ["b:1"]}))
    assert union.cluster_spec() == ClusterSpec({"ps": ["p:1"], "worker": ["a:1", "b:1"]})
    assert (union.task_type, union.task_id, union.master()) == ("ps", 0, "m")
    assert union.master("worker", 1) == "b:1"
    sparse = UnionResolver(simple({"worker": {1: "a:1"}}), simple({"worker": {3: "b:1"}}))
    assert sparse.cluster_spec() == ClusterSpec({"worker": {1: "a:1", 3: "b:1"}})
    mixed = UnionResolver(simple({"worker": ["a:1"]}), simple({"worker": {3: "b:1"}}))
    assert mixed.cluster_spec() == ClusterSpec({"worker": {0: "a:1", 3: "b:1"}})
    with pytest.raises(KeyError, match="got 1"):
        UnionResolver(simple({"w": {1: "a:1"}}), simple({"w": {1: "b:1"}})).cluster_spec()
    with pytest.raises(ValueError, match="got none"):
        UnionResolver()
    with pytest.raises(TypeError, match="expected resolvers"):
        UnionResolver(first, PS)


# Slurm.


def step(rank, size, nodes, tasks, **more):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        **more,
    }


@pytest.fixture(autouse=True)
def no_devices(monkeypatch, tmp_path):
    monkeypatch.setattr("collectives.core.visible_gpus._DEVICES", tmp_path)


def test_lists_of_nodes():
    assert expand_hostlist("n1") == ["n1"]
    assert expand_hostlist("n[1-2],m5,o[3-4,6,7-9]") == [
        "n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9",
    ]  # fmt: skip
    assert expand_hostlist("n[0001-0003],m5") == ["n0001", "n0002", "n0003", "m5"]
    assert expand_hostlist("rack[0-1]n[8-9]-ib") == [
        "rack0n8-ib", "rack0n9-ib", "rack1n8-ib", "rack1n9-ib",
    ]  # fmt: skip
    assert expand_hostlist("n[9-10]") == ["n9", "n10"]


@pytest.mark.parametrize(
    "text",
    ["", " ", "n[1-2", "n]1[", "n[]", "n[2-1]", "n[a-b]", "n[1-2-3]", "n[1,]", ",", "a,,b", "a,",
     "n[1-99999999]", "n[[1]]", "n[1-2000]m[1-2000]"],
)  # fmt: skip
def test_bad_lists_of_nodes_are_refused(text):
    with pytest.raises(ValueError, match="expand_hostlist|at most"):
        expand_hostlist(text)


def test_numbers_of_tasks():
    assert expand_tasks_per_node("3(x2),2,11(x4)") == [3, 3, 2, 11, 11, 11, 11]
    for wrong in ("", "x", "3(2)", "3(x)", "3,", "1(x99999999)"):
        with pytest.raises(ValueError, match="expand_tasks_per_node|at most"):
            expand_tasks_per_node(wrong)


def test_a_step_of_workers_and_one_with_a_ps():
    resolver = SlurmClusterResolver(environ=step(1, 3, "t02n13,t02n41,t02n43", "1(x3)"))
    hosts = ["t02n13:8888", "t02n41:8888", "t02n43:8888"]
    assert resolver.cluster_spec() == ClusterSpec({"worker": hosts})
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "grpc://t02n13:8888"
    assert resolver.master("worker", 2) == "grpc://t02n43:8888"
    assert resolver.num_accelerators() == {"GPU": 0}
    environ = step(0, 3, "t02n13,t02n41,t02n43", "1(x3)")
    resolver = SlurmClusterResolver({"worker": 2, "ps": 1}, environ=environ)
    assert resolver.cluster_spec() == ClusterSpec({"ps": hosts[:1], "worker": hosts[1:]})
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)


@pytest.mark.parametrize(("per_node", "per_task", "own"), [(2, 1, "1"), (4, 2, "2,3")])
def test_different_numbers_of_tasks_and_gpus(per_node, per_task, own):
    environ = step(1, 5, "t02n[13,41,43]", "2(x2),1")
    resolver = SlurmClusterResolver(
        {"ps": 1, "worker": 4}, gpus_per_node=per_node, gpus_per_task=per_task, environ=environ
    )
    assert resolver.cluster_spec() == ClusterSpec(
        {
            "ps": ["t02n13:8888"],
            "worker": ["t02n13:8889", "t02n41:8888", "t02n41:8889", "t02n43:8888"],
        }
    )
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert environ["CUDA_VISIBLE_DEVICES"] == own
    assert resolver.num_accelerators() == {"GPU": per_task}


def test_gpus_that_slurm_has_given_are_divided():
    environ = step(3, 4, "a,b", "2(x2)", CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert SlurmClusterResolver(environ=environ).num_accelerators() == {"GPU": 2}
    assert environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    environ = step(3, 4, "a,b", "2(x2)", CUDA_VISIBLE_DEVICES="GPU-8a")
    SlurmClusterResolver(environ=environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-8a"
    environ = step(3, 4, "a,b", "2(x2)", CUDA_VISIBLE_DEVICES="4,5")
    SlurmClusterResolver(environ=environ, auto_set_gpu=False)
    assert environ["CUDA_VISIBLE_DEVICES"] == "4,5"


@pytest.mark.parametrize(
    ("visible", "on_node", "options", "own"),
    [
        ("0", "4", {}, "0"),
        ("2", "4", {}, "2"),
        ("0", "4", {"gpus_per_task": 1}, "0"),
        ("0", "4", {"gpus_per_node": 4}, "0"),
        ("0", None, {"gpus_per_node": 4}, "0"),
        ("4,5", "8", {}, "4,5"),
        ("4,5", "8", {"gpus_per_task": 1}, "4"),
        ("0,1,2,3", "4", {}, "2"),  # not bound, as with --gpu-bind=none
        ("0", "1", {}, ""),  # one for four tasks
    ],
)
def test_gpus_that_slurm_binds_to_tasks_stay_theirs(visible, on_node, options, own):
    facts = {"CUDA_VISIBLE_DEVICES": visible}
    if on_node is not None:
        facts["SLURM_GPUS_ON_NODE"] = on_node
    environ = step(2, 4, "a", "4", **facts)
    for _ in range(2):  # also after the first one has set the variable
        resolver = SlurmClusterResolver(environ=environ, **options)
        assert resolver.num_accelerators() == {"GPU": len(own.split(",")) if own else 0}
        assert environ["CUDA_VISIBLE_DEVICES"] == (own or visible)


def test_tasks_per_node_can_be_said():
    base = step(2, 3, "a,b", "")
    for given in (2, [2, 1], {"a": 2, "b": 1}):
        resolver = SlurmClusterResolver(tasks_per_node=given, environ=dict(base))
        assert resolver.cluster_spec() == ClusterSpec({"worker": ["a:8888", "a:8889", "b:8888"]})


def test_ranks_that_go_around_the_nodes():
    environ = step(2, 5, "n[1-3]", "2(x2),1", SLURM_DISTRIBUTION="cyclic:block")
    resolver = SlurmClusterResolver({"ps": 2, "worker": 3}, gpus_per_node=2, environ=environ)
    assert resolver.cluster_spec() == ClusterSpec(
        {"ps": ["n1:8888", "n2:8888"], "worker": ["n3:8888", "n1:8889", "n2:8889"]}
    )
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert environ["CUDA_VISIBLE_DEVICES"] == "0"
    for name in ("plane", "arbitrary"):
        with pytest.raises(RuntimeError, match=f"block or cyclic, got {name}"):
            SlurmClusterResolver(environ={**environ, "SLURM_DISTRIBUTION": name})


@inprocess.on_ranks(3)
def test_what_mpi_knows_counts_for_ranks_of_mpirun(comm):
    environ = {
        "SLURMD_NODENAME": ("n1", "n2", "n1")[comm.rank], "OMPI_COMM_WORLD_SIZE": "3",
        "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1",  # of mpirun's own daemon
            "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4",
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="started by mpirun, which Slurm does not know"):
        SlurmClusterResolver(environ=environ)
    resolver = SlurmClusterResolver({"ps": 1, "worker": 2}, comm=comm, environ=environ)
    assert resolver.cluster_spec() == ClusterSpec(
        {"ps": ["n1:8888"], "worker": ["n2:8888", "n1:8889"]}
    )
    task = (resolver.task_type, resolver.task_id)
    assert task == (("ps", 0), ("worker", 0), ("worker", 1))[comm.rank]
    assert environ["CUDA_VISIBLE_DEVICES"] == ("0", "0", "1")[comm.rank]
    with Cluster(resolver, comm) as cluster:
        assert (cluster.job, cluster.task_index) == task
    with pytest.raises(RuntimeError, match="more GPUs per node than available"):
        SlurmClusterResolver(
            comm=comm, environ=environ, gpus_per_task=3 if comm.rank == 1 else None
        )


def test_what_is_missing_or_too_much_is_an_error():
    good = step(0, 2, "a", "2")
    for name in good:
        environ = {key: value for key, value in good.items() if key != name}
        with pytest.raises(RuntimeError, match=f"{name} is not set"):
            SlurmClusterResolver(environ=environ)
    with pytest.raises(RuntimeError, match="requested 3 tasks but only 2 were assigned"):
        SlurmClusterResolver({"worker": 3}, environ=good)
    with pytest.raises(RuntimeError, match="requested 1 tasks of the 2 that were assigned"):
        SlurmClusterResolver({"worker": 1}, environ=good)
    with pytest.raises(RuntimeError, match="more GPUs per node than available, expected at most 2"):
        SlurmClusterResolver(gpus_per_node=2, gpus_per_task=2, environ=good)
    bound = {**good, "CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "2"}
    with pytest.raises(RuntimeError, match="at most 1, got 2 for each of 1 tasks"):
        SlurmClusterResolver(gpus_per_task=2, environ=bound)
    with pytest.raises(ValueError, match="SLURM_GPUS_ON_NODE must be a number >= 0, got 'x'"):
        SlurmClusterResolver(environ={**bound, "SLURM_GPUS_ON_NODE": "x"})
    with pytest.raises(RuntimeError, match="for each of 1 nodes"):
        SlurmClusterResolver(tasks_per_node=[1, 1], environ=good)
    with pytest.raises(RuntimeError, match="places for all tasks of the step, 2, got 1"):
        SlurmClusterResolver(tasks_per_node=1, environ=good)
    with pytest.raises(RuntimeError, match="rank 2"):
        SlurmClusterResolver(environ={**good, "SLURM_PROCID": "2"})
    with pytest.raises(ValueError, match="SLURM_PROCID must be a number >= 0, got '-1'"):
        SlurmClusterResolver(environ={**good, "SLURM_PROCID": "-1"})
