"""The placer's rules, and device functions that spread variables over ps tasks."""

import logging

import pytest

from strategies.cluster.device_setter import (
    GreedyLoadBalancing,
    RandomChoice,
    RoundRobin,
    replica_device_setter,
)
from strategies.cluster.placement import Placer, devices_of
from strategies.cluster.scopes import PlacementRequest, device, requested_device
from strategies.errors import InvalidArgumentError

VARIABLE = PlacementRequest("v", "Variable")
FUNCTION = PlacementRequest("f", "Function", device_types=("GPU", "CPU"))

TASKS = {
    ("ps", 0): devices_of(1),
    ("ps", 1): devices_of(1),
    ("worker", 0): devices_of(2, 1),
    ("worker", 2): devices_of(2, 2),
}


def place(thing, wish, **options):
    with device(wish):
        return Placer(TASKS, **options).place(thing).to_string()


@pytest.mark.parametrize(
    ("wish", "variable", "function"),
    [
        ("", "worker/replica:0/task:0/device:CPU:0", "worker/replica:0/task:0/device:GPU:0"),
        ("/cpu:1", "worker/replica:0/task:0/device:CPU:1", "worker/replica:0/task:0/device:CPU:1"),
        ("/job:ps", "ps/replica:0/task:0/device:CPU:0", "ps/replica:0/task:0/device:CPU:0"),
        ("/job:ps/task:1", "ps/replica:0/task:1/device:CPU:0", "ps/replica:0/task:1/device:CPU:0"),
        ("/task:2", "worker/replica:0/task:2/device:CPU:0", "worker/replica:0/task:2/device:GPU:0"),
        ("/task:2/cpu", "worker/replica:0/task:2/device:CPU:0",
         "worker/replica:0/task:2/device:CPU:0"),
        ("/replica:0/task:2", "worker/replica:0/task:2/device:CPU:0",
         "worker/replica:0/task:2/device:GPU:0"),
    ],
)  # fmt: skip
def test_what_is_left_open_is_filled_by_the_rules(wish, variable, function):
    assert place(VARIABLE, wish) == f"/job:{variable}"
    assert place(FUNCTION, wish) == f"/job:{function}"


def test_the_default_task_is_the_chief_else_the_first_worker_else_the_first():
    def default(*tasks):
        return Placer({task: devices_of() for task in tasks}).default

    assert default(("chief", 0), ("evaluator", 0), ("ps", 0), ("worker", 0)) == ("chief", 0)
    assert default(("evaluator", 0), ("ps", 0), ("worker", 1), ("worker", 3)) == ("worker", 1)
    assert default(("ps", 0), ("ps", 1)) == ("ps", 0)
    only_ps = Placer({("ps", i): devices_of() for i in range(2)})
    with device("/task:1"):
        assert only_ps.place(VARIABLE).job == "ps"


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(
    "wish", ["/job:moon", "/job:ps/task:2", "/task:1", "/replica:1", "/job:moon/task:0/cpu:0"]
)
def test_an_unknown_job_or_task_is_an_error_also_with_soft_placement(wish, soft):
    with pytest.raises(InvalidArgumentError, match="Variable 'v', expected one of /job:ps/task:0"):
        place(VARIABLE, wish, soft_placement=soft)


@pytest.mark.parametrize("wish", ["/gpu:0", "/cpu:2", "/device:Foo:0"])
def test_a_device_that_is_not_there_is_an_error_unless_placement_is_soft(wish):
    with pytest.raises(InvalidArgumentError, match="expected one of /device:CPU:0, .*CPU:1, got"):
        place(VARIABLE, wish)
    soft = place(VARIABLE, f"/task:2{wish}", soft_placement=True)
    assert soft == "/job:worker/replica:0/task:2/device:CPU:0"
    assert place(FUNCTION, "/gpu:7", soft_placement=True).endswith("/device:GPU:0")
    with pytest.raises(InvalidArgumentError, match="expected one of /device:GPU:0, /device:CPU:0"):
        place(FUNCTION, "/gpu:1")


def test_placement_is_logged_on_request(caplog):
    caplog.set_level(logging.INFO)
    place(VARIABLE, "/job:ps", log_device_placement=True)
    assert caplog.messages == ["v: (Variable): /job:ps/replica:0/task:0/device:CPU:0"]
    caplog.clear()
    place(VARIABLE, "/job:ps")
    assert caplog.messages == []


def test_devices_are_listed_in_full():
    names = [device.to_string() for device in Placer({("ps", 1): devices_of(2, 1)}).devices()]
    assert names == [f"/job:ps/replica:0/task:1/device:{d}" for d in ("CPU:0", "CPU:1", "GPU:0")]


