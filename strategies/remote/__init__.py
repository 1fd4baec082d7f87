"""Named things on a task, used from other tasks: messages, the service behind them, functions."""

from __future__ import annotations

from strategies.remote.containers import container
from strategies.remote.functions import RemoteTraceback, Task, TaskFuture
from strategies.remote.mutex import MutexLock
from strategies.remote.service import Service

__all__ = ["MutexLock", "RemoteTraceback", "Service", "Task", "TaskFuture", "container"]
