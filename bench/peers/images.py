"""Read-only images that the kernel mounts: SquashFS and EROFS; SquashFS through FUSE besides.

Images are made without compression and without fragments: random samples do not compress, and a
fragment shares a block with other files, which is read whole for each of them. They are mounted by
``mount -o loop``. With direct I/O of the loop device, nothing is read ahead of SquashFS's small
reads of its tables: cold, that was slower twentyfold.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.ending import started
from bench.machine import Unavailable
from bench.peers.files import FILES_MAX, FilesReader, write_listing, write_tree
from bench.peers.peer import Reader, Source

MOUNT_SECONDS = 30.0
SQUASHFS_OPTIONS = ("-noI", "-noD", "-noF", "-noX", "-no-fragments", "-no-xattrs", "-quiet")


def _tool(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"{name} is not installed: apt-get install {package}")
    return found


def _run(*command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], check=False, capture_output=True, text=True
    )
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no reason given"]
        raise Unavailable(f"{Path(str(command[0])).name}: {lines[-1]}")
    return done.stdout.strip()


class Image:
    """An image of a tree of files, mounted while readers run.

    Args:
        kind: ``squashfs`` or ``erofs``.
    """

    packages: tuple[str, ...] = ()
    random = True
    samples_max = FILES_MAX

    def __init__(self, kind: str) -> None:
        self.name = self._kind = kind
        tool = "mksquashfs -no-compression -no-fragments" if kind == "squashfs" else "mkfs.erofs"
        self.about = f"{tool}, mounted by the kernel (mount -o loop); open, read, close"

    def prepare(self, source: Source, folder: Path) -> None:
        """A tree of files, then its image."""
        tree, image = folder / "tree", folder / "image"
        write_tree(source, tree)
        write_listing(source, folder)
        if self._kind == "squashfs":
            tool = _tool("mksquashfs", "squashfs-tools")
            _run(tool, tree, image, *SQUASHFS_OPTIONS)
        else:
            _run(_tool("mkfs.erofs", "erofs-utils"), "--quiet", image, tree)
        shutil.rmtree(tree)
        (folder / "mount").mkdir()

    @contextlib.contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        """Mount the image."""
        del warm  # what is cached, the kernel caches
        if os.geteuid():
            raise Unavailable("mounting an image by the kernel needs root")
        _run("mount", "-t", self._kind, "-o", "loop,ro", folder / "image", folder / "mount")
        try:
            yield ()
        finally:
            _run("umount", folder / "mount")

    def open(self, folder: Path) -> Reader:
        """Read the listing."""
        return FilesReader(folder, folder / "mount")


class SquashFuse:
    """The same SquashFS image by squashfuse's low-level server, in a process of its own."""

    name = "squashfs-fuse"
    about = "the same image by squashfuse_ll: FUSE, without root; open, read, close"
    packages: tuple[str, ...] = ()
    random = True
    data_of = "squashfs"

    def prepare(self, source: Source, folder: Path) -> None:
        """The image."""
        Image("squashfs").prepare(source, folder)

    @contextlib.contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        """Serve the image."""
        del warm  # what is cached, the kernel caches
        tool = shutil.which("squashfuse_ll") or _tool("squashfuse", "squashfuse")
        unmount = _tool("fusermount3", "fuse3")
        point = folder / "mount"
        outside = point.stat().st_dev
        command = [tool, "-f", folder / "image", point]
        with started(command, stderr=subprocess.DEVNULL) as server:
            until = time.monotonic() + MOUNT_SECONDS
            while point.stat().st_dev == outside:
                if server.poll() is not None or time.monotonic() > until:
                    raise Unavailable(f"squashfuse did not mount: {server.poll()}")
                time.sleep(0.01)
            try:
                yield (server.pid,)
            finally:
                _run(unmount, "-u", point)

    def open(self, folder: Path) -> Reader:
        """Read the listing."""
        return FilesReader(folder, folder / "mount")


PEERS = (Image("squashfs"), SquashFuse(), Image("erofs"))
