"""`TrainingSession`: runs a training loop from its start or last checkpoint.

::

    enter    begin of all hooks; the chief restores, all learn the step; after_create; first save
    run      before_run of all hooks -> one step -> after_run of all hooks
             then one exchange of 40 bytes: does any rank want to stop, to save, to leave?
    exit     a last save if there were steps since; end of all hooks; status 85 if asked to stop
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
from strategies.session.hook_base import Hook, HookList
from strategies.session.hooks import SaveCheckpoints, StopAtStep
from strategies.session.session_state import SessionState
from strategies.session.stop_control import StopControl

__all__ = ["TrainingSession"]

R = TypeVar("R")

_log = logging.getLogger(__name__)

_ENDS = (errors.OutOfRangeError, StopIteration)
_RECOVERABLE = (errors.AbortedError, errors.UnavailableError)


class TrainingSession:
    """Steps around which everything else of a long run happens; to be used with `with`.

    A *step* is whatever `run` calls once: a batch, or a whole epoch. Before the first one the state
    is that of the newest checkpoint, if there is one, on all ranks. Checkpoints are written every
    so many steps or seconds, at the beginning, at the end, and when the batch system asks the job
    to stop (`Preemption`); then the end of the block leaves the program with status 85.

    Ranks that train *in step* call `run` equally often; all stop, save and leave after the same
    step, and an error of one rank is raised on all. Others, such as the workers of asynchronous
    parameter servers, wait for each other at the beginning and the end alone, and one of them, the
    chief, saves by itself.

    The end of the input (`OutOfRangeError`, `StopIteration`) ends the block without an error. After
    an error that is `recoverable`, ranks in step go back to the last checkpoint and on from there;
    no other error is ever retried.

    In `run_elastic` a session is opened in `train`, over the ranks that live, and given the state:
    it commits to it every few steps, and begins after the steps of the last commit. Only before the
    first of these does it restore a checkpoint.

    Args:
        saver: what to save, and where; None for nothing. If its manager has no ranks, that of the
            chief is used alone.
        comm: the ranks that train; those of the saver's checkpoints, or of the state, if None.
        state: what those that live go on from when ranks have died; one of its things is `step`.
        commit_steps: how many steps lie between two commits to it.
        in_step: whether they train in step.
        restore: whether to go on from the newest checkpoint.
        save_steps: how many steps lie between two checkpoints; instead of seconds.
        save_seconds: how many seconds, by the chief's clock. None, with `save_steps` None as well:
            only at the beginning, at the end, and when asked to stop.
        metric: name of the value that says how good a checkpoint is, for `CheckpointManager.best`.
        hooks: what else is to be done around the steps; see `strategies.session.hooks`.
        global_step: counts the steps where something else does; each `run` is one if None.
        preemption: that is open already; None for one of the session's own.
        recoverable: kinds of errors after which training goes on from the last checkpoint.
        retries: how many recoveries there may be for one step.
        recover: called after such an error, before anything is restored; may return another saver,
            over the ranks that go on. *Collective* if the session is in step.

    Raises:
        TypeError: the saver is something else.
        ValueError: ranks that are not in step share a saver's manager; or the state is one of other
            ranks, or has no `step`.

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
        keeps = saver is not None or state is not None
        self._recoverable = recoverable if in_step and keeps else ()
        self._retries = integer("TrainingSession", "retries", retries, least=0)
        self._recover_ranks = recover
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
                    "TrainingSession: expected a state of the ranks that train in step, with a "
                    "thing called step, such as State(comm, step=0, model=model), and a "
                    "CheckpointManager(directory, state.comm), got one of other ranks or things"
                )
        self._all = ProcessGroup(comm)  # at the beginning and the end
        self._ranks = self._all if self._in_step else ProcessGroup()  # at every step
        self._kept = SessionState(saver, state, self._all, self._ranks)

    @property
    def step(self) -> int:
        """How many steps have been done, those before the last checkpoint included."""
        return self._step

    @property
    def last_step(self) -> int | None:
        """Step at which the training is to end; None where no hook says it."""
        known = [hook.last_step for hook in self._last_step_hooks if hook.last_step is not None]
        return min(known, default=None)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once."""
        return self._all.rank == 0

    @property
    def preempted(self) -> bool:
        """Whether the session has stopped because the batch system has asked for it."""
        return self._preemption.accepted

    def should_stop(self) -> bool:
        """Whether there is no further step to be made; the same on all ranks that are in step."""
        return self._stop.stopping

    def request_stop(self) -> None:
        """Stop after the current step; on all ranks that are in step, if one of them says so."""
        self._stop.request_stop()

    def request_save(self) -> None:
        """Write a checkpoint after the current step; of ranks not in step, the chief says so."""
        self._stop.request_save()

    def __getitem__(self, name: str) -> Any:
        """Return a thing of the saver: the one that was given last, or restored since."""
        return self._kept[name]

    def update(self, **things: Any) -> None:
        """Hand over things that are no longer the same objects, for the next checkpoint."""
        self._kept.update(things)

    def run(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """Make a step: call a function, and do what is to be done around it.

        *Collective* if the session is in step.

        Args:
            function: one step. If it returns a dict, hooks see it as values by name. Called again
                after a recovery: what depends on `session.step` should ask for it there.
            args: for it.
            kwargs: likewise.

        Returns:
            What it has returned.

        Raises:
            RuntimeError: the session is to stop, or is not open.
            OutOfRangeError: the input has ended; let it leave the block.
            Exception: what the function or a hook has raised; on all ranks that are in step.

        Cost: 2 to 6 us, and an all-reduce of 40 bytes if the session is in step.
        """
        if self._stop.stopping or not self._open:
            raise RuntimeError(
                f"run: expected an open session that is not to stop, which `should_stop` says "
                f"before each step, got one that {'is to stop' if self._open else 'is not open'} "
                f"(step {self._step})"
            )
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
            inject(self._step, self._kept.arrays())
            try:
                return function()
            except StopIteration as error:
                raise errors.OutOfRangeError("run: the input has ended") from error

        result = self._ranks.raise_together("run", body)
        done = self._step
        self._step = done + 1 if self._global_step is None else self._global_step()
        try:
            self._settle(self._show_to_hooks(result))
        except BaseException:
            self._step = done
            raise
        self._steps_done += 1
        if self._state is not None and self._step - self._committed_step >= self._commit_steps:
            self._commit()
        return result

    def _show_to_hooks(self, result: Any) -> Exception | None:
        """Show the values to the hooks; returns the error of one of them."""
        self._values = result if isinstance(result, Mapping) else {}
        try:
            for call in self._hooks.after_run:
                call(self, self._values)
        except Exception as error:
            return error
        return None

    def _settle(self, failure: Exception | None = None) -> None:
        """Agree on what is to be done after this step, and do it."""
        due = self._stop.resolve(self._step, self._steps_done, failure)
        if due.leave and self._state is not None and self._step != self._committed_step:
            self._commit()  # who dies while it is saved takes no step along
        is_saved = self._in_step and self._step == self._saved_step
        # Ranks that are not in step save when all have stopped.
        if due.save and not is_saved and (self._in_step or not due.leave):
            self._save()
        if due.leave and not due.stop:
            self._stop.finished(self._step)

    def _recover(self, error: Exception) -> None:
        """Go back to the last commit, or checkpoint."""
        _log.warning("step %d has failed, going back: %s", self._step, error)
        event_log.write("retried", step=self._step, error=f"{type(error).__name__}: {error}")
        saver = None if self._recover_ranks is None else self._recover_ranks(error)
        if saver is not None:
            self._meet(saver, saver.checkpoints.comm)
        if not self._is_back(self._kept.go_back()):
            raise error
        self._begin_steps()

    def _begin_steps(self) -> None:
        """Let hooks know that the state is there, and learn whether there is anything to do."""
        self._call_hooks("after_create")
        self._stop.meet(self._ranks)
        self._settle()

    def _call_hooks(self, name: str) -> None:
        """Call one method of all hooks, which may be collective."""
        self._all.raise_together(name, lambda: self._hooks.call(name, self))

    def _is_back(self, step: int | None) -> bool:
        """Count from a step to which things have gone back; False if there is none."""
        if step is not None:
            self._step = self._committed_step = step
            self._saved_step = step if self._kept.is_in_file else -1
            event_log.write("restored", step=step, file=self._kept.from_file)
        return step is not None

    def _commit(self) -> None:
        self._kept.commit(self._step)
        self._committed_step = self._step

    def _save(self) -> None:
        """Write a checkpoint; ranks in step together."""
        began = time.monotonic()
        metric = self._values.get(self._metric) if self._metric is not None else None
        path = self._kept.save(self._step, metric)

        def tell() -> None:
            for call in self._hooks.after_save if path is not None and self.is_chief else ():
                call(self, path)

        self._ranks.run_then_agree("save: hooks", tell)
        self._saved_step = self._step
        seconds = time.monotonic() - began
        self._stop.saved(seconds)
        if path is not None:
            event_log.write("saved", step=self._step, seconds=round(seconds, 6))

    def __enter__(self) -> TrainingSession:
        if self._owns_preemption:
            self._preemption.__enter__()
        try:
            self._call_hooks("begin")
            restored = self._is_back(self._kept.begin(self._restores))
            self._open = True
            self._stop.begin()
            self._begin_steps()
            if not restored and self._saved_step < 0:
                self._save()  # what there is to go back to before the next one
            self._all.agree("the session is open")  # nobody trains before it is saved
        except BaseException:
            self._close()
            if self._owns_preemption:
                self._preemption.__exit__(RuntimeError, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End; *collective* unless there is an error.

        Raises:
            SystemExit: with status 85, if the session has stopped because it was asked to.
        """
        well = kind is None or issubclass(kind, _ENDS)
        failed: type[BaseException] | None = RuntimeError
        try:
            if well:
                self._end()
            failed = None if well else kind
        finally:
            self._close()
            if self._owns_preemption:
                self._preemption.__exit__(failed, None, None)
        return well

    def _end(self) -> None:
        if not self._in_step:
            self._all.agree("end of the session")
            if self._steps_done or self._stop.asked:
                self._saved_step = -1  # others may have trained on since this rank saved
        if self._step != self._saved_step:
            self._save()
        if self._state is not None and self._step != self._committed_step:
            self._commit()  # who dies from here on takes no step along
        self._all.raise_together("save", self._kept.wait)
        self._call_hooks("end")
        self._all.agree("the session has ended")

    def _close(self) -> None:
        self._stop.stopping = True
        self._hooks.close()
