"""Queues on another task, made where a test makes queues of its own."""

import itertools
from contextlib import contextmanager

from calls import together

import inprocess
from collectives.calls.group import Group
from collectives.communicator import Communicator
from collectives.core.settings import Settings
from strategies.queues.remote import RemoteStateMachine, shared_queue
from strategies.queues.state_machine import Dequeue
from strategies.rpc.service import Service
from tapped import Tapped

__all__ = ["Dequeue", "Settling", "leave", "maker", "two_tasks"]


class Services(list):
    """Services by task, and in `channels` what each of them talks through, see `tapped`."""

    def __init__(self, services):
        super().__init__(services)
        self.channels = [None] * len(services)


@contextmanager
def two_tasks(timeout=60.0):
    """The services of two tasks that are threads; the second one is the caller's."""
    group = inprocess.ThreadGroup(2, "eager")
    services = Services([None, None])

    def open_(rank):
        transport = inprocess.ThreadTransport(group, rank)
        comm = Communicator(Group(transport, [0, 0], Settings(timeout=20, shared_memory=None)))
        tapped = Tapped(comm)
        services[rank] = Service(tapped, timeout=timeout)
        services.channels[rank] = tapped.channel

    together(open_, range(2))
    try:
        yield services
    finally:
        together(lambda service: service.close(), services)


def leave(service):
    """Leave a service's block because of an error, which does not wait for the others."""
    service.__exit__(RuntimeError, RuntimeError("of a test"), None)


class Settling(RemoteStateMachine):
    """Lets what an operation has brought about be known when the operation returns.

    Answers come in the order in which they were sent: when that to a last question is here, those
    to all attempts that have finished so far are.
    """

    def submit(self, attempt):
        super().submit(attempt)
        if self.service.may_wait:
            len(self)

    def close_now(self):
        super().close_now()
        len(self)

    def cancel_pending(self):
        super().cancel_pending()
        len(self)

    def withdraw(self, attempt, error):
        super().withdraw(attempt, error)
        len(self)

    def abandon(self, attempt):
        super().abandon(attempt)
        len(self)


def maker(service, state_machine=RemoteStateMachine):
    """A function that makes queues of a kind on task 0."""
    numbers = itertools.count()

    def make(kind, *arguments, name=None, **properties):
        number = next(numbers)
        queue = shared_queue(
            kind,
            *arguments,
            **properties,
            service=service,
            shared_name=name or f"queue_{number}",
            container=str(number),
        )
        queue.state_machine = state_machine(service, queue.state_machine.address)
        return queue

    return make
