"""`tf.DeviceSpec`: the parts of a device's name."""

from __future__ import annotations

import re
from typing import Any, TypedDict

import jax

from replicax.tf._core import devices

_PARTS = ("job", "replica", "task", "device_type", "device_index")


class _Parts(TypedDict):
    job: str | None
    replica: int | None
    task: int | None
    device_type: str | None
    device_index: int | None


class DeviceSpec:
    """A device by its parts, each of which may be left open.

    Args:
        job: the name of a job, such as "worker".
        replica: a number.
        task: the number of a task of the job.
        device_type: such as "GPU".
        device_index: the number of a device of this type.
    """

    def __init__(
        self,
        job: str | None = None,
        replica: int | None = None,
        task: int | None = None,
        device_type: str | None = None,
        device_index: int | None = None,
    ):
        self._parts: _Parts = {
            "job": None if job is None else str(job),
            "replica": None if replica is None else int(replica),
            "task": None if task is None else int(task),
            "device_type": None if device_type is None else str(device_type).upper(),
            "device_index": None if device_index is None else int(device_index),
        }

    @property
    def job(self) -> str | None:
        """The name of the job, or None."""
        return self._parts["job"]

    @property
    def replica(self) -> int | None:
        """The number of the replica, or None."""
        return self._parts["replica"]

    @property
    def task(self) -> int | None:
        """The number of the task, or None."""
        return self._parts["task"]

    @property
    def device_type(self) -> str | None:
        """The type in capital letters, or None."""
        return self._parts["device_type"]

    @property
    def device_index(self) -> int | None:
        """The number of the device, or None for any."""
        return self._parts["device_index"]

    @classmethod
    def from_string(cls, spec: str | jax.Device) -> DeviceSpec:
        """Returns the spec of a name, such as "/job:worker/task:1/device:GPU:0" or "GPU:0", or of a `jax.Device`.

        Raises:
            ValueError: the name has a part that no device's name has.
        """
        (text,) = devices.full_names([spec]) if isinstance(spec, jax.Device) else (spec,)
        found: dict[str, Any] = {}
        for part in filter(None, text.split("/")):
            words = part.split(":")
            if words[0] in ("job", "replica", "task") and len(words) == 2:
                found[words[0]] = words[1]
                continue
            if words[0] == "device" and len(words) > 1:
                words = words[1:]
            elif words[0].upper() not in ("CPU", "GPU", "TPU", "XLA_CPU", "XLA_GPU"):
                words = []
            if not 1 <= len(words) <= 2 or (len(words) == 2 and not re.fullmatch(r"\d+|\*", words[1])):
                raise ValueError(
                    f"Unknown attribute {part.split(':')[0]!r} is encountered while parsing the device spec: {text!r}."
                )
            index = words[1] if len(words) == 2 else "*"
            found.update(device_type=words[0], device_index=None if index == "*" else index)
        return cls(**found)

    def parse_from_string(self, spec: str) -> DeviceSpec:
        """Returns the spec of a name, as `from_string` does."""
        return self.from_string(spec)

    def to_string(self) -> str:
        """Returns the name, with "*" for any device of the type."""
        parts = [f"/{name}:{value}" for name, value in list(self._parts.items())[:3] if value is not None]
        if self.device_type is not None:
            parts.append(f"/device:{self.device_type}:{'*' if self.device_index is None else self.device_index}")
        return "".join(parts)

    def replace(self, **kwargs: str | int | None) -> DeviceSpec:
        """Returns a spec with other parts."""
        return type(self)(**{**self._parts, **kwargs})  # type: ignore[arg-type]

    def make_merged_spec(self, dev: DeviceSpec) -> DeviceSpec:
        """Returns a spec with the parts of `dev`, and with its own where `dev` leaves them open."""
        return self.replace(**{name: value for name, value in dev._parts.items() if value is not None})  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceSpec) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(tuple(self._parts.values()))

    def __repr__(self) -> str:
        return f"<DeviceSpec({', '.join(f'{name}={value}' for name, value in self._parts.items())})>"


def canonical_name(device: DeviceSpec | str | jax.Device | None) -> str:
    """Returns the name of a device that is given as a name, a spec or None, in its full form."""
    if device is None:
        return ""
    return (device if isinstance(device, DeviceSpec) else DeviceSpec.from_string(device)).to_string()
