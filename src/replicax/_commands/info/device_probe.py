"""Prints the devices that JAX finds, as JSON: a program of its own, since an accelerator that hangs would hang it."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Starts JAX's backend, and prints what it has."""
    import jax

    import replicax  # noqa: F401  (which applies REPLICAX_VIRTUAL_DEVICES)
    from replicax._base import devices

    def memory(device: jax.Device) -> int | None:
        try:
            limit: int | None = (device.memory_stats() or {}).get("bytes_limit")
        except Exception:  # a platform that keeps no account
            return None
        return limit

    found = [
        {"name": name, "kind": device.device_kind, "platform": device.platform, "memory": memory(device)}
        for name, device in devices.device_table().items()
    ]
    virtual = {kind: devices.virtual_count(kind) for kind in {str(each["name"]).partition(":")[0] for each in found}}
    virtual = {kind: count for kind, count in sorted(virtual.items()) if count}
    json.dump({"platform": jax.default_backend(), "devices": found, "virtual": virtual}, sys.stdout)


if __name__ == "__main__":
    main()
