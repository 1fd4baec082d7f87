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
    """How ranks exchange gradients, and other arrays that replicas reduce.

    Attributes:
        bytes_per_pack: arrays are packed into buffers of slightly more than this size; 0 for a
            single buffer.
        compression: `cc.FP16`, `cc.BF16`, `cc.INT8` or `cc.TOPK(...)` for gradients, and for
            `all_reduce` in a replica. `strategy.reduce`, `gather` and variables are never rounded.
            None is `cc.NONE`.
        timeout: seconds that ranks wait for each other, at synchronization points of replicas and
            at the end of `run`, before `cc.CollectiveTimeout`; None for the setting.
        algorithm: algorithm of the all-reduce; arrays are not packed unless it is "auto".

    Raises:
        ValueError: `bytes_per_pack` is negative, or the timeout is not positive.

    Example:
        >>> CommunicationOptions(bytes_per_pack=1 << 20).over(CommunicationOptions(timeout=5))
        CommunicationOptions(bytes_per_pack=1048576, ..., timeout=5, algorithm='auto')
    """

    bytes_per_pack: int = 0
    compression: cc.Compression | None = cc.NONE
    timeout: float | None = None
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        if self.compression is None:  # accepted as in other libraries
            object.__setattr__(self, "compression", cc.NONE)
        # `index` rejects floats, which cannot be a number of bytes.
        if operator.index(self.bytes_per_pack) < 0:
            raise ValueError(
                f"CommunicationOptions: bad bytes_per_pack, expected >= 0, got "
                f"{self.bytes_per_pack}"
            )
        # `not >` instead of `<=`, so that NaN is rejected.
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(
                f"CommunicationOptions: bad timeout, expected seconds > 0, got {self.timeout}"
            )

    def over(self, earlier: CommunicationOptions) -> CommunicationOptions:
        """Return these options; fields with default values are taken from `earlier`."""
        # A field equal to the default counts as not given.
        default = vars(CommunicationOptions())
        mine = {name: value for name, value in vars(self).items() if value != default[name]}
        return dataclasses.replace(earlier, **mine)

    def packs(self, nbytes: Sequence[int]) -> list[list[int]]:
        """Assign arrays to packs, the last arrays first, because their gradients are ready first.

        Args:
            nbytes: bytes of every array.

        Returns:
            for each pack the indices of its arrays. A pack is full when it exceeds
            `bytes_per_pack`.

        Example:
            >>> CommunicationOptions(bytes_per_pack=4).packs([3, 2, 3, 9, 1])
            [[4, 3], [2, 1], [0]]
        """
        packs: list[list[int]] = []
        room = 0
        for index in reversed(range(len(nbytes))):
            # The first array of a pack creates it, so that no pack is empty.
            if not packs or (self.bytes_per_pack and room < 0):
                packs.append([])
                room = self.bytes_per_pack
            packs[-1].append(index)
            room -= nbytes[index]
        return packs
