"""Remote procedure calls among tasks: services, functions, named resources and locks."""

from strategies.rpc.functions import RemoteTraceback, Task, TaskFuture
from strategies.rpc.mutex import MutexLock
from strategies.rpc.registry import container
from strategies.rpc.service import Service

__all__ = ["MutexLock", "RemoteTraceback", "Service", "Task", "TaskFuture", "container"]
