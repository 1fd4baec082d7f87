"""Things are saved as they are, and come back with the same bits."""

from __future__ import annotations

import collections
import copy
import json
import math
import random
from typing import NamedTuple

import numpy as np
import pytest

import strategies
from requirements import installed
from strategies import errors
from strategies.checkpoint import Saver, checkpoint
from strategies.input import ShardedInput


def saver_of(path, **things):
    return Saver(strategies.CheckpointManager(path), **things)


class Pair(NamedTuple):
    weights: np.ndarray
    count: int


PLAIN = {
    "none": None,
    "numbers": [1, -2.5, True, 1 << 130, -0.0, 5e-324],
    "odd": (math.inf, -math.inf),
    "text": "größer",
    "bytes": b"\0\xff",
    "inner": {3: "three", (1, "a"): [], "": {}},
    "keys of NumPy": {np.int8(3): 3, np.float32(0.1): 4, (np.int64(1), np.str_("a")): 5},
}


def test_plain_values_come_back_as_they_were(tmp_path):
    saver_of(tmp_path, value=PLAIN, epoch=7, nan=math.nan).save(3)
    other = saver_of(tmp_path, value={}, epoch=0, nan=0.0)
    assert other.restore() == 3
    assert other["value"] == PLAIN
    assert math.copysign(1, other["value"]["numbers"][4]) == -1
    assert type(other["value"]["numbers"][2]) is bool
    assert type(other["value"]["odd"]) is tuple
    assert other["epoch"] == 7
    assert math.isnan(other["nan"])


def test_arrays_change_in_place_and_have_names_in_the_file(tmp_path):
    def tree(fill):
        return {"a": [np.full((2, 3), fill), Pair(np.full(2, fill, np.float16), int(fill))]}

    path = saver_of(tmp_path, model=tree(5.0), scalar=np.float32(0.1)).save(1)
    assert list(checkpoint.restore(path).tensors) == ["model/a/0", "model/a/1/weights", "scalar"]
    live = tree(0.0)
    other = saver_of(tmp_path, model=live, scalar=np.float32(0))
    assert other.restore() == 1
    assert (live["a"][0] == 5).all()
    assert other["model"]["a"][0] is live["a"][0]
    assert type(other["model"]["a"][1]) is Pair
    assert other["model"]["a"][1].count == 5
    assert type(other["scalar"]) is np.float32
    assert other["scalar"] == np.float32(0.1)


@pytest.mark.parametrize(
    "live",
    [
        collections.OrderedDict(b=0, a=0),
        collections.Counter(b=0, a=0),
        collections.defaultdict(list, b=0, a=0),
    ],
    ids=lambda live: type(live).__name__,
)
def test_a_dict_keeps_its_class(tmp_path, live):
    before, saved = str(live), copy.copy(live)
    saved["b"], saved["a"] = 2, 1
    saver_of(tmp_path, tree=[saved, np.ones(1)]).save(1)
    other = saver_of(tmp_path, tree=[live, np.zeros(1)])
    other.restore()
    assert str(other["tree"]) == str([saved, np.ones(1)])  # with the class and the factory
    assert str(live) == before


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64, np.random.Philox])
def test_generators_go_on_with_the_same_numbers(tmp_path, bits):
    def generators():
        return {"new": np.random.Generator(bits(1)), "old": np.random.RandomState(2),
                "python": random.Random(3)}  # fmt: skip

    def numbers(some):
        return (some["new"].normal(size=5).tolist(), some["old"].normal(size=5).tolist(),
                [some["python"].gauss(0, 1) for _ in range(5)])  # fmt: skip

    used, fresh = generators(), generators()
    used["new"].integers(7, dtype=np.int8)  # leaves a rest for the next one
    used["old"].normal()
    used["python"].gauss(0, 1)
    saver_of(tmp_path, rng=used, here=random).save(1)
    expected, here = numbers(used), random.random()
    saver_of(tmp_path, rng=fresh, here=random).restore()
    assert numbers(fresh) == expected
    assert random.random() == here


def trained(steps, variable, optimizer, rng):
    for _ in range(steps):
        optimizer.apply_gradients([(rng.normal(size=4) - variable.value, variable)])
    return variable.value.tobytes()


@pytest.mark.parametrize("kind", ["Adam", "Momentum", "SGD"])
def test_our_optimizers_and_variables_resume_with_the_same_bits(tmp_path, kind):
    def things():
        return {
            "model": {"w": strategies.Variable(np.ones(4), name="w")},
            "optimizer": getattr(strategies, kind)(0.1),
            "rng": np.random.default_rng(1),
        }

    def step(some, steps):
        return trained(steps, some["model"]["w"], some["optimizer"], some["rng"])

    whole = things()
    step(whole, 3)
    saver_of(tmp_path, **whole).save(3)
    parts = things()
    assert saver_of(tmp_path, **parts).restore() == 3
    assert step(parts, 4) == step(whole, 4)


