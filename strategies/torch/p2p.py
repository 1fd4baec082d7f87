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
    """A point-to-point transfer in progress.

    Args:
        request: request of the communicator.
        write: copies received elements into the tensor, if they arrive in a buffer.
    """

    def __init__(self, request: cc.Request[Any], write: Callable[[], Any] | None = None) -> None:
        self._request = request
        self._write = write
        self._writing = threading.Lock()  # `wait` and the callback may call `finish` at once

    def done(self) -> bool:
        """Return whether the transfer has finished or failed."""
        return self._request.done() and self.finish(None)

    def finish(self, timeout: float | None) -> bool:
        """Wait for the transfer; return whether it has finished or failed."""
        if not self._request.complete(timeout):
            return False
        with self._writing:
            # Taken under the lock, so that a second caller does not write again.
            write, self._write = self._write, None
            # After an error the buffer has no defined content.
            if write is not None and self._request.exception() is None:
                write()
        return True

    @property
    def error(self) -> BaseException | None:
        """Error of the transfer, or None."""
        error = self._request.exception()
        return None if error is None else translated(error)

    @property
    def source(self) -> int:
        """Source rank of the message."""
        envelope = self._request.envelope
        return -1 if envelope is None else envelope.source

    def call_back(self, function: Callable[[], Any]) -> None:
        """Call a function when the transfer has finished or failed."""

        # The elements must be in the tensor before a waiting program continues.
        def call(request: cc.Request[Any]) -> None:
            self.finish(None)
            function()

        self._request.add_done_callback(call)


def send(
    comm: cc.Communicator, tensor: torch.Tensor, dest: int, tag: int, limit: float
) -> MessageWork:
    """Start sending a tensor, which must not change until the transfer has finished."""
    # A copy of a tensor elsewhere is kept alive by the request.
    array, _ = borrow(tensor)
    return MessageWork(comm.isend(array.reshape(-1), dest, tag=tag, timeout=limit))


def receive(
    comm: cc.Communicator, tensor: torch.Tensor, source: int | None, tag: int, limit: float
) -> MessageWork:
    """Start receiving a tensor from `source`; None for any rank."""
    array, write = borrow(tensor)
    # Contiguous, so `reshape` is a view and the message arrives in the buffer itself.
    into = array.reshape(-1)
    return MessageWork(comm.irecv(source, tag=tag, out=into, timeout=limit), write)
