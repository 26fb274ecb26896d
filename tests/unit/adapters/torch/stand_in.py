"""A stand-in for ``torch.cuda``: page-locks, streams and events on the memory of this machine.

Copies are made at once. Their events pass when the test says so.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch

from dlfs.adapters.torch import cuda as cuda_calls
from dlfs.adapters.torch.cuda import Cuda
from dlfs.adapters.torch.page_locks import Copies


class Event:
    """An event, which passes when the test lets it, or when a thread waits for it."""

    def __init__(self, *, blocking):
        assert blocking  # a thread that waits for it must not use a processor
        self.passed = False
        self.waits = 0

    def record(self, _stream):
        Runtime.events.append(self)

    def query(self):
        return self.passed

    def synchronize(self):
        self.waits += 1
        for event in Runtime.events[: Runtime.events.index(self) + 1]:
            event.passed = True


class Stream:
    """A stream, which notes the events that it waits for."""

    def __init__(self, _device=None):
        self.awaited = []

    def wait_event(self, event):
        self.awaited.append(event)


class Runtime:
    """``torch.cuda`` and its ``cudart()``.

    Attributes:
        events: all events, in the order in which they were recorded.
        reads: those of them behind copies out of locked memory.
        calls: calls of the driver that locked or unlocked memory.
        locked: length of each locked range by its address.
        code: code with which the driver refuses to lock.
        errors: errors of calls that PyTorch would report for its next operation.
    """

    events: ClassVar[list[Event]] = []
    reads: ClassVar[list[Event]] = []
    Event = Event
    Stream = Stream

    def __init__(self):
        Runtime.events, Runtime.reads = [], []
        self.calls, self.locked, self.code, self.errors = [], {}, 0, 0
        self.training, self.streams = Stream(), []

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def cudart(self):
        return self

    def CudaError(self, code):
        return RuntimeError(f"out of memory ({code})")

    def cudaHostRegister(self, address, size_bytes, flags):
        self.calls.append(("register", address, size_bytes, flags))
        if self.code:
            self.errors += 1
            return self.code
        ctypes.string_at(address, size_bytes)  # it is mapped
        self.locked[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address):
        ctypes.string_at(address, self.locked[address])  # it is mapped still
        assert all(event.passed for event in self.reads)
        self.calls.append(("unregister", address))
        del self.locked[address]
        return 0

    @contextmanager
    def device(self, _device):
        yield

    @contextmanager
    def stream(self, stream):
        self.streams.append(stream)
        yield
        self.streams.pop()

    def current_stream(self, _device):
        return self.streams[-1] if self.streams else self.training


class StandIn(Cuda):
    """A GPU whose memory is that of this machine, on a ``Runtime``.

    Attributes:
        runtime: the driver.
        views: number of views of locked memory that programs on the GPU read.
        blind: True if programs on the GPU cannot read it.
        staged: bytes that the processor copied to page-locked memory.
    """

    def __init__(self, monkeypatch):
        self.runtime = Runtime()
        for name in ("is_available", "current_device", "device_count", "cudart", "CudaError"):
            monkeypatch.setattr(torch.cuda, name, getattr(self.runtime, name))
        for name in ("Event", "Stream", "device", "stream", "current_stream"):
            monkeypatch.setattr(cuda_calls.torch.cuda, name, getattr(self.runtime, name))
        begin = Copies.begin

        @contextmanager
        def begin_and_note(copies, batch):
            with begin(copies, batch):
                yield
            Runtime.reads.append(Runtime.events[-1])

        monkeypatch.setattr(Copies, "begin", begin_and_note)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.Tensor, "record_stream", self._record_stream, raising=False)
        super().__init__(torch.device("cuda"))
        self.device = torch.device("cpu")
        self.views = self.staged = 0
        self.blind = False
        self.recorded = []

    def _record_stream(self, stream):
        self.recorded.append(stream)

    def _clear_error(self):
        self.runtime.errors = 0

    def view(self, address, size_bytes):
        self.views += 1
        if self.blind:
            raise RuntimeError("the pointer is not known\nlong explanation")
        assert self.runtime.locked[address] == size_bytes
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        return torch.from_numpy(np.ctypeslib.as_array(memory))

    def staging(self, size_bytes):
        self.staged += size_bytes
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pin(self, tensor):
        return tensor.clone()
