"""Read-only images of a file system: SquashFS and EROFS by the kernel, SquashFS also by FUSE.

Images are made without compression and without fragments. Random samples do not compress. A
fragment shares a block with other files, and the whole block is read for each of them. Images are
mounted by ``mount -o loop``. With direct I/O of the loop device, the kernel does not read ahead
when it reads SquashFS's tables, which made cold reads twenty times as slow.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bench.datasets import Source, write_files
from bench.errors import Unavailable
from bench.peers.files import FILES_MAX, reader_of_files, write_listing
from bench.peers.peer import Peer, Reader
from bench.process import find_program, output_of
from bench.serving import mount_squashfuse

SQUASHFS_OPTIONS = ("-noI", "-noD", "-noF", "-noX", "-no-fragments", "-no-xattrs", "-quiet")


class Image(Peer):
    """An image of a tree of files, mounted by the kernel while readers run.

    Args:
        kind: ``squashfs`` or ``erofs``.
    """

    samples_max = FILES_MAX

    def __init__(self, kind: str) -> None:
        self.name = self._kind = kind
        tool = "mksquashfs -no-compression -no-fragments" if kind == "squashfs" else "mkfs.erofs"
        self.about = f"{tool}, mounted by the kernel (mount -o loop); open, read, close"

    def prepare(self, source: Source, folder: Path) -> None:
        tree, image = folder / "tree", folder / "image"
        write_files(source, tree)
        write_listing(source, folder)
        if self._kind == "squashfs":
            tool = find_program("mksquashfs", "squashfs-tools")
            output_of(tool, tree, image, *SQUASHFS_OPTIONS)
        else:
            output_of(find_program("mkfs.erofs", "erofs-utils"), "--quiet", image, tree)
        shutil.rmtree(tree)
        (folder / "mount").mkdir()

    @contextlib.contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        if os.geteuid():
            raise Unavailable("mounting an image by the kernel needs root")
        output_of("mount", "-t", self._kind, "-o", "loop,ro", folder / "image", folder / "mount")
        try:
            yield ()
        finally:
            output_of("umount", folder / "mount")

    def open(self, folder: Path) -> Reader:
        return reader_of_files(folder, folder / "mount")


class SquashFuse(Peer):
    """The SquashFS image, served by squashfuse in a process of its own."""

    name = "squashfs-fuse"
    about = "the same image by squashfuse_ll: FUSE, without root; open, read, close"
    data_of = "squashfs"

    @contextlib.contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        with mount_squashfuse(folder / "image", folder / "mount") as mounted:
            yield (mounted.pid,)

    def open(self, folder: Path) -> Reader:
        return reader_of_files(folder, folder / "mount")


PEERS = (Image("squashfs"), SquashFuse(), Image("erofs"))
