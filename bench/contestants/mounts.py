"""The mount: files opened, read and closed through FUSE.

DLFS's by both its servers, squashfuse's of an image of the same files, and the least that libfuse
and pyfuse3 can do.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.contestant import (
    Ground,
    Sample,
    check_bytes,
    cpu_seconds_of,
    drop_caches_for,
    timed,
)
from bench.contestants.files import read_files
from bench.datasets import DATASET
from bench.ending import started
from bench.machine import ROOT, Unavailable
from dlfs.extras import install_command

WAIT_SECONDS = 600.0
READY_SECONDS = 30.0

SQUASHFUSE = "squashfuse_ll"
"""The one on libfuse's low-level interface: the faster of the two."""
AS_THEY_ARE = ("-noappend", "-quiet", "-no-progress", "-noI", "-noD", "-noF", "-noX")

SERVERS = {
    "native": "DLFS mount, native",
    "pyfuse3": "DLFS mount, pyfuse3",
    "bare": "bare pyfuse3, from memory",
    "libfuse": "bare libfuse, from memory, one thread",
    "libfuse-threads": "bare libfuse, from memory, threads",
    "squashfuse": SQUASHFUSE,
}
"""In tables."""

LIBFUSE_THREADS = {"libfuse": 1, "libfuse-threads": 32}
"""As many as DLFS's mount may have, with a descriptor each."""


def check_fuse() -> None:
    """Say what a mount lacks here.

    Raises:
        Unavailable: something.
    """
    if importlib.util.find_spec("pyfuse3") is None:
        raise Unavailable(f"pyfuse3 is not installed: {install_command('pyfuse3')}")
    if shutil.which("fusermount3") is None:
        raise Unavailable("fusermount3 is not installed: apt-get install fuse3")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Unavailable("/dev/fuse cannot be opened")


@dataclass(frozen=True)
class Mounted:
    """A mount that answers: where its files are, and the process that serves it."""

    files: Path
    pid: int


@contextmanager
def _mount_dlfs(ground: Ground, point: Path, server: str) -> Iterator[Mounted]:
    from dlfs._native.fuse import is_built
    from dlfs.mount.background import mount_volume
    from dlfs.mount.mountpoint import unmount
    from dlfs.mount.server import MountOptions

    if server == "native" and not is_built():
        raise Unavailable("the native server was not built: apt-get install libfuse3-dev")
    volume, log = str(ground.scene.volume), ground.scene.folder / "mount.log"
    mounted = mount_volume(volume, point, MountOptions(fuse=server), log=log)
    try:
        yield Mounted(point / DATASET, mounted.pid)
    finally:
        unmount(point, lazy=True)  # interrupted, it may have a file open


@contextmanager
def _mount_bare(
    ground: Ground, point: Path, indices: list[int], server_name: str
) -> Iterator[Mounted]:
    source, listing = ground.scene.source, ground.scene.folder / "served"
    paths = b"".join(source.path(index) + b"\0" for index in indices)
    listing.write_bytes(paths)
    places = [str(point), str(ground.scene.files), str(listing)]
    command = [sys.executable, "-m", "bench.contestants.bare_pyfuse3", *places]
    if server_name in LIBFUSE_THREADS:
        program = ground.machine.program("bare_fuse")
        command = [str(program), *places, str(LIBFUSE_THREADS[server_name])]
    with started(command, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        if server.stdout.readline() != b"ready\n":
            raise Unavailable(f"the {SERVERS[server_name]} server ended: {server.wait()}")
        yield Mounted(point, server.pid)


@contextmanager
def _mount_squashfuse(ground: Ground, point: Path) -> Iterator[Mounted]:
    """All files in one image, stored as they are: unpacking them is not what is raced."""
    for program, package in (("mksquashfs", "squashfs-tools"), (SQUASHFUSE, "squashfuse")):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not installed: apt-get install {package}")
    image = ground.scene.folder / "files.squashfs"
    if not image.exists():
        command = ["mksquashfs", str(ground.scene.files), str(image), *AS_THEY_ARE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        drop_caches_for(ground.machine, cold=True)
    with started([SQUASHFUSE, "-f", str(image), str(point)]) as server:
        until = time.monotonic() + READY_SECONDS
        while not os.path.ismount(point) and server.poll() is None:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        if not os.path.ismount(point):
            raise Unavailable(f"{SQUASHFUSE} did not mount: {server.poll()}")
        yield Mounted(point, server.pid)


@contextmanager
def _bound(together: bool) -> Iterator[None]:
    """Bind this process, and what it starts meanwhile, to one processor."""
    allowed = os.sched_getaffinity(0)
    if together:
        os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@dataclass(frozen=True)
class MountFiles:
    """Random files through a mount, open + read + close, one process.

    Attributes:
        server: ``native`` and ``pyfuse3`` are DLFS's, ``bare`` is the least that pyfuse3 can be
            asked to do, from memory, ``libfuse`` and ``libfuse-threads`` that of libfuse,
            ``squashfuse`` serves an image of the files.
        cold: nothing cached by kernel or server; else all read once before.
        together: server and reader are bound to one processor, so that no request and no answer
            wakes another one.
    """

    server: str
    cold: bool
    together: bool = False

    @property
    def label(self) -> str:
        """In tables."""
        where = ", one processor" if self.together else ""
        return f"{SERVERS[self.server]}, {'cold' if self.cold else 'warm'}{where}"

    def run(self, ground: Ground) -> Sample:
        """Mount, read, unmount."""
        check_fuse()
        point = ground.scene.folder / "mnt"
        point.mkdir(exist_ok=True)
        source = ground.scene.source
        order = ground.scene.file_order(ground.round)[: ground.limits.mount_files].tolist()
        paths = [source.path(index) for index in order]
        sizes = source.lengths[order].tolist()
        drop_caches_for(ground.machine, self.cold)
        with _bound(self.together), self._mounted(ground, point, order) as mounted:
            root = os.fsencode(mounted.files) + b"/"
            if not self.cold:
                read_files(root, paths, sizes, WAIT_SECONDS)
            before = cpu_seconds_of(mounted.pid)
            with timed() as watch:
                count, total, kept = read_files(root, paths, sizes, ground.limits.seconds)
            served = cpu_seconds_of(mounted.pid) - before
        checked = check_bytes(ground.scene, {order[at]: data for at, data in kept.items()})
        notes = {"server_cpu_seconds": served}
        return Sample(count, total, watch.seconds, watch.cpu_seconds + served, checked, notes)

    @contextmanager
    def _mounted(self, ground: Ground, point: Path, order: list[int]) -> Iterator[Mounted]:
        ways = {
            "native": lambda: _mount_dlfs(ground, point, self.server),
            "pyfuse3": lambda: _mount_dlfs(ground, point, self.server),
            "squashfuse": lambda: _mount_squashfuse(ground, point),
        }
        way = ways.get(self.server, lambda: _mount_bare(ground, point, order, self.server))
        with way() as mounted:
            yield mounted
