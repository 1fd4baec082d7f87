"""`TrainingSession`: runs a training loop from its start or last checkpoint.

::

    enter    begin of all hooks; the chief restores, all learn the step; after_create; first save
    run      before_run of all hooks -> one step -> after_run of all hooks
             then one exchange of 40 bytes: does any rank want to stop, to save, to leave?
    exit     last save if there were steps since; end of all hooks; status 85 if asked to stop
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import collectives as cc
from strategies import errors
from strategies.checkpoint.saver import Saver
from strategies.core.validation import integer
from strategies.elastic.elastic_state import State
from strategies.elastic.fault_injection import inject
from strategies.elastic.preemption import Preemption
from strategies.session.hook_base import Hook, HookList
from strategies.session.hooks import SaveCheckpoints, StopAtStep
from strategies.session.session_state import SessionState
from strategies.session.stop_control import StopControl

__all__ = ["TrainingSession"]

R = TypeVar("R")


class TrainingSession:
    """Runs the steps of a training with checkpoints, hooks and preemption; use it with `with`.

    A *step* is one call of `run`: a batch, or a whole epoch. Before the first step all ranks
    restore the newest checkpoint if there is one. Checkpoints are written periodically, at the
    start, at the end, and when the batch system asks the job to stop (`Preemption`). In that case
    the end of the block exits with status 85.

    Ranks that train *in step* call `run` equally often. They all stop, save and exit after the same
    step, and an error of one rank is raised on all. Other ranks, such as the workers of
    asynchronous parameter servers, only synchronize at the start and the end; the chief saves
    alone. Where the job outlives dead ranks, the end waits for the surviving ranks only, and
    replaces `comm` by a communicator of them.

    The end of the input (`OutOfRangeError`, `StopIteration`) ends the block without an error. After
    a `recoverable` error, ranks in step return to the last checkpoint and continue. Other errors
    are never retried.

    In `run_elastic`, open a session in `train` with the state. It commits to the state every few
    steps, and starts after the steps of the last commit. Only before the first commit does it
    restore a checkpoint.

    Args:
        saver: saves and restores the objects; None saves nothing. If its manager has no ranks, only
            the chief's is used.
        comm: the ranks that train; None uses those of the saver's checkpoints or of the state.
        state: state that the surviving ranks resume from after a death; it contains `step`.
        commit_steps: number of steps between two commits to the state.
        in_step: whether the ranks train in step.
        restore: whether to restore the newest checkpoint.
        save_steps: number of steps between two checkpoints; replaces `save_seconds`.
        save_seconds: seconds between two checkpoints by the chief's clock. If both are None,
            checkpoints are written only at the start, at the end, and when asked to stop.
        metric: name of the value that rates a checkpoint, for `CheckpointManager.best`.
        hooks: further actions around the steps; see `strategies.session.hooks`.
        global_step: returns the number of steps if another object counts them; None counts each
            `run` as one.
        preemption: an open `Preemption`; None opens one.
        recoverable: classes of errors after which training resumes from the last checkpoint.
        retries: maximum number of recoveries per step.
        recover: called after such an error, before anything is restored; may return another saver
            over the ranks that continue. *Collective* if the session is in step.

    Raises:
        TypeError: `saver` is not a Saver.
        ValueError: ranks that are not in step share a manager; or the state belongs to other ranks
            or has no `step`.

    Example:
        >>> import numpy as np, strategies
        >>> from strategies.session import TrainingSession, hooks
        >>> weights = np.zeros(2)
        >>> def train_step():
        ...     weights[:] += 1
        ...     return {"loss": 1 / weights[0]}
        >>> with TrainingSession(hooks=[hooks.StopAtStep(3)]) as session:
        ...     while not session.should_stop():
        ...         values = session.run(train_step)
        >>> session.step, weights.tolist()
        (3, [3.0, 3.0])
    """

    def __init__(
        self,
        saver: Saver | None = None,
        comm: cc.Communicator | None = None,
        *,
        state: State | None = None,
        commit_steps: int = 1,
        in_step: bool = True,
        restore: bool = True,
        save_steps: int | None = None,
        save_seconds: float | None = 600.0,
        metric: str | None = None,
        hooks: Iterable[Hook] = (),
        global_step: Callable[[], int] | None = None,
        preemption: Preemption | None = None,
        recoverable: tuple[type[Exception], ...] = (errors.AbortedError, errors.UnavailableError),
        retries: int = 3,
        recover: Callable[[Exception], Saver | None] | None = None,
    ) -> None:
        self._kept = SessionState(
            saver, state, comm, in_step=in_step, commit_steps=commit_steps, restore=restore,
            metric=metric, recover=recover,
        )  # fmt: skip
        every = list(hooks)
        self._stops = [hook for hook in every if isinstance(hook, StopAtStep)]
        if saver is not None and (save_steps, save_seconds) != (None, None):
            seconds = save_seconds if save_steps is None else None
            every.append(SaveCheckpoints(every_steps=save_steps, every_seconds=seconds))
        self._hooks = HookList(every)
        self._global_step = global_step
        self._preemption = Preemption() if preemption is None else preemption
        self._owns_preemption = preemption is None
        # Without a checkpoint or a commit there is nothing to return to, so every error is final.
        self._recoverable = recoverable if in_step and (saver or state) else ()
        self._retries = integer("TrainingSession", "retries", retries, least=0)
        self._values: Mapping[str, Any] = {}
        self._stop = StopControl(self._preemption)

    @property
    def step(self) -> int:
        """Number of steps done, including those before the restored checkpoint."""
        return self._kept.step

    @property
    def last_step(self) -> int | None:
        """Step at which the training ends; None if no hook defines it."""
        return min((h.last_step for h in self._stops if h.last_step is not None), default=None)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes shared files."""
        return self._kept.everyone.rank == 0

    @property
    def preempted(self) -> bool:
        """Whether the session has stopped because the batch system asked it to."""
        return self._preemption.accepted

    def should_stop(self) -> bool:
        """Return whether the training is over; the same on all ranks in step."""
        return self._stop.stopping

    def request_stop(self) -> None:
        """Stop after the current step; one rank in step suffices to stop all."""
        self._stop.request_stop()

    def request_save(self) -> None:
        """Write a checkpoint after this step; if not in step, only the chief's call counts."""
        self._stop.request_save()

    def __getitem__(self, name: str) -> Any:
        """Return an object of the saver, as last passed to `update` or restored."""
        return self._kept[name]

    def update(self, **things: Any) -> None:
        """Replace objects by new ones, for the next checkpoint."""
        self._kept.update(things)

    def run(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """Run a step: call a function, with hooks, checkpoints and recovery around it.

        *Collective* if the session is in step.

        Args:
            function: one step. If it returns a dict, hooks receive it as values by name. It is
                called again after a recovery, so it should read `session.step` itself.
            args: positional arguments of the function.
            kwargs: keyword arguments of the function.

        Returns:
            The result of the function.

        Raises:
            RuntimeError: the session has stopped or is not open.
            OutOfRangeError: the input has ended; let it leave the block.
            Exception: the error of the function or a hook; on all ranks in step.

        Cost: 2 to 6 us, and an all-reduce of 40 bytes if the session is in step.
        """
        if self._stop.stopping or not self._stop.is_open:
            raise RuntimeError(
                f"run: the session {'has stopped' if self._stop.is_open else 'is not open'}, "
                f"expected an open one; check should_stop() before each step (step {self.step})"
            )
        # Counted per step: a step that always fails must not be repeated for ever.
        failures = 0
        while True:
            try:
                return self._attempt(lambda: function(*args, **kwargs))
            except self._recoverable as error:
                failures += 1
                if failures > self._retries:
                    raise
                self._kept.go_back(error)
                self._begin_steps()

    def _attempt(self, function: Callable[[], R]) -> R:
        def body() -> R:
            self._hooks.before_step(self)
            # Inside the step, so that an injected error is recovered like one of the program.
            inject(self._kept.step, self._kept.arrays())
            try:
                return function()
            except StopIteration as error:
                # A StopIteration that leaves a generator of the caller would become a RuntimeError.
                raise errors.OutOfRangeError("run: the input has ended") from error

        result = self._kept.ranks.raise_together("run", body)
        # Restored below if a hook fails on any rank, because the step does not count then.
        done = self._kept.step
        self._kept.step = done + 1 if self._global_step is None else self._global_step()
        self._values = result if isinstance(result, Mapping) else {}
        try:
            # The error of a hook goes into the exchange, and is raised there on all ranks.
            self._stop.settle(self._kept, self._save, self._hooks.after_step(self, self._values))
        except BaseException:
            self._kept.step = done
            raise
        self._stop.steps += 1
        # After the agreement, so that a commit never contains a step that failed on a rank.
        self._kept.commit_if_due()
        return result

    def _begin_steps(self) -> None:
        """Call `after_create` of the hooks, and check whether there is a step to run."""
        self._call_hooks("after_create")
        # After the hooks: a plan is collective, and a hook may fail on one rank.
        self._stop.meet(self._kept.ranks)
        # A hook may stop at once, such as when the last step was restored.
        self._stop.settle(self._kept, self._save)

    def _call_hooks(self, name: str) -> None:
        """Call one method of all hooks, which may be collective; errors are raised on all ranks."""
        self._kept.everyone.raise_together(name, lambda: self._hooks.call(name, self))

    def _save(self) -> None:
        self._stop.seconds_of_save = self._kept.save(
            self._values, lambda path: self._hooks.call("after_save", self, path)
        )

    def __enter__(self) -> TrainingSession:
        with ExitStack() as stack:
            if self._owns_preemption:
                # First, so that a signal during the restore is not lost.
                stack.enter_context(self._preemption)
            stack.callback(self._hooks.close)  # before the preemption ends, which may exit
            stack.callback(self._stop.close)
            self._call_hooks("begin")
            restored = self._kept.begin()
            self._begin_steps()
            if not restored and self._kept.saved_step < 0:
                self._save()  # so that a failure before the first checkpoint can return here
            # No rank trains before the save is complete.
            self._kept.everyone.agree("the session is open")
            self._opened = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> bool:
        """Close the session; *collective* unless there is an error.

        Raises:
            SystemExit: with status 85, if the batch system asked the job to stop.
        """
        # These errors end the block quietly: the input is used up.
        if kind is not None and not issubclass(kind, (errors.OutOfRangeError, StopIteration)):
            self._opened.__exit__(kind, *error)
            return False
        with self._opened:
            self._end()
        return True

    def _end(self) -> None:
        if not self._kept.in_step:
            self._kept.wait_for_survivors("end of the session")
            if self._stop.steps or self._stop.asked:
                self._kept.saved_step = -1  # other ranks may have trained since this rank saved
        if self._kept.step != self._kept.saved_step:
            self._save()
        self._kept.commit()  # a rank that dies from here on does not lose the step
        # The last checkpoint may still be written in the background.
        self._kept.everyone.raise_together("save", self._kept.wait)
        self._call_hooks("end")
        # No rank leaves while another still needs it, such as for an evaluation in `end`.
        self._kept.wait_for_survivors("the session has ended")
