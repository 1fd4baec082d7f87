"""Names of devices, and the blocks that say where things belong."""

import threading
from dataclasses import FrozenInstanceError

import pytest

from strategies.cluster.device_spec import DeviceSpec
from strategies.cluster.scopes import PlacementRequest, current_device, device, requested_device

parse = DeviceSpec.from_string


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", ""),
        ("/", ""),
        ("/job:foo", "/job:foo"),
        ("/job:foo/task:3", "/job:foo/task:3"),
        ("/task:3/job:foo", "/job:foo/task:3"),
        ("/job:foo/replica:1/task:3/device:GPU:2", "/job:foo/replica:1/task:3/device:GPU:2"),
        ("/gpu:2/task:3/replica:1/job:foo", "/job:foo/replica:1/task:3/device:GPU:2"),
        ("job:foo/cpu:0", "/job:foo/device:CPU:0"),
        ("cpu:0", "/device:CPU:0"),
        ("CPU:0", "/device:CPU:0"),
        ("/GPU", "/device:GPU:*"),
        ("/gpu:*", "/device:GPU:*"),
        ("/device:cpu:1", "/device:CPU:1"),
        ("/device:GPU:*", "/device:GPU:*"),
        ("/device:*:*", ""),
        ("/device:Foo:1", "/device:Foo:1"),
        ("/device:*:1", "/device:*:1"),
        ("/job:worker/job:ps", "/job:ps"),  # of jobs, replicas and tasks the last one counts
        ("/task:1/cpu:0/task:2", "/task:2/device:CPU:0"),
        ("/replica:1/job:a/replica:0/job:b/job:a", "/job:a/replica:0"),
    ],
)
def test_names_are_read_in_any_form_and_written_in_one(text, canonical):
    assert parse(text).to_string() == canonical
    assert parse(parse(text).to_string()) == parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/cpu:0/gpu:1", "more than one device, expected one, got '/cpu:0/gpu:1'"),
        ("/device:CPU:0/device:Foo:0", "more than one device"),
        ("/device:*:*/cpu:0", "more than one device"),
        ("/job:a:b/job:b", "not the name of a job, got 'a:b'"),
        ("/task:x/task:1", "got 'x'"),
        ("/job:pscpu:0/task:12/job:worker", "not the name of a job, got 'pscpu:0'"),
        ("/job:a/task:1/", "unknown attribute ''"),
        ("/gpu:", "expected a number >= 0 .* got ''"),
        ("/task:" + "9" * 5000, "at most 18 digits"),
        ("/moon:1", "unknown attribute 'moon'"),
        ("/job:", r"not the name of a job, got '' \(device: /job:\)"),
        ("job", "not the name of a job, got ''"),
        ("//", "unknown attribute ''"),
        ("/job:a//task:1", "unknown attribute ''"),
        ("/job:j/task:bar", "expected a number >= 0 .* got 'bar'"),
        ("/replica:x", "got 'x'"),
        ("/task:-1", "got '-1'"),
        ("/device:GPU", "expected device:TYPE:INDEX"),
        ("/device:GPU:x", "got 'x'"),
        ("/gpu:1:2", "got '1:2'"),
        ("/job:a b", "not the name of a job"),
        ("/task:٣", "got '٣'"),
    ],
)
def test_what_is_no_name_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_another_type_is_refused():
    with pytest.raises(TypeError, match="expected a text"):
        parse(None)
    for wrong in ({"task": -1}, {"device_index": "0"}, {"job": "a/b"}, {"task": True}):
        with pytest.raises(ValueError, match="DeviceSpec: "):
            DeviceSpec(**wrong)


def test_a_spec_does_not_change_and_can_be_a_key():
    spec = DeviceSpec("worker", 0, 8, "gpu", 3)
    assert spec.to_string() == "/job:worker/replica:0/task:8/device:GPU:3"
    with pytest.raises(FrozenInstanceError):
        spec.job = "ps"
    assert {spec: 1}[parse(str(spec))] == 1
    assert spec.replace(job="ps", device_index=None).to_string() == (
        "/job:ps/replica:0/task:8/device:GPU:*"
    )
    assert spec.replace(task=None, replica=None).to_string() == "/job:worker/device:GPU:3"
    assert not hasattr(spec, "merge_from")


def test_merging_keeps_what_the_other_does_not_say():
    spec = DeviceSpec(device_type="GPU", device_index=0)
    steps = [("/job:worker", "/job:worker/device:GPU:0"), ("/cpu:0", "/job:worker/device:CPU:0"),
             ("/job:ps", "/job:ps/device:CPU:0")]  # fmt: skip
    for other, expected in steps:
        spec = spec.make_merged_spec(parse(other))
        assert spec.to_string() == expected
    # Type and index are apart.
    assert parse("/gpu:1").make_merged_spec(parse("/cpu")).to_string() == "/device:CPU:1"


def place(device_="", **facts):
    return requested_device(PlacementRequest("v", "Variable", device_, **facts)).to_string()


def test_blocks_add_to_each_other_and_the_inner_one_counts():
    assert current_device() == ""
    with device("/job:worker/task:1/gpu:0"):
        with device("/cpu:1"), device(DeviceSpec(task=2)):
            assert current_device() == "/job:worker/task:2/device:CPU:1"
            assert place() == current_device()
            assert place("/task:3") == "/job:worker/task:3/device:CPU:1"
        assert current_device() == "/job:worker/task:1/device:GPU:0"
        with device(None):
            assert current_device() == place() == ""
            with device("/task:4"):
                assert place() == "/task:4"
        with pytest.raises(KeyError), device("/task:7"):
            raise KeyError
        assert place() == "/job:worker/task:1/device:GPU:0"
    assert current_device() == ""


def test_device_functions_stand_for_what_is_inside_and_are_filled_from_outside():
    seen = []

    def function(thing):
        seen.append((thing.name, thing.type, thing.device))
        return "/task:5"

    with device("/job:ps/task:1/cpu:0"), device(function), device("/gpu:3"):
        assert place("/task:9") == "/job:ps/task:5/device:CPU:0"
        assert current_device() == "/job:ps/task:1/device:GPU:3"
    assert seen == [("v", "Variable", "/task:9/device:GPU:3")]
    with device(lambda thing: ""), device("/gpu:3"):
        assert place() == ""
    for wrong in (None, 3):
        with (
            device(lambda thing, wrong=wrong: wrong),
            pytest.raises(TypeError, match="returns text"),
        ):
            place()
    with device(lambda thing: "/moon:1"), pytest.raises(ValueError, match="unknown attribute"):
        place()


def test_wrong_blocks_are_refused_when_they_are_entered():
    with pytest.raises(ValueError, match="unknown attribute"), device("/moon:1"):
        pass
    with pytest.raises(TypeError, match="expected a name, a function or None"), device(3):
        pass
    assert current_device() == ""


def test_blocks_are_each_threads_own():
    found = []
    with device("/task:1"):
        thread = threading.Thread(target=lambda: found.append(current_device()))
        thread.start()
        thread.join(20)
    assert found == [""]


def test_the_size_of_a_value():
    assert PlacementRequest("v", "Variable", "", (3, 4), "float32").nbytes == 48
    for shape, dtype in ((None, "float32"), ((None, 2), "float32"), ((2,), None)):
        with pytest.raises(ValueError, match="expected a known shape and dtype"):
            _ = PlacementRequest("v", "Variable", "", shape, dtype).nbytes
