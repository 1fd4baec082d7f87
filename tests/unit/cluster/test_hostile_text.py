"""Whatever text comes from outside is read, or refused in words; never anything else."""

import json
import re
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as some

from strategies.cluster.device_spec import DeviceSpec
from strategies.cluster.resolvers import TFConfigClusterResolver
from strategies.cluster.slurm import expand_hostlist, expand_tasks_per_node
from strategies.cluster.spec import ClusterSpec

TEXT = some.text("abn01289[]-,():x*/ job task device cpu gpu:", max_size=24) | some.text(
    max_size=12
)
JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.text(max_size=5),
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.dictionaries(
            some.sampled_from(["cluster", "task", "type", "index", "worker", "ps", "1", ""]), inner
        )
    ),
    max_leaves=8,
)


@given(TEXT)
@settings(max_examples=300)
def test_lists_of_nodes_tasks_jobs_and_devices(text):
    for read in (
        expand_hostlist,
        expand_tasks_per_node,
        DeviceSpec.from_string,
        lambda t: ClusterSpec.from_text(t, 4),
    ):
        with suppress(ValueError):
            read(text)


@given(JSON)
@settings(max_examples=300)
def test_tf_config(config):
    with suppress(ValueError, TypeError):
        TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps(config)}).master()


PART = some.sampled_from(
    ["job:ps", "job:worker", "job:", "job", "job:ps:0", "replica:0", "task:12", "task:1a", "cpu:0",
     "CPU", "gpu:*", "gpu:", "device:Foo:3", "device:*:1", "device:GPU", ""]
)  # fmt: skip
WELL_FORMED = re.compile(
    r"(?:(?P<job>job:[a-z]+)|(?P<replica>replica:\d+)|(?P<task>task:\d+)"
    r"|(?P<device>device:(?:[A-Za-z]+|\*):(?:\d+|\*)|[cg]pu(?::(?:\d+|\*))?))",
    re.IGNORECASE | re.ASCII,
)


@given(some.lists(PART, min_size=1, max_size=5))
@settings(max_examples=500)
def test_a_device_has_well_formed_parts_and_the_last_of_each_kind_counts(parts):
    text = "/" + "/".join(parts)
    matches = [WELL_FORMED.fullmatch(part) for part in parts]
    things = [match.lastgroup for match in matches if match]
    good = text == "/" or (all(matches) and things.count("device") <= 1)
    try:
        spec = DeviceSpec.from_string(text)
    except ValueError:
        assert not good
    else:
        assert good
        assert DeviceSpec.from_string(str(spec)) == spec
        last = dict(zip(things, parts, strict=False))
        assert DeviceSpec.from_string("/".join(last.values())) == spec


NUMBER = some.none() | some.integers(0, 99)


@given(
    some.none() | some.from_regex(r"[A-Za-z]\w{0,5}", fullmatch=True).filter(str.isascii),
    NUMBER,
    NUMBER,
    some.sampled_from([None, "cpu", "GPU", "Foo"]),
    NUMBER,
)
def test_names_of_devices_come_back(job, replica, task, kind, index):
    spec = DeviceSpec(job, replica, task, kind, index)
    assert DeviceSpec.from_string(str(spec)) == spec
    assert DeviceSpec().make_merged_spec(spec) == spec == spec.make_merged_spec(DeviceSpec())
