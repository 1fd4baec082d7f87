"""Point-to-point operations of the torch.distributed backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

import collectives as cc
from strategies.torch.tensor_views import borrow
from strategies.torch.work import translated

__all__ = ["MessageWork", "receive", "send"]


class MessageWork:
    """A tensor under way.

    Args:
        request: of the communicator.
        write: brings the elements where they belong, if that is not where they arrive.
    """

    def __init__(self, request: cc.Request[Any], write: Callable[[], Any] | None = None) -> None:
        self._request = request
        self._write = write
        self._writing = threading.Lock()  # `finish` is called by who waits, and as it arrives

    def done(self) -> bool:
        """Tell whether it has arrived, or has failed."""
        return self._request.done() and self.finish(None)

    def finish(self, timeout: float | None) -> bool:
        """Wait until it has arrived, or has failed; tells whether it has."""
        if not self._request.complete(timeout):
            return False
        with self._writing:
            write, self._write = self._write, None
            if write is not None and self._request.exception() is None:
                write()
        return True

    @property
    def error(self) -> BaseException | None:
        """Why it has failed."""
        error = self._request.exception()
        return None if error is None else translated(error)

    @property
    def source(self) -> int:
        """The rank that it came from."""
        envelope = self._request.envelope
        return -1 if envelope is None else envelope.source

    def call_back(self, function: Callable[[], Any]) -> None:
        """Call a function when it has arrived, or has failed."""

        def call(request: cc.Request[Any]) -> None:
            self.finish(None)
            function()

        self._request.add_done_callback(call)


def send(
    comm: cc.Communicator, tensor: torch.Tensor, dest: int, tag: int, limit: float
) -> MessageWork:
    """Start sending a tensor, which must not change before it has arrived."""
    array, _ = borrow(tensor)
    return MessageWork(comm.isend(array.reshape(-1), dest, tag=tag, timeout=limit))


def receive(
    comm: cc.Communicator, tensor: torch.Tensor, source: int | None, tag: int, limit: float
) -> MessageWork:
    """Start receiving a tensor; None for whichever rank sends one."""
    array, write = borrow(tensor)
    into = array.reshape(-1)
    return MessageWork(comm.irecv(source, tag=tag, out=into, timeout=limit), write)
