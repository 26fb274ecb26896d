"""Loads the tests' devices that fail on purpose, which ``make build`` builds and no package has."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

from dlfs._native.abi import fields
from dlfs._native.library import bind, library

LIBRARY = Path(__file__).parents[2] / "build/native/tests/libdlfs_fault.so"


class FaultConfig(Structure):
    """``dlfs_fault_config``."""

    _fields_ = fields(
        (c_uint64, "seed"),
        (c_uint32, "error_per_million short_per_million flip_per_million stall_per_million"),
        (c_uint32, "stall_ms reorder"),
        (c_uint64, "bad_first_bytes bad_length_bytes lost_from"),
        (c_uint32, "lost_polls reserved"),
    )


PROTOTYPES = {
    "dlfs_device_create_fault": (c_int, (c_void_p, POINTER(FaultConfig), POINTER(c_void_p))),
    "dlfs_device_fault_lose": (c_int, (c_void_p, c_uint32)),
}


@functools.cache
def fault_library() -> ctypes.CDLL:
    """Load libdlfs_fault, once; it uses the libdlfs of the package."""
    library()
    loaded = ctypes.CDLL(str(LIBRARY))
    bind(loaded, PROTOTYPES, LIBRARY)
    return loaded
