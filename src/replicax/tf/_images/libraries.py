"""The libraries that read and write files of images: imported when they are used."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from replicax.tf._core import doc_pages


@functools.cache
def _imported(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"tf.io reads and writes images with {package}: {doc_pages.install('image')}.") from error


@functools.cache
def opencv() -> ModuleType | None:
    """Returns OpenCV, or None where it is not installed: it interpolates faster than NumPy."""
    try:
        return importlib.import_module("cv2")
    except ImportError:
        return None


def simplejpeg() -> ModuleType:
    """Returns libjpeg-turbo's bindings, which decode as TensorFlow does, bit for bit."""
    return _imported("simplejpeg", "simplejpeg")


def pillow() -> ModuleType:
    """Returns Pillow's module for images."""
    _imported("PIL.ImageFile", "Pillow")
    return _imported("PIL.Image", "Pillow")
