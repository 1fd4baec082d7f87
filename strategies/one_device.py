"""One replica on one named device: the distributed program without the distribution."""

from __future__ import annotations

from strategies.strategy import Strategy

__all__ = ["OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """Keep variables and computation on one device; to debug a program, or to compare with.

    Args:
        device: the device's name.

    Raises:
        ValueError: there is no such device.
    """

    def __init__(self, device: str = "/cpu:0") -> None:
        super().__init__([device])
