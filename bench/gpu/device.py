"""The GPU under test, or the processor in its place: its facts, and calls that wait for it.

PyTorch is imported when it is needed, as the parent process does without.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from bench.errors import Unavailable
from bench.peers.packages import needed
from bench.process import output_of
from dlfs.base.units import GIB, MIB

COPY_BYTES = 64 * MIB
"""Bytes of one copy by which the bandwidth to the device is measured."""
COPY_SECONDS = 0.3


def check_device(device: str) -> Any:
    """Return PyTorch, which can use the device.

    Raises:
        Unavailable: PyTorch is not installed, or finds no such GPU.
    """
    torch = needed("torch")
    if device == "cpu":
        return torch
    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip
        reason = f"made for CUDA {build}" if build else "a build without CUDA"
        raise Unavailable(
            f"python -m bench gpu needs a GPU: PyTorch {torch.__version__}, {reason}, finds none; "
            "--device cpu runs everything without one, which measures no copies to a GPU"
        )
    return torch


def wait_for(device: str) -> None:
    """Wait until the device has done everything that this thread gave it."""
    if device != "cpu":
        needed("torch").cuda.current_stream().synchronize()


def describe_device(device: str) -> dict[str, Any]:
    """Return the facts of the device that results depend on, as plain values."""
    torch = check_device(device)
    if device == "cpu":
        return {"gpu": "none: the processor in its place", "torch": torch.__version__}
    facts = torch.cuda.get_device_properties(device)
    driver = ""
    with contextlib.suppress(Unavailable, OSError):
        query = ("--query-gpu=driver_version", "--format=csv,noheader")
        driver = output_of("nvidia-smi", *query).splitlines()[0].strip()
    return {
        "gpu": facts.name,
        "gpu_memory_bytes": facts.total_memory,
        "driver": driver,
        "cuda": torch.version.cuda or torch.version.hip or "",
        "torch": torch.__version__,
        "copy_gib_per_s": _copy_gib_per_s(torch, device),
    }


def _copy_gib_per_s(torch: Any, device: str) -> float:
    """Return the rate of copies from page-locked memory, the most that any feed can reach."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    copies, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < COPY_SECONDS:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        copies += 1
    seconds = time.perf_counter() - begun
    return float(copies * COPY_BYTES / seconds / GIB)
