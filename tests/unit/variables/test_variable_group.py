"""Variables that change together, with one version."""

import threading
import time

import numpy as np
import pytest

from strategies.core.sparse import Rows
from strategies.errors import DataLossError
from strategies.optimizers import SGD, Momentum
from strategies.variables.variable_group import VariableGroup, pack, unpack

LIMIT = 20.0


@pytest.fixture
def group():
    made = VariableGroup("test")
    made.add("a", np.zeros((6, 1), np.float32), Momentum(1.0, 0.5), resident=True)
    made.add("b", np.zeros(2, np.float32), Momentum(1.0, 0.5), resident=True)
    made.add("c", lambda: np.ones((2, 2), np.float32), Momentum(1.0, 0.5), resident=False)
    yield made
    made.close()


def lacking(group, version):
    """What copies of a version lack of `a` and `b`, as lists."""
    values, counts = group.updates_since(version, None)
    rest = [value.tolist() for value in values]
    return [[rest.pop(0) for _ in range(count)] for count in counts]


def test_copies_get_what_changed_since_their_version(group):
    group.update({0: Rows([4, 1], np.ones((2, 1), np.float32))}, {}, 1.0)
    assert lacking(group, 0) == [[[1, 4], [[-1], [-1]]], []]
    group.update({1: np.ones(2, np.float32), 2: np.ones((2, 2), np.float32)}, {1: 2.0}, 0.5)
    assert lacking(group, 1) == [[], [[-1, -1]]]  # half of a rate of 2
    assert lacking(group, 2) == [[], []]
    group.assign(0, np.full((6, 1), 7, np.float32))
    assert lacking(group, 2) == [[[[7]] * 6], []]  # also copies that have all updates
    assert group.rows(2, np.array([1]), None).tolist() == [[0.5, 0.5]]
    assert (group.version, group.updates) == (2, 2)


def test_a_state_that_is_sent_goes_on_with_slots_and_counts(group):
    gradient = np.ones(2, np.float32)
    group.update({1: gradient}, {}, 1.0)
    states = unpack(*pack(group.states().values()))
    sent = {
        name: state._replace(arrays={k: v.copy() for k, v in state.arrays.items()})
        for name, state in zip(group.names(), states, strict=True)
    }
    expected = []
    for _ in range(2):
        group.update({1: gradient}, {}, 1.0)
        expected.append(lacking(group, 0)[1])
        group.load(sent, 10)
        assert (group.version, group.updates) == (len(expected) + 1, 10)
        assert lacking(group, group.version) == [[[[0]] * 6], [[-1, -1]]]
    assert expected == [[[-2.5, -2.5]]] * 2  # -1 - (0.5 + 1)


def test_an_update_that_fails_has_ended_in_all_threads(group):
    """No step of it writes during the request that follows."""
    failed, written = threading.Event(), []

    class Late(Momentum):
        def apply_gradients(self, pairs):
            assert failed.wait(LIMIT)
            time.sleep(0.2)  # so long `update` would be back by now
            written.append(super().apply_gradients(pairs))

    class Failing(Momentum):
        def apply_gradients(self, pairs):
            failed.set()
            raise ZeroDivisionError("of a test")

    large = np.ones(1 << 18, np.float32)
    group.add("bad", large, Failing(1.0, 0.5), resident=False)
    group.add("late", large, Late(1.0, 0.5), resident=False)
    with pytest.raises(ZeroDivisionError, match="of a test"):
        group.update({3: large, 4: large}, {}, 1.0)
    assert len(written) == 1


def fails_once(step):
    if step == 1:
        raise KeyError("no rate")
    return 1.0


@pytest.mark.parametrize("size", [2, 1 << 19], ids=["in turn", "in threads"])
def test_a_change_that_fails_for_some_variables_is_final(size):
    group = VariableGroup("test")
    for name, rate in {"a": 1.0, "b": fails_once, "c": 1.0}.items():
        group.add(name, np.zeros(size, np.float32), SGD(rate), resident=True)
    ones = dict.fromkeys(range(3), np.ones(size, np.float32))
    group.update(ones, {}, 1.0)
    with pytest.raises(KeyError, match="no rate"):
        group.update({1: ones[1]}, {}, 1.0)  # no variable has changed
    assert [value[0] for value in group.updates_since(0, None)[0]] == [-1, -1, -1]
    with pytest.raises(KeyError, match="no rate"):
        group.update(ones, {}, 1.0)
    for call in (
        lambda: group.update(ones, {}, 1.0),
        lambda: group.updates_since(0, None),
        lambda: group.rows(0, np.array([0]), None),
        lambda: group.assign(0, ones[0]),
        group.states,
        lambda: group.load({}, 0),
    ):
        with pytest.raises(DataLossError, match="expected all or none, got KeyError: 'no rate'"):
            call()
    group.close()
