"""One call of one operation: its limit, its check, and what its failure means for later calls."""

from __future__ import annotations

from types import TracebackType

from collectives import fingerprint, settings
from collectives.errors import CollectiveError, MismatchError
from collectives.transport import Deadline, Transport

__all__ = ["Call", "Calls"]

# UNISONO_CHECK=sample compares the first calls, where programs are wrong from the start, and then
# every so many, where ranks drift apart. Counted per communicator, so that all ranks choose alike.
_SAMPLE_FIRST = 64
_SAMPLE_EVERY = 64


class Calls:
    """The calls made on one communicator, one after the other."""

    def __init__(self, transport: Transport, configuration: settings.Settings) -> None:
        self.transport = transport
        self.settings = configuration
        self.number = 0
        self.unusable: str | None = None

    def enter(self, operation: str, timeout: float | None) -> Call:
        """Begin a call; use as a context manager.

        Raises:
            CollectiveError: the communicator was closed, or an earlier call on it failed.
            ValueError: the timeout is no time.
        """
        if self.unusable is not None:
            raise CollectiveError(
                f"{operation}: this communicator is not usable any more, since {self.unusable} "
                f"({self.where})"
            )
        limit = self.settings.timeout if timeout is None else timeout
        if not limit > 0:
            raise ValueError(f"{operation}: timeout is no time, expected seconds > 0, got {limit}")
        self.number += 1
        return Call(self, operation, Deadline(operation, limit, self.settings.stall_warning))

    @property
    def where(self) -> str:
        """The rank, as the last words of an error."""
        return f"rank {self.transport.rank} of {self.transport.size}"

    @property
    def checked(self) -> bool:
        """Whether the ranks compare their descriptions of the current call."""
        if self.settings.check == "sample":
            return self.number <= _SAMPLE_FIRST or self.number % _SAMPLE_EVERY == 0
        return self.settings.check == "always"


class Call:
    """A call under way.

    The block in which it runs first looks at its arguments, then calls `agree` or `agree_on_rows`
    once, and only then changes memory or sends data.
    """

    def __init__(self, calls: Calls, operation: str, deadline: Deadline) -> None:
        self._calls = calls
        self._agreed = False
        self.operation = operation
        self.deadline = deadline

    def agree(self, **fields: object) -> None:
        """Check that all ranks make this call with the same fields.

        Raises:
            MismatchError: they do not; the same error on all ranks.
        """
        self._agreed = True
        if self._calls.checked:
            fingerprint.agree(self._calls.transport, self._described(fields), self.deadline)

    def agree_on_rows(self, rows: int, **fields: object) -> list[int]:
        """As `agree`, always, and return how many rows every rank brings."""
        self._agreed = True
        description = self._described(fields)
        return fingerprint.agree_on_rows(self._calls.transport, description, rows, self.deadline)

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, MismatchError):
            return
        if not self._agreed and isinstance(error, (TypeError, ValueError)):
            self._refuse(error)
            return
        # Also after Ctrl-C: half an operation has been done, and the next would read its rest.
        self._calls.unusable = f"{self.operation} failed: {type(error).__name__}: {error}"

    def _refuse(self, error: Exception) -> None:
        """Let the other ranks know that this one will not take part; the error goes on as it is."""
        try:
            self.agree(refused=f"{type(error).__name__}: {error}")
        except MismatchError:
            pass
        except CollectiveError as failure:
            self._calls.unusable = f"{self.operation} failed: {failure}"

    def _described(self, fields: fingerprint.Description) -> fingerprint.Description:
        return {"operation": self.operation, "call": self._calls.number, **fields}