def test_the_input_goes_on_inside_an_epoch(tmp_path):
    files = {name: [f"{name}{i}" for i in range(4)] for name in "abc"}

    def records():
        return ShardedInput(list(files), files.get, rank=0, size=1, seed=4, num_epochs=2)

    whole = records()
    for _ in range(15):
        next(whole)
    saver_of(tmp_path, input=whole).save(0)
    rest = list(whole)
    again = records()
    next(again)
    saver_of(tmp_path, input=again).restore()
    assert list(again) == rest
    assert len(rest) == 9


TORCH_OPTIMIZERS = {
    "SGD": lambda torch, groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda torch, groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "AdamW": lambda torch, groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "rate": lambda torch, groups: torch.optim.Adam(groups, lr=torch.tensor(0.01)),
}
TORCH_SCHEDULES = {
    "lambda": lambda of, optimizer: of.LambdaLR(optimizer, lambda step: 0.9**step),
    "steps": lambda of, optimizer: of.MultiStepLR(optimizer, [2, 2, 4]),
    "plateau": lambda of, optimizer: of.ReduceLROnPlateau(optimizer, patience=0),
    "chain": lambda of, optimizer: of.SequentialLR(
        optimizer,
        [of.ConstantLR(optimizer, 0.5, 3), of.CosineAnnealingLR(optimizer, 5)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize(
    ("kind", "schedule"), list(zip(TORCH_OPTIMIZERS, TORCH_SCHEDULES, strict=True))
)
def test_pytorch_resumes_with_the_same_bits(tmp_path, kind, schedule):
    torch = installed("torch")

    def things(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(),
            torch.nn.Linear(4, 1, dtype=torch.bfloat16),
        )  # fmt: skip
        groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.02}]
        optimizer = TORCH_OPTIMIZERS[kind](torch, groups)
        rng = {"dropout": torch.default_generator, "rows": torch.Generator().manual_seed(seed)}
        made = TORCH_SCHEDULES[schedule](torch.optim.lr_scheduler, optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": made, "rng": rng}

    def step(some, steps):
        for _ in range(steps):
            some["optimizer"].zero_grad()
            rows = torch.randn(8, 3, generator=some["rng"]["rows"])
            hidden = some["model"][:3](rows)
            loss = some["model"][3](hidden.bfloat16()).float().square().mean()
            loss.backward()
            some["optimizer"].step()
            some["schedule"].step(*([loss.item()] if schedule == "plateau" else []))
        return [tensor.clone() for tensor in some["model"].state_dict().values()]

    whole = things(1)
    step(whole, 3)
    path = saver_of(tmp_path, **whole).save(3)
    names = list(checkpoint.restore(path).tensors)
    assert "model/0.weight" in names
    if kind == "momentum":
        assert "optimizer/state/0/momentum_buffer" in names
    expected = step(whole, 4)
    parts = things(2)
    assert saver_of(tmp_path, **parts).restore() == 3
    if schedule == "steps":
        assert type(parts["schedule"].milestones) is collections.Counter
    for one, other in zip(step(parts, 4), expected, strict=True):
        assert torch.equal(one, other)
    assert parts["optimizer"].param_groups[1]["lr"] == whole["optimizer"].param_groups[1]["lr"]


def test_a_module_of_other_sizes_says_so_itself(tmp_path):
    torch = installed("torch")
    saver_of(tmp_path, model=torch.nn.Linear(3, 2)).save(1)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        saver_of(tmp_path, model=torch.nn.Linear(4, 2)).restore()


def test_jax_and_optax_resume_with_the_same_bits(tmp_path):
    jax, optax = installed("jax"), installed("optax")
    schedule = optax.exponential_decay(0.1, 2, 0.9)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    masked = optax.multi_transform({"a": adam, "b": optax.set_to_zero()}, {"w": "a", "b": "b"})

    def things(seed):
        params = {"w": jax.numpy.full(4, float(seed)), "b": jax.numpy.ones(2, jax.numpy.bfloat16)}
        return {"params": params, "state": masked.init(params), "key": jax.random.key(seed)}

    def step(params, state, key):
        for _ in range(4):
            key, now = jax.random.split(key)
            gradients = jax.tree.map(
                lambda x, now=now: jax.random.normal(now, x.shape, x.dtype), params
            )
            updates, state = masked.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return {"params": params, "state": state, "key": key}

    first = things(1)
    saver = saver_of(tmp_path, **first)
    half = step(**first)
    path = saver.save(4, **half)
    assert {"params/w", "params/b", "key"} <= checkpoint.restore(path).tensors.keys()
    other = saver_of(tmp_path, **things(2))
    assert other.restore() == 4
    found = {name: other[name] for name in half}
    assert jax.tree.structure(found) == jax.tree.structure(half)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    for one, two in zip(
        jax.tree.leaves(step(**found)["params"]),
        jax.tree.leaves(step(**half)["params"]),
        strict=True,
    ):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
    with pytest.raises(errors.InvalidArgumentError, match=r"random key.*name: key"):
        saver_of(
            tmp_path, key=jax.numpy.zeros(2, jax.numpy.uint32), params=first["params"]
        ).restore()


def test_part_of_a_checkpoint_is_enough(tmp_path):
    saver_of(tmp_path, model={"w": np.ones(2)}, optimizer=strategies.Adam(0.1), epoch=4).save(9)
    model = {"w": np.zeros(2)}
    assert saver_of(tmp_path, model=model).restore() == 9
    assert model["w"].tolist() == [1, 1]


def test_nothing_there_changes_nothing(tmp_path):
    assert saver_of(tmp_path, epoch=3).restore() is None


@pytest.mark.parametrize(
    ("live", "text"),
    [
        ({"w": np.zeros(3)}, r"expected \(3,\) of float64, got \(2,\) of float64 \(name: model/w"),
        ({"w": np.zeros(2, "f")}, r"of float32, got .* of float64 \(name: model/w\)"),
        ({"v": np.zeros(2)}, r"keys \['v'\], got keys \['w'\] \(name: model\)"),
        ([np.zeros(2)], r"list of 1, got dict with keys \['w'\]"),
        ({"w": 3.0}, r"float, got array \(name: model/w\)"),
    ],
)
def test_another_program_is_told_so_and_nothing_changes(tmp_path, live, text):
    saver_of(tmp_path, first=np.ones(1), model={"w": np.ones(2)}).save(1)
    first, before = np.zeros(1), copy.deepcopy(live)
    with pytest.raises(errors.InvalidArgumentError, match=text):
        saver_of(tmp_path, first=first, model=live).restore()
    assert first == 0
    assert str(live) == str(before)
    with pytest.raises(errors.NotFoundError, match="does not hold 'second', got first, model"):
        saver_of(tmp_path, first=first, second=0).restore()


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        ({"a": [{1, 2}]}, r"got set \(name: model/a/0\)"),
        (lambda: 0, "got function"),
        ({1: np.ones(1), "1": np.ones(1)}, "two arrays have the same name.*model/1"),
        (np.array([object()]), "unsupported array"),
        (1j, "got complex"),
        ({np.longdouble(1): 1}, r"unsupported key, .* got longdouble \(name: model\)"),
    ],
)
def test_what_no_file_can_hold_is_named(tmp_path, thing, text):
    with pytest.raises(errors.InvalidArgumentError, match=text):
        saver_of(tmp_path, model=thing).save(1)
    with pytest.raises(errors.InvalidArgumentError, match="unknown epoch.*passed to Saver, model"):
        saver_of(tmp_path, model=0).save(1, epoch=2)
    with pytest.raises(ValueError, match="nothing to save"):
        saver_of(tmp_path)


