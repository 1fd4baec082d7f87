"""Equal step counts for ranks with different amounts of data.

A rank that has run out of rows takes part in a step with none, in code that expects tensors of
PyTorch on a GPU, say: arrays of 0 rows in the library, the dtype and on the kind of device of the
others. Where it has a batch it cuts the rows off. Where it never had one, another rank describes
its own.
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

    *Collective* at each step: all ranks iterate, and stop together. A step in which no rank has a
    row is left out: a mean over it would be one over nothing.

    Args:
        batches: this rank's batches: arrays of shape (n, ...), and lists of n texts or other
            objects, in any nested structure, which is the same on all ranks.
        comm: the ranks to stay in step with.
        uneven: what happens when some ranks run out before others. "fewer": they go on with batches
            of 0 rows, and a mean that is weighted by rows has fewer contributors. "drop": all stop,
            and what the others have left is not used. "pad": they repeat their first batch.

    Yields:
        Batches of the same structure; with 0 rows when this rank has run out, or with "pad" when it
        never had any. Those are arrays of the library, dtype and kind of device that this rank's
        batches have, or the first rank's that has one, and empty lists.

    Raises:
        ValueError: no such way to end; on all ranks.
        MismatchError: `uneven` differs among the ranks; on all ranks, in the first step.
        OpError, ValueError, ...: the error of this rank's own iterable, or of another rank's, of
            the same class and with the rank in its message; on all ranks in the same step.
        RuntimeError: a rank that never had a batch cannot make the arrays that the others have; on
            all ranks.
    """

    def way() -> tuple[Uneven, list[str]]:
        return choice("in_step", "way to end", uneven, Uneven), [f"uneven={uneven!r}"]

    compare(comm, "in_step", way)
    iterator = iter(batches)
    first: Any = None
    nothing: Any = None
    while True:
        batch, error, rows = None, None, False
        try:
            batch = next(iterator, None)
            rows = batch is not None and has_rows(batch)
        except Exception as caught:
            error = caught
        ready = batch is not None
        mine = np.array([error is not None, error is None and not ready, ready, rows], np.int8)
        failed, ended, going, any_rows = comm.allreduce(mine, op=cc.MAX).tolist()
        if failed:
            raise_everywhere(error, comm, "input")
        if not going or (ended and uneven == "drop"):
            return
        if not any_rows:
            continue
        if nothing is None:
            nothing = _nothing_like(batch, comm)
        if first is None and uneven == "pad":
            first = batch
        yield batch if ready else nothing if first is None else first


def _nothing_like(batch: Any, comm: cc.Communicator) -> Any:
    """Return a batch of 0 rows; ranks without a batch learn the form from the others."""
    nothing: Any = None
    form, error = None, None
    try:
        if batch is not None:
            nothing = map_leaves(empty_like, batch, is_column)
            form = map_leaves(form_of, nothing, is_column)
    except Exception as caught:
        error = caught
    forms = [form for form in comm.allgather_object(form) if form is not None]

    def made() -> tuple[Any, list[str]]:
        if error is not None:
            raise error
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
    """What another rank needs to make an array of 0 rows.

    Attributes:
        library: a key of `_LIBRARIES`, "numpy", or for a column "list" or "tuple".
        dtype: its name there; of NumPy the dtype itself; None for a column.
        shape: without the rows.
        device: "cpu", "cuda", ...; which one of these is for the rank to choose.
    """

    library: str
    dtype: Any
    shape: tuple[int, ...]
    device: str

    def make(self) -> Any:
        """Return such an array.

        Raises:
            RuntimeError: this process has no such library, or no such device.
        """
        try:
            return self._make((0, *self.shape))
        except Exception as error:
            raise RuntimeError(
                f"in_step: this rank has had no batch and cannot make one of 0 rows, expected "
                f"{self.dtype} of {self.library} on {self.device}, as others have: {error}"
            ) from error

    def _make(self, shape: tuple[int, ...]) -> Any:
        if self.dtype is None:
            return [] if self.library == "list" else ()
        if self.library == "torch":
            torch = importlib.import_module("torch")
            return torch.empty(shape, dtype=getattr(torch, self.dtype), device=self.device)
        if self.library == "cupy":
            return importlib.import_module("cupy").empty(shape, self.dtype)
        if self.library == "jax":
            jax = importlib.import_module("jax")
            device = jax.local_devices(backend=self.device)[0]
            return jax.device_put(np.empty(shape, self.dtype), device)
        return np.empty(shape, self.dtype)


def empty_like(leaf: Any) -> Any:
    """Return 0 rows: of a column the same type, of an array on its device, else a NumPy array.

    Raises:
        ValueError: it has no rows.
    """
    if is_column(leaf):
        return leaf[:0]
    array = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    if not array.shape:
        raise ValueError(
            f"in_step: expected arrays of shape (n, ...) or lists of n objects, got {leaf!r:.40}"
        )
    return array[:0]


def form_of(array: Any) -> EmptySpec:
    """Describe an array or a column for ranks that have none."""
    if isinstance(array, (list, tuple)):
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
