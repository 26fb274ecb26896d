"""Tests of target faults with libdlfs built with ASan and UBSan: no memory error is found.

Tests of ``test_nvme_faults`` run again in a separate process with ASan's allocator, which checks
numpy's buffers too. Leaks are not detected, since Python frees little at exit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.test_native import compile_target, configure

TESTS = Path(__file__).with_name("test_nvme_faults.py")
CHOSEN = (
    "(test_a_read_survives and digests) or test_a_write_survives"
    " or (test_opening and not connect and not property)"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def runtime(name: str) -> str:
    """Return the path of a sanitizer's runtime library, which must be loaded first."""
    compiler = os.environ.get("CC", "cc")
    command = [compiler, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{compiler} has no {name} to load first")
    return found


def test_no_fault_causes_a_memory_error() -> None:
    preload = runtime("libasan.so")
    folder = configure("address")
    compile_target(folder, "dlfs")
    library = folder / "libdlfs.so"
    assert b"__asan_init" in library.read_bytes()
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "DLFS_LIBRARY": str(library),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN]
    done = subprocess.run([*command, TESTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert " passed" in done.stdout
