"""Handler of XLA programs that repeats calls without Python.

XLA calls a C function with the address of a *frame*, which holds the addresses of operands and
results and the number of a call. The function (`collectives.kernels.xla_handler_kernel`) takes the
GIL, because it writes flight records and the gate as `collectives.calls.fast_path` does, and runs
the kernel of the call's plan. The kernel releases the GIL. Calls without a plan of the node engine,
and calls of an unusable communicator, go to a function in Python.
"""

from __future__ import annotations

import ctypes
from typing import Any

from collectives.calls.fast_path import address_of, is_usable, slot_address
from collectives.calls.group import Group
from collectives.kernels import machine_code
from collectives.kernels.xla_handler_layout import Call, Table

__all__ = ["XlaHandler", "create_xla_handler"]

# Calls by Python before the handler gives up learning a call: the first one makes the plan, the
# second one finds it.
_MOST_TRIES = 4


def create_xla_handler(python: int, complete: int) -> XlaHandler | None:
    """Return a handler; None without compiled code for this Python. Arguments as `XlaHandler`."""
    return XlaHandler(python, complete) if is_usable() else None


class XlaHandler:
    """C function that XLA calls for the operations of programs.

    Args:
        python: address of a C function that runs the call of a frame, `void *(int64_t frame)`.
        complete: address of a C function that completes the call of a frame by `complete`,
            `void *(int64_t frame, int64_t status)`.

    Attributes:
        address: address of the handler, `void *(int64_t frame)`.
    """

    def __init__(self, python: int, complete: int) -> None:
        self._calls = (Call * 64)()
        # Objects that the calls refer to.
        self._kept: dict[int, Any] = {}
        self._tries: dict[int, int] = {}
        self._table = Table(
            calls=ctypes.addressof(self._calls), none=id(None), python=python, complete=complete,
            repeat=machine_code.load("collectives.kernels.fast_path_kernel", "repeat_at"),
            take_gil=address_of(ctypes.pythonapi.PyGILState_Ensure),
            drop_gil=address_of(ctypes.pythonapi.PyGILState_Release),
        )  # fmt: skip
        self.address: int = machine_code.bound_address(
            ctypes.addressof(self._table), "collectives.kernels.xla_handler_kernel", "handle"
        )

    def add(self, number: int) -> None:
        """Add a call, which Python runs until it is learned."""
        while number >= len(self._calls):
            larger = (Call * (2 * len(self._calls)))()
            ctypes.memmove(larger, self._calls, ctypes.sizeof(self._calls))
            self._table.calls, self._calls = ctypes.addressof(larger), larger

    def learn(self, number: int, group: Group, user: Group) -> bool:
        """Repeat a call from now on, if the newest call of its group had a plan for that.

        Args:
            number: number of the call.
            group: ranks of the call, whose newest call must be this one.
            user: ranks that must be usable, otherwise Python runs the call.

        Returns:
            False if no further try is worthwhile.
        """
        self.forget(number)
        found = group.fast_path.take_newest(group)
        if found is not None:
            entry, objects = found
            self._kept[number] = group, user, entry, objects
            call = self._calls[number]
            call.state = ctypes.addressof(group.fast_path.state)
            call.unusable = slot_address(user, "unusable")
            call.entry = ctypes.addressof(entry)
            return True
        self._tries[number] = self._tries.get(number, 0) + 1
        return self._tries[number] < _MOST_TRIES

    def complete(self, number: int, status: int) -> None:
        """Complete a call after a status of its kernel; errors as `PreparedCall.run`."""
        group = self._kept[number][0]
        group.gate.complete(status, None, None, None, None)

    def forget(self, number: int) -> None:
        """Let Python run a call; its objects may be freed."""
        self._calls[number].entry = 0
        self._kept.pop(number, None)
