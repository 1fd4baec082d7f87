"""Options of the exchange among replicas."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import collectives as cc

__all__ = ["CommunicationOptions"]


@dataclass(frozen=True)
class CommunicationOptions:
    """How gradients, and other arrays that replicas reduce, travel between ranks.

    Attributes:
        bytes_per_pack: many arrays travel as packs of somewhat more than so many bytes each; 0 for
            all in one.
        compression: `cc.FP16`, `cc.BF16` or `cc.INT8` for gradients and for `all_reduce` in a
            replica; what `strategy.reduce`, `gather` and variables exchange is never rounded. None
            is `cc.NONE`.
        timeout: seconds that ranks wait for each other, wherever replicas meet and at the end of
            `run`; None for the setting. Past it there is a `cc.CollectiveTimeout`.
        algorithm: of the all-reduce; arrays travel one by one if it is not "auto".

    Raises:
        ValueError: a negative `bytes_per_pack`, or a timeout that is not positive.

    Example:
        >>> CommunicationOptions(bytes_per_pack=1 << 20).over(CommunicationOptions(timeout=5))
        CommunicationOptions(bytes_per_pack=1048576, ..., timeout=5, algorithm='auto')
    """

    bytes_per_pack: int = 0
    compression: cc.Compression | None = cc.NONE
    timeout: float | None = None
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        if self.compression is None:  # as other libraries say it
            object.__setattr__(self, "compression", cc.NONE)
        if operator.index(self.bytes_per_pack) < 0:
            raise ValueError(
                f"CommunicationOptions: bad bytes_per_pack, expected >= 0, got "
                f"{self.bytes_per_pack}"
            )
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(
                f"CommunicationOptions: bad timeout, expected seconds > 0, got {self.timeout}"
            )

    def over(self, earlier: CommunicationOptions) -> CommunicationOptions:
        """Return these options, with those of `earlier` where these are the defaults."""
        default = vars(CommunicationOptions())
        mine = {name: value for name, value in vars(self).items() if value != default[name]}
        return dataclasses.replace(earlier, **mine)

    def packs(self, nbytes: Sequence[int]) -> list[list[int]]:
        """Sort arrays into packs, the last arrays first: their gradients are ready first.

        Args:
            nbytes: the bytes of every array.

        Returns:
            For each pack the indices of its arrays. A pack is full when it holds more than
            `bytes_per_pack`.

        Example:
            >>> CommunicationOptions(bytes_per_pack=4).packs([3, 2, 3, 9, 1])
            [[4, 3], [2, 1], [0]]
        """
        packs: list[list[int]] = []
        room = 0
        for index in reversed(range(len(nbytes))):
            if not packs or (self.bytes_per_pack and room < 0):
                packs.append([])
                room = self.bytes_per_pack
            packs[-1].append(index)
            room -= nbytes[index]
        return packs
