"""The calls of CUDA that batches on a GPU need, all made through PyTorch.

PyTorch for AMD's GPUs has the same calls under the same names.

Source: CUDA Runtime API, "Memory Management" (``cudaHostRegister``) and "Unified Addressing".
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from dlfs.base.units import format_bytes
from dlfs.errors import UsageError

REGISTER_PORTABLE = 0x01
"""Flag of ``cudaHostRegister``: all contexts of the process see the memory as page-locked."""
REGISTER_MAPPED = 0x02
"""Flag of ``cudaHostRegister``: programs on the GPU may read the memory."""
REGISTER_READ_ONLY = 0x08
"""Flag of ``cudaHostRegister``: this process has mapped the memory read-only."""


class PageLockError(Exception):
    """The driver refused to page-lock memory; the message says why."""


class _DeviceView:
    """Memory as an object from which PyTorch makes a tensor on the GPU, without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class Cuda:
    """A GPU, and a stream of its own for copies to it.

    Args:
        device: the GPU; without a number PyTorch's current one.

    Attributes:
        device: the GPU, with its number.

    Raises:
        UsageError: PyTorch finds no such GPU.

    Threads: any; copies by one at a time.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise UsageError(f"make batches on {device}: expected a GPU, PyTorch finds none")
        number = torch.cuda.current_device() if device.index is None else device.index
        if number >= torch.cuda.device_count():
            raise UsageError(
                f"make batches on {device}: expected one of {torch.cuda.device_count()} GPUs"
            )
        self.device = torch.device("cuda", number)
        self._stream = torch.cuda.Stream(self.device)

    # ---- page-locked memory ----------------------------------------------------------------------

    def lock(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """Page-lock memory, so that the GPU reads it without the processor.

        All of its pages are allocated. The memory must stay mapped until ``unlock``.

        Raises:
            PageLockError: the driver refuses.
        """
        flags = REGISTER_PORTABLE | REGISTER_MAPPED | (0 if writable else REGISTER_READ_ONLY)
        with torch.cuda.device(self.device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, flags))
            if code:
                self._clear_error()
                raise PageLockError(
                    f"cudaHostRegister of {format_bytes(size_bytes)}: {torch.cuda.CudaError(code)}"
                )

    def unlock(self, address: int) -> None:
        """Undo ``lock``. No copy from the memory may be under way."""
        with torch.cuda.device(self.device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                self._clear_error()

    def _clear_error(self) -> None:
        """Take the error of the last call, which PyTorch would report for its next operation."""
        with suppress(RuntimeError):
            torch.ones(1, device=self.device).add_(1)  # launches a program, which has a check

    def view(self, address: int, size_bytes: int) -> torch.Tensor:
        """Return page-locked memory as a tensor that programs on the GPU read: ``uint8[...]``."""
        return torch.as_tensor(_DeviceView(address, size_bytes), device=self.device)

    def staging(self, size_bytes: int) -> torch.Tensor:
        """Return new page-locked memory, ``uint8[size_bytes]``."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in page-locked memory; itself if it is."""
        return tensor.pin_memory()

    # ---- copies ----------------------------------------------------------------------------------

    def copying(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's work for the GPU goes to the stream of copies."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def record(self) -> torch.cuda.Event:
        """Return an event behind all copies so far."""
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(self._stream)
        return event

    def give(self, tensors: list[torch.Tensor], event: torch.cuda.Event) -> None:
        """Let the caller's stream use tensors once an event has passed; no thread waits."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)
