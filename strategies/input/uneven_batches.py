"""Equal step counts for ranks with different amounts of data.

A rank without rows still takes part in a step, in code that expects PyTorch tensors on a GPU, say.
It gets arrays of 0 rows with the library, dtype and kind of device of the other ranks. They are
slices of its own batch if it ever had one, otherwise made by another rank's description.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import array_api_compat
import numpy as np

import collectives as cc
from strategies.core import array_ops
from strategies.core.agreement import compare, raise_everywhere
from strategies.core.pytree import map_leaves
from strategies.core.validation import choice
from strategies.input.batch_split import has_rows, is_column

__all__ = ["EmptySpec", "Uneven", "form_of", "in_step", "empty_like"]

Uneven = Literal["fewer", "drop", "pad"]


def in_step(
    batches: Iterable[Any], comm: cc.Communicator, *, uneven: Uneven = "fewer"
) -> Iterator[Any]:
    """Yield this rank's batches so that all ranks take the same number of steps.

    *Collective* at each step: all ranks iterate, and stop together. Steps in which no rank has a
    row are skipped, because a mean over 0 rows is undefined.

    Args:
        batches: this rank's batches: arrays of shape (n, ...), and lists of n texts or other
            objects, in any nested structure, which is the same on all ranks.
        comm: the ranks to stay in step with.
        uneven: behaviour when some ranks run out before others. "fewer": these ranks continue with
            batches of 0 rows, and a mean weighted by rows has fewer contributors. "drop": all ranks
            stop; remaining batches are not used. "pad": these ranks repeat their first batch.

    Yields:
        Batches of the same structure; with 0 rows if this rank has run out, or with "pad" if it
        never had any. Arrays of 0 rows have the library, dtype and kind of device of this rank's
        batches, or of the first rank's that has one; columns are empty lists.

    Raises:
        ValueError: `uneven` is unknown; on all ranks.
        MismatchError: `uneven` differs among the ranks; on all ranks, in the first step.
        OpError, ValueError, ...: the error of an iterable; on all ranks in the same step. Other
            ranks raise the same class with the failed rank in the message.
        RuntimeError: a rank that never had a batch lacks the library or device of the others; on
            all ranks.
    """

    def way() -> tuple[Uneven, list[str]]:
        return choice("in_step", "way to end", uneven, Uneven), [f"uneven={uneven!r}"]

    # Compared first: with different ways to end, ranks would stop in different steps.
    compare(comm, "in_step", way)
    iterator = iter(batches)
    first: Any = None
    nothing: Any = None
    while True:
        batch, error, rows = None, None, False
        try:
            batch = next(iterator, None)
            # A batch of 0 rows is a batch, but does not justify a step.
            rows = batch is not None and has_rows(batch)
        except Exception as caught:
            error = caught
        ready = batch is not None
        mine = np.array([error is not None, error is None and not ready, ready, rows], np.int8)
        # MAX of flags: whether any rank failed, ended, continues, or has rows.
        failed, ended, going, any_rows = comm.allreduce(mine, op=cc.MAX).tolist()
        if failed:
            raise_everywhere(error, comm, "input")
        # No rank has a batch, or one has ended and all stop with it.
        if not going or (ended and uneven == "drop"):
            return
        # All ranks skip it together; the next batches are compared again.
        if not any_rows:
            continue
        # In the first step with rows some rank has a batch to describe.
        if nothing is None:
            nothing = _nothing_like(batch, comm)
        if first is None and uneven == "pad":
            first = batch
        yield batch if ready else nothing if first is None else first


def _nothing_like(batch: Any, comm: cc.Communicator) -> Any:
    """Return a batch of 0 rows; ranks without a batch make it from another rank's description."""
    nothing: Any = None
    form, error = None, None
    try:
        if batch is not None:
            nothing = map_leaves(empty_like, batch, is_column)
            form = map_leaves(form_of, nothing, is_column)
    except Exception as caught:
        error = caught
    # Collective: every rank sends its description, and takes the first one.
    forms = [form for form in comm.allgather_object(form) if form is not None]

    def made() -> tuple[Any, list[str]]:
        if error is not None:
            raise error
        # A rank with a batch uses its own, whose device it knows.
        of_others = batch is None and bool(forms)
        return map_leaves(lambda leaf: leaf.make(), forms[0]) if of_others else nothing, []

    return compare(comm, "in_step", made)


_LIBRARIES: dict[str, Callable[[Any], bool]] = {
    "torch": array_api_compat.is_torch_array,
    "cupy": array_api_compat.is_cupy_array,
    "jax": array_api_compat.is_jax_array,
}


@dataclass(frozen=True)
class EmptySpec:
    """Description of an array of 0 rows, for ranks without a batch.

    Attributes:
        library: a key of `_LIBRARIES`, "numpy", or for a column "list" or "tuple".
        dtype: its name in the library; for NumPy the dtype itself; None for a column.
        shape: shape without the dimension of rows.
        device: kind of device, such as "cpu" or "cuda"; the receiving rank chooses its index.
    """

    library: str
    dtype: Any
    shape: tuple[int, ...]
    device: str

    def make(self) -> Any:
        """Return an array of 0 rows.

        Raises:
            RuntimeError: this process lacks the library or the device.
        """
        try:
            return self._make((0, *self.shape))
        except Exception as error:
            raise RuntimeError(
                f"in_step: this rank has had no batch and cannot make one of 0 rows, expected "
                f"{self.dtype} of {self.library} on {self.device}, as on other ranks: {error}"
            ) from error

    def _make(self, shape: tuple[int, ...]) -> Any:
        # Columns have no library: an empty list serves on each rank.
        if self.dtype is None:
            return [] if self.library == "list" else ()
        if self.library == "torch":
            torch = importlib.import_module("torch")
            # Without an index: PyTorch takes the current device of this rank.
            return torch.empty(shape, dtype=getattr(torch, self.dtype), device=self.device)
        if self.library == "cupy":
            return importlib.import_module("cupy").empty(shape, self.dtype)
        if self.library == "jax":
            jax = importlib.import_module("jax")
            device = jax.local_devices(backend=self.device)[0]
            return jax.device_put(np.empty(shape, self.dtype), device)
        return np.empty(shape, self.dtype)


def empty_like(leaf: Any) -> Any:
    """Return 0 rows: a column of the same type, an array on its device, otherwise a NumPy array.

    Raises:
        ValueError: the leaf has no dimension of rows.
    """
    if is_column(leaf):
        # A slice of its own batch, so library, dtype and device are right.
        return leaf[:0]
    array = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    if not array.shape:
        raise ValueError(
            f"in_step: expected arrays of shape (n, ...) or lists of n objects, got {leaf!r:.40}"
        )
    return array[:0]


def form_of(array: Any) -> EmptySpec:
    """Describe an array or column, for ranks without a batch."""
    if isinstance(array, (list, tuple)):
        # Before the libraries, since a column is a plain list.
        return EmptySpec("list" if isinstance(array, list) else "tuple", None, (), "")
    shape = tuple(array.shape[1:])
    for library, belongs in _LIBRARIES.items():
        if belongs(array):
            return EmptySpec(library, array_ops.dtype_name(array), shape, _device(array, library))
    return EmptySpec("numpy", np.asarray(array).dtype, shape, "cpu")


def _device(array: Any, library: str) -> str:
    """Return the kind of an array's device, as its library calls it."""
    if library == "torch":
        return str(array.device.type)
    return "cuda" if library == "cupy" else str(next(iter(array.devices())).platform)
