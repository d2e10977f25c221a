"""Device names as users write them, and virtual devices: names of accelerators that stand for CPU devices.

A name has a type and an index (`"GPU:0"`, `"/gpu:1"`, `"/device:CPU:0"`, a full name with job and task).
`set_virtual_devices({"GPU": 4})`, or `REPLICAX_VIRTUAL_DEVICES=GPU:4` in the environment, maps four such
names onto CPU devices of their own, so that a program written for four GPUs runs on a laptop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax

from replicax._base import planning
from replicax._base.errors import DeviceError
from replicax._base.messages import received

# A device as users give it: a name, a `jax.Device`, or an object with a `name`.
DeviceLike: TypeAlias = object

_VARIABLE = "REPLICAX_VIRTUAL_DEVICES"
_FULL_NAME = re.compile(
    r"^(?:/job:(?P<job>\w+))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"/?(?:device:)?(?P<type>[a-z_]+)(?::(?P<index>\d+))?$",
    re.I,
)
_PLATFORM_TYPES = {"gpu": "GPU", "cuda": "GPU", "rocm": "GPU", "tpu": "TPU", "cpu": "CPU"}

_virtual: dict[str, int] = {}  # type -> how many, in the order given; CPU devices are dealt out in that order


def parse_virtual(text: str) -> dict[str, int]:
    """Parses `"GPU:4,CPU:2"` to `{"GPU": 4, "CPU": 2}`; raises `DeviceError` for any other form."""
    counts: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        kind, _, count = item.partition(":")
        if not re.fullmatch(r"[A-Za-z_]+", kind) or not re.fullmatch(r"[1-9]\d*", count) or kind.upper() in counts:
            raise DeviceError(
                f"Virtual devices are given as TYPE:COUNT, separated by commas, each type once, such as "
                f"'GPU:4,CPU:2'; got {text!r}, in which {item!r} does not read so."
            )
        counts[kind.upper()] = int(count)
    return counts


def set_virtual_devices(devices: Mapping[str, int]) -> None:
    """Makes device names stand for CPU devices; to be called before JAX starts its backend.

    Args:
        devices: how many devices of each type, such as `{"GPU": 4}` or `{"GPU": 4, "CPU": 2}`. Each name gets a
            CPU device of its own. Without "CPU" among them, `"CPU:0"` is one more.

    Raises:
        DeviceError: a count is not a positive integer, or JAX has started already with fewer CPU devices.

    >>> import replicax as rx
    >>> rx.config.set_virtual_devices({"GPU": 8, "CPU": 4})  # first of all
    >>> len(rx.config.list_devices()), rx.MirroredStrategy().num_replicas_in_sync
    (12, 8)
    """
    counts = parse_virtual(",".join(f"{kind}:{count}" for kind, count in devices.items()))
    if planning.takes_all_devices:  # those that are planned for have these names
        total, kind = sum(_virtual.values()), next(iter(counts))
        _virtual.clear()
        _virtual[kind] = total
        return
    needed = sum(counts.values()) + ("CPU" not in counts)
    try:
        jax.config.update("jax_num_cpu_devices", needed)
    except RuntimeError as error:
        have = len(jax.local_devices(backend="cpu"))
        if have < needed:
            raise DeviceError(
                f"Virtual devices {dict(devices)} need {needed} CPU devices, but JAX has started already with {have}. "
                f"Call set_virtual_devices before the first use of JAX, or set {_VARIABLE} in the environment."
            ) from error
    else:
        # JAX 0.10 runs many collectives at once on a pool of NPROC threads and deadlocks if these are too few.
        os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 2 * needed)))
    _virtual.clear()
    _virtual.update(counts)


def virtual_count(kind: str) -> int:
    """Returns the number of virtual devices of that type."""
    return _virtual.get(kind, 0)


def configure_from_environment() -> None:
    """Applies `REPLICAX_VIRTUAL_DEVICES`, if it is set."""
    if text := os.environ.get(_VARIABLE):
        set_virtual_devices(parse_virtual(text))


def device_table() -> dict[str, jax.Device]:
    """Returns every device of this process by its short name (`"GPU:0"`). Starts JAX's backend."""
    table: dict[str, jax.Device] = {}
    cpus = jax.local_devices(backend="cpu")
    if _virtual:
        remaining = iter(cpus)
        counts = dict(_virtual)
        counts.setdefault("CPU", 1)
        for kind, count in counts.items():
            for index, device in zip(range(count), remaining):
                table[f"{kind}:{index}"] = device
    for device in jax.local_devices():
        kind = _PLATFORM_TYPES.get(device.platform, device.platform.upper())
        if kind not in _virtual and device.platform != "cpu":
            count = sum(name.startswith(kind + ":") for name in table)
            table[f"{kind}:{count}"] = device
    if not _virtual:
        table.update({f"CPU:{index}": device for index, device in enumerate(cpus)})
    return table


