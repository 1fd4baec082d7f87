"""Errors of compiled programs: from JAX's exception back to the one that an operation raised.

JAX raises a `JaxRuntimeError` with a text where a program waits for its result. The operation's own
exception has a class that programs catch, such as `PeerFailure`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import jax

__all__ = ["library_errors", "record_failure"]

# The last failures of programs: text in JAX's error, and the error.
_failures: deque[tuple[str, BaseException]] = deque(maxlen=16)


def record_failure(error: BaseException) -> str:
    """Remember an error that ends a program, and return its text for JAX."""
    text = f"{type(error).__name__}: {error}"
    _failures.append((text, error))
    return text


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """Raise the errors of operations in compiled programs as themselves.

    Waits at the end for the programs that the block has started. JAX alone raises a
    `jax.errors.JaxRuntimeError` with the text of the error, and raises it again in every later
    program with an operation of this module. After this block later programs run.

    Raises:
        CollectiveError: an operation failed, as for the communicator's methods.
        KeyboardInterrupt: Ctrl-C during an operation in the main thread.

    Example:
        >>> import collectives as cc
        >>> import jax
        >>> from strategies.jax import allreduce, library_errors
        >>> with library_errors():
        ...     total = jax.jit(lambda x: allreduce(x, op=cc.SUM))(jax.numpy.ones(3))
        >>> total.shape
        (3,)
    """
    try:
        yield
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as failed:
        _forget_tokens()
        # The longest text, because an error may quote another one; the latest of equal texts.
        found = [pair for pair in reversed(_failures) if pair[0] in str(failed)]
        if not found:
            raise
        raise max(found, key=lambda pair: len(pair[0]))[1] from failed


def _forget_tokens() -> None:
    """Drop JAX's token of the failed program, which would fail every later program."""
    # Without a public function: JAX clears the tokens only after a wait without an error.
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.dispatch import runtime_tokens

        runtime_tokens.clear()
