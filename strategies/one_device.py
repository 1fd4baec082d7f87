"""One replica on one named device: the distributed program without the distribution."""

from __future__ import annotations

from strategies.base import Strategy

__all__ = ["OneDeviceStrategy"]

_DEVICES = ("/cpu:0",)


class OneDeviceStrategy(Strategy):
    """Keep variables and computation on one device; to debug a program, or to compare with.

    Args:
        device: the device's name, "/cpu:0".

    Raises:
        ValueError: there is no such device.
    """

    def __init__(self, device: str = "/cpu:0") -> None:
        super().__init__()
        if device not in _DEVICES:
            raise ValueError(
                f"OneDeviceStrategy: no such device, expected {' '.join(_DEVICES)}, got {device!r}"
            )
        self.device = device

    @property
    def is_chief(self) -> bool:
        """Always true."""
        return True
