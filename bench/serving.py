"""Servers of samples that benchmarks start: the node service, the mount, and squashfuse."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from bench.datasets import DATASET
from bench.errors import Unavailable
from bench.process import ROOT, find_program, started
from dlfs.base.units import MIB
from dlfs.mount.supervise.keeper import ENABLE_URING

READY_SECONDS = 30.0
"""Most time until a file system is mounted."""

MEMORY_BYTES = 256 * MIB
"""Memory of a mount, unless the contender says otherwise."""

SQUASHFUSE = "squashfuse_ll"
"""squashfuse on libfuse's low-level interface, which is faster than ``squashfuse``."""


@dataclass(frozen=True, slots=True)
class Served:
    """A running node service: the URI that ``dlfs.connect`` takes, and its process ID."""

    uri: str
    pid: int


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mounted file system: the folder with the files, and the ID of the process that serves it.

    The process ID is 0 if the kernel serves it.
    """

    files: Path
    pid: int

    @property
    def servers(self) -> tuple[int, ...]:
        """ID of the process that serves the files, if one does."""
        return (self.pid,) if self.pid else ()


@contextmanager
def serve(volume: str, memory_bytes: int) -> Iterator[Served]:
    """Serve a volume to the sample API, with a cache of so many bytes."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--socket", f"{folder}/bench.sock", "--cache", str(memory_bytes))
        with start_service(volume, Path(folder) / "serve.log", *options) as served:
            yield served


@contextmanager
def start_service(volume: str, log: Path, *options: str) -> Iterator[Served]:
    """Run ``dlfs serve`` until the end of the block; name its log if it ended before."""
    command = [sys.executable, "-m", "dlfs.cli", "serve", volume, "--json", *options]
    with (
        log.open("ab") as errors,
        started(command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT) as process,
    ):
        assert process.stdout is not None
        printed = b""
        while not printed.endswith(b"}\n"):
            line = process.stdout.readline()
            if not line:
                code, words = process.wait(), log.read_text(errors="replace").strip()
                last = (words.splitlines() or [""])[-1]
                raise Unavailable(f"dlfs serve ended with {code}; see {log}: {last}")
            printed += line
        yield Served(json.loads(printed)["uri"], process.pid)


# ---- mounts --------------------------------------------------------------------------------------


def check_fuse() -> None:
    """Check that FUSE file systems can be mounted here; else say what is missing."""
    find_program("fusermount3", "fuse3")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Unavailable("/dev/fuse cannot be opened")


@contextmanager
def uring_offered(offered: bool = True) -> Iterator[None]:
    """Have the kernel offer io_uring to mounts that are made in a block, or not, if we may."""
    if not os.access(ENABLE_URING, os.W_OK):
        yield
        return
    with ENABLE_URING.open("r+") as parameter:
        fcntl.flock(parameter, fcntl.LOCK_EX)  # against other programs that set it
        before = ENABLE_URING.read_text()
        ENABLE_URING.write_text("Y" if offered else "N")
        try:
            yield
        finally:
            ENABLE_URING.write_text(before)


@contextmanager
def mount_dlfs(
    volume: str,
    point: Path,
    log: Path,
    server: str = "auto",
    memory_bytes: int = MEMORY_BYTES,
) -> Iterator[Mounted]:
    """Mount a volume by the native server.

    The server is ``native`` (through /dev/fuse), ``uring`` (over io_uring), or ``auto`` for DLFS's
    own choice.
    """
    check_fuse()
    from dlfs._native.fuse import is_built
    from dlfs.mount.mountpoint import find_mount, unmount
    from dlfs.mount.options import MountOptions
    from dlfs.mount.supervise.background import mount_volume

    if not is_built():
        raise Unavailable("the native server was not built: apt-get install libfuse3-dev")
    if server == "uring" and not os.access(ENABLE_URING, os.W_OK):
        raise Unavailable("only root may set fuse.enable_uring, of Linux 6.14 and newer")
    point.mkdir(exist_ok=True)
    options = MountOptions(
        fuse="native",
        uring=server in ("uring", "auto"),
        cache_bytes=memory_bytes,
    )
    try:
        with uring_offered() if server == "uring" else nullcontext():
            mounted = mount_volume(volume, point, options, log=log)
        yield Mounted(point / DATASET, mounted.pid)
    finally:
        if find_mount(point) is not None:  # an interrupt may come before mount_volume has returned
            unmount(point, lazy=True)  # after an interrupt, a file may still be open


@contextmanager
def mount_squashfuse(image: Path, point: Path) -> Iterator[Mounted]:
    """Mount a SquashFS image through FUSE; squashfuse unmounts it when it is stopped."""
    program = find_program(SQUASHFUSE, "squashfuse")
    with started([program, "-f", image, point], stderr=subprocess.DEVNULL) as server:
        until = time.monotonic() + READY_SECONDS
        while not os.path.ismount(point):
            if server.poll() is not None or time.monotonic() > until:
                raise Unavailable(f"{SQUASHFUSE} did not mount: {server.poll()}")
            time.sleep(0.02)
        yield Mounted(point, server.pid)
