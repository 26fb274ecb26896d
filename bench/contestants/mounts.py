"""The mount: files opened, read and closed through FUSE; DLFS's, and pyfuse3's own bare limit."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
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
from bench.machine import ROOT, Unavailable

WAIT_SECONDS = 600.0


def check_fuse() -> None:
    """Say what a mount lacks here.

    Raises:
        Unavailable: something.
    """
    if importlib.util.find_spec("pyfuse3") is None:
        raise Unavailable("pyfuse3 is not installed: pip install 'dlfs[mount]'")
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
def _mount_dlfs(ground: Ground, point: Path) -> Iterator[Mounted]:
    from dlfs.service.mount import mount_volume
    from dlfs.service.mountpoint import unmount

    mounted = mount_volume(str(ground.scene.volume), point, log=ground.scene.folder / "mount.log")
    try:
        yield Mounted(point / DATASET, mounted.pid)
    finally:
        unmount(point)


@contextmanager
def _mount_bare(ground: Ground, point: Path, indices: list[int]) -> Iterator[Mounted]:
    source, listing = ground.scene.source, ground.scene.folder / "served"
    paths = b"".join(source.path(index) + b"\0" for index in indices)
    listing.write_bytes(paths)
    command = [sys.executable, "-m", "bench.contestants.bare_pyfuse3"]
    command += [str(point), str(ground.scene.files), str(listing)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert server.stdout is not None
    try:
        if server.stdout.readline() != b"ready\n":
            raise Unavailable(f"the bare pyfuse3 server ended: {server.wait()}")
        yield Mounted(point, server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        server.stdout.close()


@dataclass(frozen=True)
class MountFiles:
    """Random files through a mount, open + read + close, one process.

    Attributes:
        bare: by the least that pyfuse3 can be asked to do, from memory; else by DLFS.
        cold: nothing cached by kernel or server; else all read once before.
    """

    bare: bool
    cold: bool

    @property
    def label(self) -> str:
        """In tables."""
        who = "bare pyfuse3, from memory" if self.bare else "DLFS mount"
        return f"{who}, {'cold' if self.cold else 'warm'}"

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
        with self._mounted(ground, point, order) as mounted:
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
        if self.bare:
            with _mount_bare(ground, point, order) as mounted:
                yield mounted
        else:
            with _mount_dlfs(ground, point) as mounted:
                yield mounted
