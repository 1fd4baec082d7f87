"""Placement rules of variables and operations.

1. A full device name is used unchanged.
2. Without a job: the task's job is worker, or the only job. Without job and task: the default task,
   which is the chief, else worker 0.
3. With a job but no task: its first task.
4. Without a device type: the first type that the thing supports and the task has.
5. Without an index: the task's first device of that type.

A missing device is an error. With soft placement the thing is placed on another device of the same
task instead; an unknown job or task remains an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from strategies.cluster.device_spec import DeviceSpec
from strategies.cluster.scopes import PlacementRequest, requested_device
from strategies.errors import InvalidArgumentError

__all__ = ["Placer", "devices_of"]

_log = logging.getLogger(__name__)

Task = tuple[str, int]


def devices_of(
    cpus: int = 1, gpus: int = 0, others: Mapping[str, int] | None = None
) -> tuple[DeviceSpec, ...]:
    """Return the devices of a task, without its job and index.

    Args:
        cpus: number of CPU devices, which are names for threads.
        gpus: number of GPU devices.
        others: type, such as "TPU" -> number.
    """
    # The order matters: `_device` prefers types in reverse order.
    counts = {"CPU": cpus, "GPU": gpus, **(others or {})}
    return tuple(
        DeviceSpec(device_type=kind, device_index=i) for kind in counts for i in range(counts[kind])
    )


class Placer:
    """Chooses devices of a cluster for things.

    Args:
        tasks: (job, index) -> devices of the task, as `devices_of` returns them.
        soft_placement: use another device of the same task if the named one does not exist or
            cannot hold the thing.
        log_device_placement: log the device of each thing at level INFO.

    Attributes:
        default: (job, index) of the task for things without a device.
    """

    def __init__(
        self,
        tasks: Mapping[Task, Sequence[DeviceSpec]],
        *,
        soft_placement: bool = False,
        log_device_placement: bool = False,
    ) -> None:
        self._tasks = {task: tuple(devices) for task, devices in tasks.items()}
        self._jobs = {job: [i for j, i in self._tasks if j == job] for job, _ in self._tasks}
        self._soft = soft_placement
        self._logs = log_device_placement
        self.default = min(self._tasks, key=lambda task: (_DEFAULT_JOBS.get(task[0], 2), task))

    def devices(self) -> list[DeviceSpec]:
        """Return all devices of the cluster."""
        return [
            device.replace(job=job, replica=0, task=index)
            for (job, index), devices in self._tasks.items()
            for device in devices
        ]

    def place(self, thing: PlacementRequest) -> DeviceSpec:
        """Return the full device of a thing, from its own device and the enclosing blocks.

        Raises:
            InvalidArgumentError: the device does not exist, or cannot hold the thing.
        """
        wish = requested_device(thing)
        job, index = self._task(thing, wish)
        found = self._device(thing, wish, self._tasks[job, index])
        place = found.replace(job=job, replica=0, task=index)
        if self._logs:
            _log.info("%s: (%s): %s", thing.name, thing.type, place)
        return place

    def _task(self, thing: PlacementRequest, wish: DeviceSpec) -> Task:
        # Rules 2 and 3 of the module's docstring.
        job, index = wish.job, wish.task
        if job is None and index is None:
            job, index = self.default
        elif job is None:
            job = "worker" if "worker" in self._jobs else self.default[0]
        elif index is None and job in self._jobs:
            index = min(self._jobs[job])
        # An unknown job has no first task; the error below lists the known ones.
        assert index is not None or job not in self._jobs
        if index is None or (job, index) not in self._tasks or wish.replica not in (None, 0):
            raise self._refusal(thing, wish, [f"/job:{j}/task:{i}" for j, i in self._tasks])
        return job, index

    def _device(
        self, thing: PlacementRequest, wish: DeviceSpec, devices: Sequence[DeviceSpec]
    ) -> DeviceSpec:
        # Things that support all types prefer the last ones listed: TPUs, GPUs, then CPUs.
        kinds = thing.device_types or [*dict.fromkeys(str(d.device_type) for d in devices)][::-1]
        # Rules 4 and 5.
        possible = [d for kind in kinds for d in devices if d.device_type == kind]
        fitting = [
            device
            for device in possible
            if wish.device_type in (None, device.device_type)
            and wish.device_index in (None, device.device_index)
        ]
        if fitting:
            # Devices are in order of their index, so this is the first one of the best type.
            return fitting[0]
        # Never on another task: which task serves a thing must not depend on its devices.
        if self._soft and possible:
            return possible[0]
        raise self._refusal(thing, wish, [d.to_string() for d in possible])

    def _refusal(
        self, thing: PlacementRequest, wish: DeviceSpec, available: Sequence[str]
    ) -> InvalidArgumentError:
        listed = ", ".join(available[:_LISTED]) or "none"
        more = f" and {len(available) - _LISTED} more" if len(available) > _LISTED else ""
        return InvalidArgumentError(
            f"place: cannot assign a device for {thing.type} {thing.name!r}, expected one of "
            f"{listed}{more}, got {wish}"
        )


_DEFAULT_JOBS = {"chief": 0, "worker": 1}  # order of preference; other jobs follow
_LISTED = 16  # devices in an error
