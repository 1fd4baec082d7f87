"""`TrainingSession`: runs a training loop from its start or last checkpoint.

::

    enter    begin of all hooks; the chief restores, all learn the step; after_create; first save
    run      before_run of all hooks -> one step -> after_run of all hooks
             then one exchange of 40 bytes: does any rank want to stop, to save, to leave?
    exit     last save if there were steps since; end of all hooks; status 85 if asked to stop
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import collectives as cc
from strategies import errors
from strategies.checkpoint.saver import Saver
from strategies.core.process_group import ProcessGroup
from strategies.core.validation import integer
from strategies.elastic import event_log
from strategies.elastic.elastic_state import State
from strategies.elastic.fault_injection import inject
from strategies.elastic.preemption import Preemption
from strategies.elastic.surviving_ranks import retry_on_survivors
from strategies.session.hook_base import Hook, HookList
from strategies.session.hooks import SaveCheckpoints, StopAtStep
from strategies.session.session_state import SessionState
from strategies.session.stop_control import StopControl

__all__ = ["TrainingSession"]

R = TypeVar("R")

_log = logging.getLogger(__name__)

# Errors that end the block quietly: the input is used up.
_ENDS = (errors.OutOfRangeError, StopIteration)
_RECOVERABLE = (errors.AbortedError, errors.UnavailableError)


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
        recoverable: tuple[type[Exception], ...] = _RECOVERABLE,
        retries: int = 3,
        recover: Callable[[Exception], Saver | None] | None = None,
    ) -> None:
        if saver is not None and not hasattr(saver, "checkpoints"):
            raise TypeError(f"TrainingSession: expected a Saver or None, got {saver!r}")
        shared = None if saver is None else saver.checkpoints.comm
        # Saving together is collective, and these ranks reach their steps at different times.
        if shared is not None and not in_step:
            raise ValueError(
                "TrainingSession: ranks that are not in step cannot save together, expected a "
                "CheckpointManager without ranks, got one with a communicator"
            )
        self._in_step, self._restores, self._metric = in_step, restore, metric
        self._state = state
        self._commit_steps = integer("TrainingSession", "commit_steps", commit_steps)
        every = list(hooks)
        self._last_step_hooks = [hook for hook in every if isinstance(hook, StopAtStep)]
        if saver is not None and (save_steps, save_seconds) != (None, None):
            seconds = save_seconds if save_steps is None else None
            every.append(SaveCheckpoints(every_steps=save_steps, every_seconds=seconds))
        self._hooks = HookList(every)
        self._global_step = global_step
        self._preemption = Preemption() if preemption is None else preemption
        self._owns_preemption = preemption is None
        # Without a checkpoint or a commit there is nothing to return to, so every error is final.
        keeps = saver is not None or state is not None
        self._recoverable = recoverable if in_step and keeps else ()
        self._retries = integer("TrainingSession", "retries", retries, least=0)
        self._recover_ranks = recover
        # -1: the first state is not in a file yet, even if it is that of step 0.
        self._step, self._saved_step, self._committed_step, self._steps_done = 0, -1, 0, 0
        self._values: Mapping[str, Any] = {}
        self._stop = StopControl(self._preemption)
        self._open = False
        self._meet(saver, shared if comm is None else comm)

    def _meet(self, saver: Saver | None, comm: cc.Communicator | None) -> None:
        state = self._state
        if state is not None:
            comm = state.comm if comm is None else comm
            if comm is not state.comm or not self._in_step or "step" not in state:
                raise ValueError(
                    "TrainingSession: expected a state of the ranks that train in step that "
                    "contains step, such as State(comm, step=0, model=model), and a "
                    "CheckpointManager(directory, state.comm), got other ranks or no step"
                )
        self._all = ProcessGroup(comm)  # synchronizes at the start and the end
        self._ranks = self._all if self._in_step else ProcessGroup()  # synchronizes in every step
        self._kept = SessionState(saver, state, self._all, self._ranks)

    @property
    def step(self) -> int:
        """Number of steps done, including those before the restored checkpoint."""
        return self._step

    @property
    def last_step(self) -> int | None:
        """Step at which the training ends; None if no hook defines it."""
        known = [hook.last_step for hook in self._last_step_hooks if hook.last_step is not None]
        return min(known, default=None)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes shared files."""
        return self._all.rank == 0

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
        if self._stop.stopping or not self._open:
            raise RuntimeError(
                f"run: the session {'has stopped' if self._open else 'is not open'}, expected an "
                f"open one; check should_stop() before each step (step {self._step})"
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
                self._recover(error)

    def _attempt(self, function: Callable[[], R]) -> R:
        def body() -> R:
            for call in self._hooks.before_run:
                call(self)
            # Inside the step, so that an injected error is recovered like one of the program.
            inject(self._step, self._kept.arrays())
            try:
                return function()
            except StopIteration as error:
                # A StopIteration that leaves a generator of the caller would become a RuntimeError.
                raise errors.OutOfRangeError("run: the input has ended") from error

        result = self._ranks.raise_together("run", body)
        # Restored below if a hook fails on any rank, because the step does not count then.
        done = self._step
        self._step = done + 1 if self._global_step is None else self._global_step()
        try:
            self._settle(self._show_to_hooks(result))
        except BaseException:
            self._step = done
            raise
        self._steps_done += 1
        # After the agreement on this step, so that a commit never contains a step that failed on a
        # rank.
        if self._state is not None and self._step - self._committed_step >= self._commit_steps:
            self._commit()
        return result

    def _show_to_hooks(self, result: Any) -> Exception | None:
        """Call the hooks with the values; return the error of the first that fails."""
        self._values = result if isinstance(result, Mapping) else {}
        try:
            for call in self._hooks.after_run:
                call(self, self._values)
        except Exception as error:
            return error
        return None

    def _settle(self, failure: Exception | None = None) -> None:
        """Agree on the actions after this step, and run them."""
        # The error of a hook goes into the exchange, and is raised there on all ranks.
        due = self._stop.resolve(self._step, self._steps_done, failure)
        # Commit before saving: if a rank dies during the save, this step is not lost.
        if due.leave and self._state is not None and self._step != self._committed_step:
            self._commit()
        # If not in step, other ranks may have changed the variables since this rank saved.
        is_saved = self._in_step and self._step == self._saved_step
        # Ranks that are not in step save in `_end`, when all have stopped.
        if due.save and not is_saved and (self._in_step or not due.leave):
            self._save()
        if due.leave and not due.stop:
            # A training that is over anyway ends without status 85, which would requeue the job.
            self._stop.finished(self._step)

    def _recover(self, error: Exception) -> None:
        """Return to the last commit or checkpoint."""
        _log.warning("step %d has failed, going back: %s", self._step, error)
        event_log.write("retried", step=self._step, error=f"{type(error).__name__}: {error}")
        saver = None if self._recover_ranks is None else self._recover_ranks(error)
        if saver is not None:
            # The ranks may have changed, so all agreements need the new communicator.
            self._meet(saver, saver.checkpoints.comm)
        if not self._is_back(self._kept.go_back()):
            # No checkpoint and no commit exist yet, so the error is final.
            raise error
        self._begin_steps()

    def _begin_steps(self) -> None:
        """Call `after_create` of the hooks, and check whether there is a step to run."""
        self._call_hooks("after_create")
        # After the hooks: a plan is collective, and a hook may fail on one rank.
        self._stop.meet(self._ranks)
        # A hook may stop at once, such as when the last step was restored.
        self._settle()

    def _call_hooks(self, name: str) -> None:
        """Call one method of all hooks, which may be collective; errors are raised on all ranks."""
        self._all.raise_together(name, lambda: self._hooks.call(name, self))

    def _is_back(self, step: int | None) -> bool:
        """Set the step counters to a restored step; return False if there is none."""
        if step is not None:
            # After a checkpoint the state was committed as well; see `SessionState.begin`.
            self._step = self._committed_step = step
            self._saved_step = step if self._kept.is_in_file else -1
            event_log.write("restored", step=step, file=self._kept.from_file)
        return step is not None

    def _commit(self) -> None:
        self._kept.commit(self._step)
        self._committed_step = self._step

    def _save(self) -> None:
        """Write a checkpoint; together if in step."""
        began = time.monotonic()
        metric = self._values.get(self._metric) if self._metric is not None else None
        path = self._kept.save(self._step, metric)

        def tell() -> None:
            for call in self._hooks.after_save if path is not None and self.is_chief else ():
                call(self, path)

        # Only the chief calls hooks here, so its error must reach the other ranks.
        self._ranks.run_then_agree("save: hooks", tell)
        self._saved_step = self._step
        # Includes the hooks: the grace period of a preemption must suffice for both.
        seconds = time.monotonic() - began
        self._stop.saved(seconds)
        if path is not None:
            event_log.write("saved", step=self._step, seconds=round(seconds, 6))

    def __enter__(self) -> TrainingSession:
        if self._owns_preemption:
            # First, so that a signal during the restore is not lost.
            self._preemption.__enter__()
        try:
            self._call_hooks("begin")
            restored = self._is_back(self._kept.begin(self._restores))
            self._open = True
            self._stop.begin()
            self._begin_steps()
            if not restored and self._saved_step < 0:
                self._save()  # so that a failure before the first checkpoint can return here
            self._all.agree("the session is open")  # no rank trains before the save is complete
        except BaseException:
            try:
                self._close()
            finally:
                if self._owns_preemption:
                    # With an error, so that it does not exit with status 85 instead of raising.
                    self._preemption.__exit__(RuntimeError, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Close the session; *collective* unless there is an error.

        Raises:
            SystemExit: with status 85, if the batch system asked the job to stop.
        """
        well = kind is None or issubclass(kind, _ENDS)
        failed: type[BaseException] | None = RuntimeError
        try:
            try:
                if well:
                    self._end()
            finally:
                # Before the preemption, which may exit.
                self._close()
            failed = None if well else kind
        finally:
            if self._owns_preemption:
                self._preemption.__exit__(failed, None, None)
        return well

    def _end(self) -> None:
        if not self._in_step:
            self._wait_for_survivors("end of the session")
            if self._steps_done or self._stop.asked:
                self._saved_step = -1  # other ranks may have trained since this rank saved
        if self._step != self._saved_step:
            self._save()
        if self._state is not None and self._step != self._committed_step:
            self._commit()  # a rank that dies from here on does not lose the step
        # The last checkpoint may still be written in the background.
        self._all.raise_together("save", self._kept.wait)
        self._call_hooks("end")
        # No rank leaves while another still needs it, such as for an evaluation in `end`.
        self._wait_for_survivors("the session has ended")

    def _wait_for_survivors(self, point: str) -> None:
        """Wait until all ranks are at a point; out of step, only until the surviving ranks are.

        If the chief has died, the first surviving rank is the chief from then on.
        """
        comm = self._all.comm
        # In step, the surviving ranks have lost a part of the batch, so they raise.
        if self._in_step or comm is None:
            self._all.agree(point)
            return
        self._all.comm = retry_on_survivors(comm, lambda ranks: ProcessGroup(ranks).agree(point))
        if lost := comm.size - self._all.size:
            _log.warning("%d of %d ranks have died; the session ends without them", lost, comm.size)

    def _close(self) -> None:
        self._stop.stopping = True
        self._hooks.close()
