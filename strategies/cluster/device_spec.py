"""Device names: job, task and device."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from strategies.core.validation import integer

__all__ = ["DeviceSpec"]

_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)  # of a job, or of a device type
_NUMBER = re.compile(r"[0-9]{1,18}")  # fits int64
_KNOWN = ("CPU", "GPU", "TPU")  # accepted in lower case, and without "device:"


@dataclass(frozen=True)
class DeviceSpec:
    """A full or partial device; None matches any value.

    Args:
        job: name of a job.
        replica: always 0 here; accepted because names of other programs may have it.
        task: index of a task of the job.
        device_type: "CPU", "GPU", "TPU" in any case, or another word.
        device_index: number of the device among those of its type.

    Raises:
        ValueError: a name or number is invalid.

    Example:
        >>> DeviceSpec.from_string("gpu:1/job:ps/task:0")
        DeviceSpec('/job:ps/task:0/device:GPU:1')
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    device_type: str | None = None
    device_index: int | None = None

    def __post_init__(self) -> None:
        if self.job is not None and not (isinstance(self.job, str) and _NAME.fullmatch(self.job)):
            raise ValueError(f"DeviceSpec: not the name of a job, got {self.job!r}")
        for field in ("replica", "task", "device_index"):
            if getattr(self, field) is not None:
                integer("DeviceSpec", field, getattr(self, field), least=0)
        kind = self.device_type
        if kind is not None:
            if not isinstance(kind, str) or not _NAME.fullmatch(kind):
                raise ValueError(f"DeviceSpec: not a type of devices, got {kind!r}")
            known = kind.upper() in _KNOWN
            # The dataclass is frozen, so that specs can be keys and be shared.
            object.__setattr__(self, "device_type", kind.upper() if known else kind)

    @classmethod
    def from_string(cls, text: str) -> DeviceSpec:
        """Parse a device name.

        Args:
            text: parts such as job:ps, replica:0, task:1, device:GPU:0, cpu:0 and gpu in any order,
                separated by /; "" for any device. The last of several jobs, replicas or tasks
                counts, as in TensorFlow.

        Raises:
            ValueError: the text is not a device name, or has two devices.
            TypeError: `text` is not a string.
        """
        if not isinstance(text, str):
            raise TypeError(f"device: expected a text such as /job:ps/task:0/cpu:0, got {text!r}")
        parts = text.removeprefix("/")
        has_device = False
        found: dict[str, Any] = {}
        for part in parts.split("/") if parts else ():
            thing, fields = _parse_part(part, text)
            if thing == "device":
                if has_device:
                    raise ValueError(f"device: more than one device, expected one, got {text!r}")
                has_device = True
            # A later part replaces an earlier one, except devices.
            found |= fields
        return cls(**found)

    def to_string(self) -> str:
        """Return the name without fields that match any value; "*" for half of a device part."""
        parts = []
        for field in ("job", "replica", "task"):
            value = getattr(self, field)
            if value is not None:
                parts.append(f"/{field}:{value}")
        if self.device_type is not None or self.device_index is not None:
            index = "*" if self.device_index is None else self.device_index
            # TensorFlow's form of a device with one half unknown.
            parts.append(f"/device:{self.device_type or '*'}:{index}")
        return "".join(parts)

    def make_merged_spec(self, other: DeviceSpec) -> DeviceSpec:
        """Return a device with the fields of `other`, and this one's where `other` has None."""
        fields = ("job", "replica", "task", "device_type", "device_index")
        given = {f: getattr(other, f) for f in fields if getattr(other, f) is not None}
        return replace(self, **given)

    def replace(self, **fields: Any) -> DeviceSpec:
        """Return a device with some fields replaced; None matches any value."""
        return replace(self, **fields)

    def __str__(self) -> str:
        return self.to_string()

    def __repr__(self) -> str:
        return f"DeviceSpec({self.to_string()!r})"


def _parse_part(part: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return the key of one part of a name, and its fields."""
    key, colon, value = part.partition(":")
    if key == "job":
        if not _NAME.fullmatch(value):
            raise ValueError(f"device: not the name of a job, got {value!r} (device: {text})")
        return key, {key: value}
    if key in ("replica", "task"):
        return key, {key: _number(value, text)}
    if key == "device":
        kind, colon, index = value.partition(":")
        if not kind or not colon:
            raise ValueError(f"device: expected device:TYPE:INDEX, got {part!r} (device: {text})")
        return key, {**_kind(kind), "device_index": _index(index, text)}
    # The short form of names of TensorFlow 1, such as /gpu:0.
    if key.upper() in _KNOWN:
        return "device", {**_kind(key), "device_index": _index(value if colon else "*", text)}
    raise ValueError(
        f"device: unknown attribute {key!r}, expected job replica task device cpu gpu tpu "
        f"(device: {text})"
    )


def _kind(kind: str) -> dict[str, Any]:
    return {} if kind == "*" else {"device_type": kind}


def _index(value: str, text: str) -> int | None:
    return None if value == "*" else _number(value, text)


def _number(value: str, text: str) -> int:
    if not _NUMBER.fullmatch(value):
        raise ValueError(
            f"device: expected a number >= 0 of at most 18 digits, got {value!r} (device: {text})"
        )
    return int(value)