def default_device() -> jax.Device:
    """Returns the device on which JAX puts what is not told where to be: see `jax.default_device`."""
    device: jax.Device | str | None = jax.config.jax_default_device  # type: ignore[attr-defined]
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def default_devices() -> list[str]:
    """Returns the short names of all accelerators or, where there are none, of all CPU devices."""
    table = device_table()
    return [name for name in table if not name.startswith("CPU:")] or list(table)


def short_names(devices: Sequence[DeviceLike]) -> list[str]:
    """Returns the `short_name` of each device; the table of devices is made once for all of them."""
    names = {device: name for name, device in device_table().items()}
    return [
        names.get(device) or f"{_PLATFORM_TYPES.get(device.platform, device.platform.upper())}:{device.id}"
        if isinstance(device, jax.Device)
        else short_name(device)
        for device in devices
    ]


def short_name(device: DeviceLike) -> str:
    """Returns the short name of a device given as a name, a `jax.Device`, or an object with a `name`."""
    if isinstance(device, jax.Device):
        return short_names([device])[0]
    text = device if isinstance(device, str) else getattr(device, "name", None)
    if not isinstance(text, str):
        raise DeviceError(f"A device is given by a name such as 'GPU:0' or as a jax.Device; got {received(device)}.")
    match = _FULL_NAME.match(text)
    if not match or (match["index"] is None and match["type"].upper() not in ("CPU", "GPU", "TPU")):
        raise DeviceError(f"Unknown attribute {text!r} is encountered while parsing the device spec: {text!r}.")
    return f"{match['type'].upper()}:{match['index'] or 0}"


_task = ("localhost", 0)


def set_task(job: str, task: int) -> None:
    """Sets the job and task of this process in its cluster, for the full names of its devices."""
    global _task
    _task = (job, task)


def full_names(devices: Sequence[DeviceLike]) -> tuple[str, ...]:
    """Returns the names with job, replica and task, as `worker_devices` lists them."""
    job, task = _task
    return tuple(f"/job:{job}/replica:0/task:{task}/device:{name}" for name in short_names(devices))


def find_device(
    device: DeviceLike, table: Mapping[str, jax.Device] | None = None, wanted: Sequence[DeviceLike] = ()
) -> jax.Device:
    """Returns the JAX device of that name; raises `DeviceError`, with the devices there are, if there is none.

    The message says how many virtual devices all of `wanted` need.
    """
    if isinstance(device, jax.Device):
        return device
    name, table = short_name(device), table or device_table()
    if name not in table and planning.takes_all_devices:
        return next(iter(table.values()))
    if name not in table:
        kinds: dict[str, int] = {}
        for other in [name, *map(short_name, wanted)]:
            kind, index = other.split(":")
            kinds[kind] = max(kinds.get(kind, 0), int(index) + 1)
        needed = ",".join(f"{kind}:{count}" for kind, count in kinds.items())
        raise DeviceError(
            f"There is no device {name}. This process has: {', '.join(table)}. For names of devices that this machine "
            f"lacks, ask for virtual ones: {_VARIABLE}={needed} in the environment, or "
            "replicax.config.set_virtual_devices before JAX starts."
        )
    return table[name]


def find_devices(devices: Sequence[DeviceLike] | None) -> list[jax.Device]:
    """Returns the JAX devices of these names; where none are given, all accelerators or else all CPU devices."""
    if isinstance(devices, str):
        raise DeviceError(
            f"`devices` is a list of devices; got the string {devices!r}. For one device write [{devices!r}]."
        )
    if devices is not None and not isinstance(devices, Iterable):
        raise DeviceError(
            f'`devices` is a list of devices; got {devices!r}. For so many write ["GPU:0", "GPU:1", ...]; without '
            "`devices` all accelerators are taken."
        )
    if planning.takes_all_devices:
        devices = None
    names, table = list(devices) if devices else default_devices(), device_table()
    found = [find_device(name, table, names) for name in names]
    if len(set(found)) < len(found):
        raise AssertionError(
            f"No duplicates allowed in `devices` argument: ({', '.join(map(short_name, names))}). This process has: "
            f"{', '.join(device_table())}."
        )
    return found
