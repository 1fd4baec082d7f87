"""`Stages`: a PyTorch model divided by layers over ranks, as a pipeline of micro-batches.

The schedule is *one forward, one backward* (1F1B). With 3 ranks and 4 micro-batches, F2 is the
forward pass of micro-batch 2 and B2 its backward pass::

    rank 0   F0 F1 F2       B0 F3    B1    B2    B3
    rank 1      F0 F1    B0 F2    B1 F3 B2    B3
    rank 2         F0 B0 F1    B1 F2 B2 F3 B3

Rank r of P runs P - 1 - r forward passes ahead, so at most P - r micro-batches hold activations,
however many there are. If all passes of all ranks take equal time, a step of m micro-batches takes
(m + P - 1)/m of the time without idle ranks.

Source: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019;
the schedule with a flush after each step, as in Megatron-LM.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

import collectives as cc
from collectives import extend
from strategies.core import agreement

__all__ = ["Stages", "one_forward_one_backward"]


def one_forward_one_backward(
    rank: int, size: int, parts: int
) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """Yield the passes of one rank in order, each with its micro-batch.

    >>> [f"{direction[0]}{part}" for direction, part in one_forward_one_backward(0, 2, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    ahead = min(size - 1 - rank, parts)
    for part in range(parts + ahead):
        if part < parts:
            yield "forward", part
        if part >= ahead:
            yield "backward", part - ahead


class Stages:
    """A sequence of PyTorch modules, divided into consecutive parts, one per rank.

    Computes the same gradients as `torch.nn.Sequential(*modules)` in one process, except for the
    order of sums, and for modules that combine rows, such as batch normalization, or draw random
    numbers. The parameters must be equal to those of that process: create all modules with the same
    seed, or load a checkpoint.

    *Collective*: all ranks pass the same number of modules and the same options.

    Args:
        modules: torch modules; each takes the tensor that the module before it returns. First axis:
            rows. Those of other ranks are ignored and may be None.
        parts: number of micro-batches per step.
        counts: number of modules of each rank, at least 1, which add up to the number of modules;
            even shares if None.
        comm: the ranks of one pipeline; the whole job if None.

    Attributes:
        module: `torch.nn.Sequential` of this rank's modules, with their names in the whole model:
            the state dicts of all ranks together are that of `torch.nn.Sequential(*modules)`.

    Raises:
        ValueError, TypeError: a count is out of range, or an own module is none; on all ranks.
        MismatchError: ranks differ in their options; on all ranks.

    Example:
        >>> import collectives as cc
        >>> import torch
        >>> from strategies.model_parallel.torch import Stages
        >>> comm = cc.init()
        >>> layers = [torch.nn.Linear(4, 4) for _ in range(comm.size)]
        >>> stages = Stages(layers, parts=2, comm=comm)
        >>> x, target = torch.ones(6, 4), torch.zeros(6, 4)
        >>> stages.step(x, target, torch.nn.functional.mse_loss) > 0
        True
        >>> [parameter.grad.shape for parameter in stages.parameters()]
        [torch.Size([4, 4]), torch.Size([4])]
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module | None],
        *,
        parts: int,
        counts: Sequence[int] | None = None,
        comm: cc.Communicator | None = None,
    ) -> None:
        self.comm = extend.comm_or_world(comm, "Stages")
        self.parts = parts
        self.module = agreement.compare(
            self.comm, "Stages", lambda: self._own_modules(modules, counts)
        )

    def parameters(self) -> Iterator[Any]:
        """Return the parameters of this rank's modules, for an optimizer."""
        parameters: Iterator[Any] = self.module.parameters()
        return parameters

    def step(self, x: Any, target: Any, loss_fn: Callable[[Any, Any], Any]) -> float:
        """Run the forward and backward passes of all micro-batches, and add gradients to `.grad`.

        *Collective*. Micro-batches have equal numbers of rows, except that the first ones may have
        one more. The loss is the mean over all rows: each micro-batch counts by its rows.

        Args:
            x: on the first rank, the input, shape (n, ...), n >= `parts`; ignored elsewhere.
            target: on the last rank, shape (n, ...); ignored elsewhere.
            loss_fn: on the last rank, returns the mean loss of a micro-batch, a scalar, given
                output and target; ignored elsewhere.

        Returns:
            the loss, on all ranks.

        Raises:
            Exception: a module or `loss_fn` has failed: the same on that rank, a copy on the
                others. The ranks can step again; `.grad` is then a part of a sum.
            CollectiveTimeout: a rank did not send in time.
            PeerFailure: a rank is dead.

        Cost: a message per micro-batch and direction to each neighbour, of the bytes of an
            activation, and an all-gather of 16 bytes.
        """
        rank, size = self.comm.rank, self.comm.size
        passes = _Passes(self.comm, self.module)
        inputs = passes.run(lambda: self._split(x)) if rank == 0 else None
        targets = passes.run(lambda: self._split(target)) if rank == size - 1 else None
        loss, graphs = 0.0, {}

        def loss_of(output: Any, wanted: Any) -> Any:
            if len(output) != len(wanted):
                raise ValueError(
                    f"step: rows of output and target differ, got {len(output)} and {len(wanted)}"
                )
            return loss_fn(output, wanted) * (len(wanted) / len(target))

        for direction, part in one_forward_one_backward(rank, size, self.parts):
            if direction == "forward":
                own = passes.input(inputs, part)
                result = passes.run(self._forward, own)
                if targets is not None:
                    result = passes.run(loss_of, result, targets[part])
                    loss += passes.run(torch.Tensor.item, result) or 0.0
                elif rank < size - 1:
                    passes.send(result, rank + 1)
                graphs[part] = own, result
            else:
                own, result = graphs.pop(part)
                gradient = passes.output_gradient(result)
                gradient = passes.run(_backward, own, result, gradient)
                if rank > 0:
                    passes.send(gradient, rank - 1)
                # Freed before the next forward pass, which would otherwise hold one more.
                del own, result, gradient
        return passes.end(loss)

    def predict(self, x: Any) -> Any:
        """Run the forward passes of all micro-batches without gradients; *collective*.

        Args:
            x: on the first rank, the input, shape (n, ...), n >= `parts`; ignored elsewhere.

        Returns:
            the output of the model, shape (n, ...), on the last rank; None elsewhere.

        Raises:
            Exception: as `step`.
        """
        rank, size = self.comm.rank, self.comm.size
        passes = _Passes(self.comm, self.module)
        inputs = passes.run(lambda: self._split(x)) if rank == 0 else None
        outputs = []
        with torch.no_grad():
            for part in range(self.parts):
                output = passes.run(self._forward, passes.input(inputs, part))
                if rank < size - 1:
                    passes.send(output, rank + 1)
                else:
                    outputs.append(output)
        passes.end()
        return torch.cat(outputs) if outputs else None

    def _own_modules(
        self, modules: Sequence[Any], counts: Sequence[int] | None
    ) -> tuple[Any, list[str]]:
        """Return this rank's modules, and the facts that must agree on all ranks."""
        size = self.comm.size
        if self.parts < 1:
            raise ValueError(f"Stages: expected at least 1 micro-batch, got parts={self.parts}")
        if counts is None:
            counts = [len(own) for own in np.array_split(range(len(modules)), size)]
        if len(counts) != size or min(counts) < 1 or sum(counts) != len(modules):
            raise ValueError(
                f"Stages: expected at least 1 module for each of {size} ranks, {len(modules)} in "
                f"all, got {list(counts)}"
            )
        begin = sum(counts[: self.comm.rank])
        indices = range(begin, begin + counts[self.comm.rank])
        own = OrderedDict((str(i), modules[i]) for i in indices)
        for name, module in own.items():
            if not isinstance(module, torch.nn.Module):
                raise TypeError(
                    f"Stages: expected a torch module as number {name}, got {type(module).__name__}"
                )
        facts = [f"{len(modules)} modules", f"counts {list(counts)}", f"{self.parts} parts"]
        return torch.nn.Sequential(own), facts

    def _split(self, rows: Any) -> Sequence[Any]:
        """Return micro-batches."""
        if not isinstance(rows, torch.Tensor):
            raise TypeError(f"step: expected a tensor of rows, got {type(rows).__name__}")
        if len(rows) < self.parts:
            raise ValueError(
                f"step: expected at least 1 row in each of {self.parts} micro-batches, "
                f"got {len(rows)} rows"
            )
        micro_batches: Sequence[Any] = rows.tensor_split(self.parts)
        return micro_batches

    def _forward(self, x: Any) -> Any:
        """Run this rank's modules."""
        output = self.module(x)
        # A scalar is the message of a rank that has failed.
        if not isinstance(output, torch.Tensor) or output.ndim == 0:
            *_, (name, _) = self.module.named_children()
            raise TypeError(
                f"step: expected a tensor with rows from module {name}, got {type(output).__name__}"
            )
        return output


class _Passes:
    """The computations of one step, and its messages between neighbouring ranks.

    After an error, the rank computes nothing more, but it still sends a message in place of each
    tensor. So the error stops the ranks that depend on it, and all ranks reach the end of the step.
    """

    def __init__(self, comm: cc.Communicator, module: Any) -> None:
        self._comm = comm
        self._device = next((tensor.device for tensor in module.parameters()), "cpu")
        self._error: Exception | None = None
        self._sends: deque[cc.Request[None]] = deque()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function; return None after an error, and if an argument is None."""
        if self._error is not None or any(argument is None for argument in arguments):
            return None
        try:
            return function(*arguments)
        except cc.CollectiveError:
            # The other ranks of the operation know of it.
            raise
        except Exception as error:
            self._error = error
            return None

    def input(self, inputs: Sequence[Any] | None, part: int) -> Any:
        """Return the input of a micro-batch."""
        if self._comm.rank == 0:
            return None if inputs is None else inputs[part]
        received = self._receive(self._comm.rank - 1)
        return self.run(torch.Tensor.requires_grad_, received)

    def output_gradient(self, result: Any) -> Any:
        """Return the gradient of this rank's result."""
        if self._comm.rank < self._comm.size - 1:
            return self._receive(self._comm.rank + 1)
        return self.run(torch.ones_like, result)

    def send(self, tensor: Any, dest: int) -> None:
        """Send a tensor without waiting for the other rank."""
        # Requests hold their tensors, so completed ones are dropped.
        while self._sends and self._sends[0].done():
            self._sends.popleft().wait()
        x = np.float32(0) if tensor is None else tensor.detach()
        self._sends.append(self._comm.isend(x, dest))

    def end(self, loss: float = 0.0) -> float:
        """Return the last rank's loss, or raise the error of any rank on all of them."""
        for send in self._sends:
            send.wait()
        reports = self._comm.allgather(np.array([[self._error is not None, loss]]))
        if reports[:, 0].any():
            agreement.raise_everywhere(self._error, self._comm, "step")
        return float(reports[-1, 1])

    def _receive(self, source: int) -> Any:
        array = self._comm.recv(source)
        return None if array.ndim == 0 else extend.as_tensor(array).to(self._device)


def _backward(x: Any, result: Any, gradient: Any) -> Any:
    """Propagate a gradient, and return that of `x`."""
    # Frozen modules and inputs without gradients have no graph.
    if result.requires_grad:
        result.backward(gradient)
    return torch.zeros_like(x) if not x.is_leaf or x.grad is None else x.grad
