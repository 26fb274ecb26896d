"""Owners of native objects: they destroy once, after all users, whatever raises when."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import subprocess
import sys
import weakref
from ctypes import byref
from pathlib import Path

import pytest

from dlfs._native.batch import batch_owner
from dlfs._native.device import NativeDevice, device_handle
from dlfs._native.handle import Descriptor, Handle, owner_type, process_number
from dlfs._native.library import library
from tests.support.forked import run_forked

MIB = 1 << 20

_DESTROYED: list[int] = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def destroy(address: int) -> None:
    _DESTROYED.append(address)


@pytest.fixture
def destroyed() -> list[int]:
    """The addresses of the objects that ``destroy`` was called with, in order."""
    _DESTROYED.clear()
    return _DESTROYED


def handle_of(address: int, *keeps: object, **options: int) -> Handle:
    made = Handle(destroy, *keeps, **options)
    made.value = address
    return made


def test_an_object_is_destroyed_once(destroyed: list[int]) -> None:
    handle = handle_of(1)
    handle.free()
    assert destroyed == [1]
    assert handle.value is None
    handle.free()
    del handle
    assert destroyed == [1]
    del [handle_of(2)][0]
    assert destroyed == [1, 2]


def test_an_owner_without_an_object_destroys_nothing(destroyed: list[int]) -> None:
    del [Handle(destroy)][0]
    assert destroyed == []


def test_objects_are_destroyed_before_those_that_they_use(destroyed: list[int]) -> None:
    device = handle_of(1)
    reader = handle_of(2, device)
    stream = handle_of(3, reader, device)
    del device, reader
    assert destroyed == []
    del stream
    assert destroyed == [3, 2, 1]


def test_the_order_is_the_same_in_a_cycle(destroyed: list[int]) -> None:
    """The garbage collector would call the finalizers of a cycle in the order of creation."""

    class Node:
        pass

    node = Node()
    node.device = handle_of(1)  # type: ignore[attr-defined]
    node.reader = handle_of(2, node.device)  # type: ignore[attr-defined]
    node.itself = node  # type: ignore[attr-defined]
    del node
    assert destroyed == []
    gc.collect()
    assert destroyed == [2, 1]


def test_a_light_owner_destroys_its_object_when_it_is_collected(destroyed: list[int]) -> None:
    owner = owner_type(destroy)()
    owner.value = 3
    assert destroyed == []
    del owner
    assert destroyed == [3]


def test_owners_of_batches_are_invisible_to_the_garbage_collector() -> None:
    assert not gc.is_tracked(batch_owner())
    assert not gc.is_tracked(Handle(destroy))


def test_a_child_destroys_only_what_it_may(destroyed: list[int]) -> None:
    anyone, parents = handle_of(1), handle_of(2, process=process_number())

    def free() -> None:
        anyone.free()
        parents.free()
        assert destroyed == [1]
        assert parents.value is None

    assert run_forked(free) == 0
    parents.free()
    assert destroyed == [2]


def test_a_finalizer_runs_no_bytecode(destroyed: list[int]) -> None:
    """Python ignores an exception in a finalizer, and never runs it again."""
    lines: list[str] = []

    def trace(frame: object, event: str, _: object) -> None:
        lines.append(f"{event} {frame}")

    handle, descriptor = Handle(library().dlfs_device_destroy), Descriptor()
    light = batch_owner()
    assert library().dlfs_device_create_memory(MIB, 4096, byref(handle)) == 0
    number = descriptor.fill(os.open, "/dev/null", os.O_RDONLY)
    sys.settrace(trace)
    try:
        del handle, descriptor, light
    finally:
        sys.settrace(None)
    assert lines == []
    with pytest.raises(OSError, match="Bad file"):
        fcntl.fcntl(number, fcntl.F_GETFD)


def test_a_device_that_was_opened_in_vain_is_freed(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    path.write_bytes(bytes(MIB))
    before = len(os.listdir("/proc/self/fd"))
    handle = device_handle()
    assert library().dlfs_device_open_file(os.fsencode(path), 0, 0, byref(handle)) == 0
    assert len(os.listdir("/proc/self/fd")) > before
    del handle  # as if a signal handler had raised when the call returned
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_device_stays_for_its_queue_pairs() -> None:
    device = NativeDevice.memory(MIB, 4096, uri="mem:a")
    owner = weakref.ref(device.handle)
    queue = device.queue(4)
    device.close()
    assert owner() is not None
    queue.close()
    assert owner() is None


def test_a_descriptor_is_closed_once() -> None:
    with Descriptor() as owner:
        assert owner.value == -1
        number = owner.fill(os.open, "/dev", os.O_RDONLY)
        assert owner.fileno() == number
        with Descriptor() as within:
            within.fill(os.open, "null", os.O_RDONLY, dir_fd=number)
            assert os.path.samestat(os.fstat(within.value), os.stat("/dev/null"))
    assert owner.value == -1
    owner.close()
    with pytest.raises(OSError, match="No such file"):
        owner.fill(os.open, "/dev/does-not-exist", os.O_RDONLY)
    assert owner.value == -1


def test_at_exit_owners_stay_with_what_they_use() -> None:
    """Threads may use the memory until the process is gone."""
    script = (
        "import ctypes\nfrom dlfs._native.handle import Handle, owner_type\n"
        "class Memory:\n    def __del__(self): print('freed', flush=True)\n"
        "destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: print('destroyed'))\n"
        "kept = Handle(destroy, Memory())\nkept.value = 1\n"
        "other = Handle(destroy, Memory())\nother.value = 2\ndel other\n"
        "light = owner_type(destroy)()\nlight.value = 3\nprint('exit', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["destroyed", "freed", "exit"]


def test_an_owner_to_which_nothing_else_refers_is_closed_once() -> None:
    opened = Descriptor()
    number = opened.fill(os.dup, 0)
    close = opened.close
    del opened
    os.fstat(number)
    close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
