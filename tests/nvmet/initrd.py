"""The guest's initial file system: an archive of busybox, modules and scripts, made in memory.

Source: Linux, Documentation/driver-api/early-userspace/buffer-format.rst (the "newc" format of
cpio).
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.nvmet.kernel import GuestKernel

INIT = Path(__file__).with_name("init.sh")
FOLDERS = ("bin", "dev", "modules", "proc", "sys", "tmp")


def _entry(name: str, mode: int, data: bytes, inode: int) -> bytes:
    path = name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    fields = (inode, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + path
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


def build_archive(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Build an archive of (name, mode, content), folders before their contents."""
    parts = [_entry(name, mode, data, i) for i, (name, mode, data) in enumerate(entries, 1)]
    return b"".join(parts) + _entry("TRAILER!!!", 0, b"", 0)


def _entries(kernel: GuestKernel) -> Iterator[tuple[str, int, bytes]]:
    for folder in FOLDERS:
        yield folder, stat.S_IFDIR | 0o755, b""
    yield "init", stat.S_IFREG | 0o755, INIT.read_bytes()
    busybox = shutil.which("busybox")
    assert busybox is not None
    yield "bin/busybox", stat.S_IFREG | 0o755, Path(busybox).read_bytes()
    yield "bin/sh", stat.S_IFLNK | 0o777, b"busybox"
    for module in kernel.modules:
        yield f"modules/{module.name}", stat.S_IFREG | 0o644, module.read_bytes()
    order = "".join(f"{module.name}\n" for module in kernel.modules)
    yield "modules/order", stat.S_IFREG | 0o644, order.encode()


def build_initrd(kernel: GuestKernel) -> bytes:
    """Build the initial RAM disk of a guest, with the kernel's modules."""
    return build_archive(_entries(kernel))