# replica_device_setter.

CLUSTER = {"sun": ["s0:1", "s1:1", "s2:1"], "moon": ["m0:1", "m1:1"], "ps": ["p0:1", "p1:1"]}


def where(setter, *things):
    """Return devices of things, each a type and the name of a block inside the setter's."""
    found = []
    for kind, inner in things:
        with device(setter), device(inner):
            found.append(requested_device(PlacementRequest(f"n{len(found)}", kind)).to_string())
    return found


def test_variables_take_turns_and_the_rest_goes_to_the_workers():
    setter = replica_device_setter(2)
    assert where(setter, ("Variable", ""), ("FIFOQueue", ""), ("Variable", ""), ("Add", "")) == [
        "/job:ps/task:0", "/job:worker", "/job:ps/task:1", "/job:worker",
    ]  # fmt: skip
    assert where(setter, ("accumulator", "")) == ["/job:ps/task:0"]


@pytest.mark.parametrize("cluster", [CLUSTER])
def test_a_cluster_counts_the_tasks(cluster):
    setter = replica_device_setter(7, ps_device="/job:sun", cluster=cluster)
    variables = [("Variable", "")] * 4
    assert where(setter, *variables) == [f"/job:sun/task:{i}" for i in (0, 1, 2, 0)]
    with pytest.raises(ValueError, match="no such job"):
        replica_device_setter(ps_device="/job:mars", cluster=cluster)


def test_inner_devices_are_kept():
    setter = replica_device_setter(2)
    assert where(setter, ("Variable", "/cpu:0"), ("Variable", ""), ("Add", "/cpu:0")) == [
        "/job:ps/task:0/device:CPU:0", "/job:ps/task:1", "/job:worker/device:CPU:0",
    ]  # fmt: skip
    setter = replica_device_setter(2)
    pinned = [("Variable", "/job:moon"), ("Variable", "/job:ps"), ("Add", "/job:ps")]
    assert where(setter, *pinned) == [
        "/job:moon", "/job:ps/task:0", "/job:ps",
    ]  # fmt: skip
    setter = replica_device_setter(2, ps_device="/cpu:0")
    assert where(setter, ("Variable", ""), ("Variable", "/job:moon"), ("Add", "")) == [
        "/device:CPU:0", "/job:moon/device:CPU:0", "/job:worker",
    ]  # fmt: skip


def test_without_merging_any_inner_device_is_all():
    setter = replica_device_setter(2, merge_devices=False)
    things = [("Variable", ""), ("Variable", "/job:ps"), ("Variable", ""), ("Add", "")]
    assert where(setter, *things) == [
        "/job:ps/task:0", "/job:ps", "/job:ps/task:1", "/job:worker",
    ]  # fmt: skip


def test_no_ps_tasks_no_constraint():
    assert replica_device_setter(0) is None
    assert replica_device_setter(cluster={"ps": [], "worker": ["w:1"]}) is None
    with device(replica_device_setter(0)):
        assert requested_device(VARIABLE).to_string() == ""


def test_other_types_and_other_choices():
    setter = replica_device_setter(3, ps_types={"FIFOQueue"}, choice=lambda thing: 2)
    assert where(setter, ("FIFOQueue", ""), ("Variable", "")) == ["/job:ps/task:2", "/job:worker"]
    with pytest.raises(TypeError, match="choice must be a function"):
        replica_device_setter(1, choice=3)


SHAPES = [(2, 2), (2, 1), (2, 2), (1, 3)]


@pytest.mark.parametrize(
    ("load", "tasks"), [((), [0, 1, 1, 0]), ((lambda thing: 1,), [0, 1, 0, 1])]
)
def test_greedy_choice_takes_the_least_loaded_task(load, tasks):
    choose = GreedyLoadBalancing(2, *load)
    things = [PlacementRequest(f"v{i}", "Variable", "", s, "float32") for i, s in enumerate(SHAPES)]
    assert [choose(thing) for thing in things] == tasks
    if not load:
        with pytest.raises(ValueError, match="known shape"):
            choose(VARIABLE)


def test_random_choice_depends_on_name_and_seed_alone():
    names = [f"v{i}" for i in range(200)]

    def choices(seed):
        return [RandomChoice(4, seed)(PlacementRequest(name, "Variable")) for name in names]

    assert choices(1) == choices(1) != choices(2)
    assert all(25 < choices(1).count(task) < 80 for task in range(4))


def test_choices_need_a_task():
    for make in (RoundRobin, RandomChoice, GreedyLoadBalancing):
        with pytest.raises(ValueError, match="expected an integer >= 1, got 0"):
            make(0)
