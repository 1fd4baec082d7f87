"""The whole suite of tests of queues, once more, on queues of another task.

The tests are those of the other files here; only what they call to make a queue is exchanged.
"""

import pytest
import test_queue_kinds
import test_queue_machine
import test_queues
from test_queue_conformance import *  # noqa: F403
from test_queue_kinds import *  # noqa: F403
from test_queue_machine import *  # noqa: F403
from test_queues import *  # noqa: F403

import elsewhere

# What looks into the queue or at this process's memory, needs an answer at once in a callback, or
# exchanges locks of `threading`: does not apply to a queue that is elsewhere.
del test_a_callback_may_use_the_queue  # noqa: F821
del test_a_priority_queue_forgets_objects_that_have_left  # noqa: F821
del test_an_interrupted_caller_takes_nothing  # noqa: F821
del test_memory_does_not_grow_with_use  # noqa: F821
del test_memory_of_a_priority_queue_does_not_grow_with_use  # noqa: F821
del test_objects_that_have_left_are_forgotten  # noqa: F821

KINDS = ("FIFOQueue", "PaddingFIFOQueue", "PriorityQueue", "RandomShuffleQueue")


class Elsewhere:
    """Stands for a class of queues: makes them on another task."""

    def __init__(self, kind, make):
        self.kind, self.make = kind, make

    def __call__(self, *arguments, **properties):
        return self.make(self.kind, *arguments, **properties)

    def __getattr__(self, name):
        return getattr(self.kind, name)


@pytest.fixture(scope="module")
def services():
    with elsewhere.two_tasks() as services:
        yield services


@pytest.fixture
def make(services):
    return elsewhere.maker(services[1])


@pytest.fixture(autouse=True)
def queues_are_elsewhere(services, monkeypatch):
    make = elsewhere.maker(services[1], elsewhere.Settling)
    for module in (test_queue_kinds, test_queue_machine, test_queues):
        for name in KINDS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, Elsewhere(getattr(module, name), make))
    yield
    services[1].reset()
