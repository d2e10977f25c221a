"""Counting the machine's accelerators without starting JAX, whose settings cannot be changed afterwards."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import pkgutil
from pathlib import Path

import jax


def counted() -> dict[str, int] | None:
    """Returns how many accelerators JAX would find, by type; None where only JAX itself can tell.

    GPUs of NVIDIA are counted by their driver, as JAX does. Other plugins, and TPUs, have to be asked by JAX.
    """
    platforms = {name.strip() for name in (jax.config.jax_platforms or "").split(",") if name.strip()}  # type: ignore[attr-defined]
    if platforms == {"cpu"}:
        return {}
    plugins = _plugins()
    if (
        os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS")
        or any("cuda" not in name for name in plugins)
        or _may_have_tpus()
    ):
        return None
    wanted = not platforms or bool(platforms & {"cuda", "gpu"})
    return {"GPU": _cuda_devices()} if plugins and wanted else {}


def _plugins() -> set[str]:
    """Returns the names of JAX's plugins that are installed, found where JAX looks for them."""
    found = {entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")}
    namespace = importlib.util.find_spec("jax_plugins")
    if namespace is not None and namespace.submodule_search_locations:
        found |= {module.name for module in pkgutil.iter_modules(namespace.submodule_search_locations)}
    return found


def _may_have_tpus() -> bool:
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        return False
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == "0x1ae0" for vendor in vendors)  # Google's


def _cuda_devices() -> int:
    """Returns how many GPUs the CUDA driver shows to this process, as CUDA_VISIBLE_DEVICES has it."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
