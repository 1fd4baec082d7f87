"""Exceptions of `strategies`."""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OpError",
    "OutOfRangeError",
    "RankError",
    "ResourceExhaustedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
]


class OpError(Exception):
    """An operation on a queue, a reader or named state failed.

    Raise one of the subclasses; catch this class for all of them.

    Args:
        message: description for users.

    Attributes:
        code: kind of error as one upper-case word, the same for all errors of a class; it
            identifies the class in messages between ranks.
    """

    code: str = "UNKNOWN"

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @property
    def message(self) -> str:
        """Description for users."""
        return str(self.args[0])


class OutOfRangeError(OpError):
    """The end of the data: the queue is closed and empty, or all epochs are read. A normal end."""

    code = "OUT_OF_RANGE"


class CancelledError(OpError):
    """The queue was closed or the work was stopped before this operation finished."""

    code = "CANCELLED"


class DeadlineExceededError(OpError):
    """The operation did not finish within its `timeout`; elements that it took were returned."""

    code = "DEADLINE_EXCEEDED"


class InvalidArgumentError(OpError, ValueError):
    """Data does not fit: a wrong dtype or shape, or text that is not a number.

    Also a `ValueError`: without a graph, wrong arguments are detected only at run time.
    """

    code = "INVALID_ARGUMENT"


class NotFoundError(OpError):
    """A file, device or named object does not exist."""

    code = "NOT_FOUND"


class AbortedError(OpError):
    """The operation conflicted with another one; retry it from the start."""

    code = "ABORTED"


class UnavailableError(OpError):
    """The task that holds the object cannot be reached."""

    code = "UNAVAILABLE"


class FailedPreconditionError(OpError):
    """The object is not in the required state, such as not initialised."""

    code = "FAILED_PRECONDITION"


class DataLossError(OpError):
    """Stored data is damaged or incomplete and cannot be read."""

    code = "DATA_LOSS"


class RankError(OpError):
    """A rank of `strategies.launch` raised an exception, or ended without a result."""

    code = "RANK_FAILED"


class ResourceExhaustedError(OpError):
    """Memory or another limited resource is exhausted."""

    code = "RESOURCE_EXHAUSTED"


class UnimplementedError(OpError):
    """The object does not support the operation."""

    code = "UNIMPLEMENTED"


class InternalError(OpError):
    """A bug in this library."""

    code = "INTERNAL"


class UnknownError(OpError):
    """An error of unknown kind, such as one from another system."""

    code = "UNKNOWN"
