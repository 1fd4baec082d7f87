"""Cluster specifications, and the roles of their jobs."""

import pytest

from strategies.cluster.cluster import Cluster
from strategies.cluster.resolvers import SimpleClusterResolver
from strategies.cluster.spec import ClusterSpec

DENSE = {"ps": ["ps0:1", "ps1:1"], "worker": ["w0:1", "w1:1", "w2:1"]}
SPARSE = {"ps": ["ps0:1"], "worker": {3: "w3:1", 1: "w1:1"}}


def test_a_dense_cluster_says_what_it_was_made_of():
    spec = ClusterSpec(DENSE)
    assert spec.jobs == ["ps", "worker"]
    assert [spec.num_tasks(job) for job in spec.jobs] == [2, 3]
    assert spec.task_indices("worker") == [0, 1, 2]
    assert spec.task_address("ps", 1) == "ps1:1"
    assert spec.job_tasks("ps") == DENSE["ps"]
    assert spec.as_dict() == DENSE
    assert spec.tasks()[2:] == [("worker", 0), ("worker", 1), ("worker", 2)]
    assert str(ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})) == (
        "ClusterSpec({'ps': ['c:1'], 'worker': ['a:1', 'b:1']})"
    )


def test_a_sparse_job_keeps_its_indices():
    spec = ClusterSpec(SPARSE)
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "w1:1", None, "w3:1"]
    assert spec.as_dict() == SPARSE
    assert ClusterSpec({"worker": {"1": "w1:1"}}) == ClusterSpec({"worker": {1: "w1:1"}})
    assert ClusterSpec({"worker": {1: "b", 0: "a"}}).as_dict() == {"worker": ["a", "b"]}


def test_equality_is_by_content():
    spec = ClusterSpec(DENSE)
    assert spec == ClusterSpec(spec) == ClusterSpec(dict(reversed(DENSE.items())))
    assert hash(spec) == hash(ClusterSpec(DENSE))
    assert spec == ClusterSpec({job: dict(enumerate(tasks)) for job, tasks in DENSE.items()})
    assert spec != ClusterSpec(SPARSE)
    assert spec != ClusterSpec({**DENSE, "ps": ["ps0:2", "ps1:1"]})
    assert spec != DENSE


def test_a_cluster_without_tasks_is_false():
    assert ClusterSpec(DENSE)
    for empty in ({}, {"worker": []}):
        assert not ClusterSpec(empty)
        assert ClusterSpec(empty).as_dict() == empty
    assert ClusterSpec({"worker": []}).job_tasks("worker") == []


@pytest.mark.parametrize(
    "wrong",
    [
        None, "worker", ["w0:1"], {"worker": "w0:1"}, {"worker": 3}, {"worker": [1]},
        {"worker": {"one": "w0:1"}}, {"worker": {None: "w0:1"}}, {"worker": {0.5: "w0:1"}},
        {1: ["w0:1"]},
    ],
)  # fmt: skip
def test_another_type_is_refused(wrong):
    with pytest.raises(TypeError):
        ClusterSpec(wrong)


@pytest.mark.parametrize(
    "wrong", [{"a/b": ["w0:1"]}, {"": []}, {"w": {-1: "w0:1"}}, {"w": {1: "a", "1": "b"}}]
)
def test_a_name_or_index_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="ClusterSpec: "):
        ClusterSpec(wrong)


def test_unknown_jobs_and_tasks_are_named():
    spec = ClusterSpec(SPARSE)
    for ask in (
        lambda: spec.num_tasks("moon"),
        lambda: spec.task_indices("moon"),
        lambda: spec.job_tasks("moon"),
        lambda: spec.task_address("moon", 0),
    ):
        with pytest.raises(ValueError, match="no such job in cluster, expected .* got 'moon'"):
            ask()
    with pytest.raises(
        ValueError, match="no such task of job 'worker', expected one of 1 3, got 0"
    ):
        spec.task_address("worker", 0)


def test_ranks_are_divided_in_alphabetical_order():
    spec = ClusterSpec.from_ranks(7, ps=2, chief=1, evaluator=1)
    assert [f"{job}:{index}" for job, index in spec.tasks()] == [
        "chief:0", "evaluator:0", "ps:0", "ps:1", "worker:0", "worker:1", "worker:2",
    ]  # fmt: skip
    assert spec.task_address("worker", 2) == "rank:6"
    assert ClusterSpec.from_text("worker:*, ps:2,chief:1,evaluator:1", 7) == spec
    assert ClusterSpec.from_text("worker:2,ps:*", 5) == ClusterSpec.from_ranks(5, worker=2, ps=3)
    assert ClusterSpec.from_text("ps:3", 3).jobs == ["ps"]
    assert ClusterSpec.from_ranks(2, ps=2).num_tasks("worker") == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ps",
        "ps:",
        "ps:-1",
        "ps:x",
        "ps:1,ps:1",
        "ps:*,worker:*",
        "ps:*,ps:1",
        "ps:1,",
        "p s!:4",
    ],
)
def test_text_that_is_no_list_of_jobs_is_refused(text):
    with pytest.raises(ValueError, match="from_text|name of a job"):
        ClusterSpec.from_text(text, 4)


def test_more_or_fewer_ranks_than_tasks_are_an_error():
    for text in ("ps:5,worker:*", "ps:1,worker:2", "ps:5"):
        with pytest.raises(ValueError, match="expected . ranks for .*, got 4"):
            ClusterSpec.from_text(text, 4)
    with pytest.raises(ValueError, match="bad number of ps"):
        ClusterSpec.from_ranks(4, ps=-1)


# Roles.

ALONE = {"worker": ["rank:0"]}


def test_the_jobs_of_a_cluster_have_roles():
    for spec in (ALONE, ClusterSpec(ALONE), SimpleClusterResolver(ClusterSpec(ALONE))):
        with Cluster(spec) as cluster:
            assert cluster.spec == ClusterSpec(ALONE)
    for wrong in ({"moon": ["m:1"]}, {"chief": ["a:1", "b:1"]}, {"evaluator": ["a:1", "b:1"]}):
        with pytest.raises(ValueError, match="cluster: (a job without|expected at most)"):
            Cluster(wrong)


def test_a_task_is_one_of_its_cluster():
    spec = ClusterSpec(ALONE)
    with Cluster(SimpleClusterResolver(spec, task_type="worker", task_id=0)) as cluster:
        assert (cluster.job, cluster.task_index) == ("worker", 0)
    for job, index in (("worker", 2), ("moon", 0), (None, 0), ("worker", None)):
        with pytest.raises(ValueError, match="cluster: "):
            Cluster(SimpleClusterResolver(spec, task_type=job, task_id=index))