@pytest.mark.parametrize(
    "node",
    [{"dict": 3}, {"array": ["elsewhere", "numpy"]}, {"array": ["w", "cupy"]}, {}, {"key": []},
     {"list": [], "dict": []}, {"pickle": "x"}, {"dict": [[[], 1]]}, {"tuple": None}],
)  # fmt: skip
def test_a_forged_description_is_an_error_and_runs_nothing(tmp_path, node):
    for live in ({"a": np.ones(1)}, strategies.SGD(0.1), [np.ones(1)], np.random.default_rng()):
        manager = strategies.CheckpointManager(tmp_path)
        manager.save({"w": np.ones(1)}, step=1, metadata={"things": {"model": node}})
        with pytest.raises((errors.DataLossError, errors.InvalidArgumentError, ValueError)):
            Saver(manager, model=live).restore()
        manager.close()
    strategies.CheckpointManager(tmp_path).save({}, step=1)
    with pytest.raises(errors.InvalidArgumentError, match="not a checkpoint of Saver"):
        saver_of(tmp_path, model=0).restore()


def test_the_manifest_can_be_read_by_people(tmp_path):
    path = saver_of(tmp_path, epoch=3, model={"w": np.ones(2, np.float32)}).save(1)
    body = json.loads((path / "manifest.json").read_text())
    assert body["metadata"]["things"]["epoch"] == 3
    assert body["tensors"]["model/w"]["shape"] == [2]
