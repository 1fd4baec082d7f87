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
    "ResourceExhaustedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
]


class OpError(Exception):
    """An operation on a queue, a reader or named state did not succeed.

    Raise one of the subclasses; catch this one to mean all of them.

    Args:
        message: what is wrong, for people.

    Attributes:
        code: the kind of error as one upper-case word, equal for all errors of a class. It is what
            travels between ranks.
    """

    code: str = "UNKNOWN"

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @property
    def message(self) -> str:
        """What is wrong, for people."""
        return str(self.args[0])


class OutOfRangeError(OpError):
    """There is no more: the queue is closed and empty, or the epochs are over. A normal end."""

    code = "OUT_OF_RANGE"


class CancelledError(OpError):
    """Somebody closed the queue or stopped the work before this operation could finish."""

    code = "CANCELLED"


class DeadlineExceededError(OpError):
    """The operation did not finish within its `timeout`; what it had taken went back."""

    code = "DEADLINE_EXCEEDED"


class InvalidArgumentError(OpError, ValueError):
    """Data does not fit: a wrong dtype or shape, or text that is not a number.

    Also a `ValueError`: without a graph there is no difference between an argument that is wrong
    when the program is written and one that is wrong when it runs.
    """

    code = "INVALID_ARGUMENT"


class NotFoundError(OpError):
    """A file, device or named object does not exist."""

    code = "NOT_FOUND"


class AbortedError(OpError):
    """The operation lost against another one; it can be tried again from the start."""

    code = "ABORTED"


class UnavailableError(OpError):
    """The task that holds the object cannot be reached now."""

    code = "UNAVAILABLE"


class FailedPreconditionError(OpError):
    """The object is not in the state that the operation needs, such as not initialised."""

    code = "FAILED_PRECONDITION"


class DataLossError(OpError):
    """Stored data is damaged or incomplete and cannot be read back."""

    code = "DATA_LOSS"


class ResourceExhaustedError(OpError):
    """Memory or another limited supply has run out."""

    code = "RESOURCE_EXHAUSTED"


class UnimplementedError(OpError):
    """This object does not offer the operation."""

    code = "UNIMPLEMENTED"


class InternalError(OpError):
    """A fault of this library rather than of its caller."""

    code = "INTERNAL"


class UnknownError(OpError):
    """An error whose kind is not known here, such as one from another system."""

    code = "UNKNOWN"
