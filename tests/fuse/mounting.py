"""Helpers of the mount tests: make volumes, mount them, wait for conditions."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import dlfs
from bench.serving import uring_offered
from dlfs.base.units import MIB
from dlfs.cli.commands import app
from dlfs.mount.mountpoint import find_mount, unmount
from dlfs.mount.supervise.keeper import ENABLE_URING
from tests.odd_names import old_writer
from tests.support.files import write_files
from tests.support.stopping import stop_process

SECONDS_MAX = 100
"""Longest wait for a condition, in seconds; long enough for a slow and busy machine."""

ALIKE_OVER_URING = pytest.mark.parametrize("server", ["native", "pyfuse3"], indirect=True)
"""Marks rules about mounting, which do not depend on how the kernel sends requests."""


def wait_for_exit(pid: int) -> None:
    """Wait until a process, not necessarily a child, has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with contextlib.closing(os.fdopen(descriptor)):
        ready, _, _ = select.select([descriptor], [], [], SECONDS_MAX)
    assert ready, f"process {pid} did not end"


def parent_of(pid: int) -> int:
    """Return the ID of a process's parent: the keeper of a server that has one, else 1."""
    status = Path(f"/proc/{pid}/stat").read_text()
    return int(status.rpartition(")")[2].split()[1])


def sample_tree(folder: Path, seed: int = 7) -> dict[bytes, bytes]:
    """Create files with unusual names and sizes; return their bytes by path."""
    draw = random.Random(seed)
    files = {f"class{i % 3}/{i:04d}.bin".encode(): draw.randbytes(4096) for i in range(60)}
    for size in (0, 1, 511, 4095, 4097, 70_000, 300_000):
        files[f"sizes/{size}".encode()] = draw.randbytes(size)
    files |= {
        b"large": draw.randbytes(3 * MIB + 17),
        b"deep/" + b"/".join(b"%d" % i for i in range(40)) + b"/leaf": b"leaf",
        b"odd/new\nline": b"newline",
        b"odd/\xff\xfe\x80": b"not UTF-8",
        b"odd/" + b"n" * 255: b"long name",
        b"odd/-dash": b"dash",
        b"odd/ space ": b"space",
        b"order/a": b"1",
        b"order/a-b": b"2",
        b"order/a.b/c": b"3",
        b"order/ab/c": b"4",
        b"order/a0": b"5",
    }
    write_files(folder, files)
    return files


EMPTY_DIRECTORIES = ("empty/nested/deep", "empty/a", "class0/empty", "order/a-", "order/b/x")
"""Directories without files next to those of ``sample_tree``."""


def add_dataset(
    volume_path: Path, name: str, files: dict[bytes, bytes], directories: Sequence[str] = ()
) -> dlfs.DatasetInfo:
    """Write one more dataset, or version, to a volume."""
    with dlfs.open(str(volume_path)) as volume:
        with old_writer(volume, name) as writer:
            for directory in directories:
                writer.add_directory(directory)
            for path, data in sorted(files.items()):
                writer.add(path, data)
        return max((i for i in volume.datasets() if i.name == name), key=lambda i: i.version)


@dataclass
class Mount:
    """A mount under test."""

    volume: Path
    directory: Path
    pid: int
    log: Path
    transport: str

    def __truediv__(self, name: str | bytes) -> Path:
        return self.directory / os.fsdecode(name)


class Prepared(NamedTuple):
    """A volume with one dataset, the folder it was made from, and its samples."""

    volume: Path
    source: Path
    files: dict[bytes, bytes]


@dataclass
class World:
    """A volume with one dataset, the folder it was made from, and its mount."""

    mount: Mount
    source: Path
    files: dict[bytes, bytes]

    @property
    def dataset(self) -> Path:
        return self.mount / "train"


def served_by(server: str) -> dict[str, Any]:
    """Return the options of a mount by ``native``, ``uring`` (native over io_uring) or pyfuse3."""
    return {"fuse": "native" if server == "uring" else server, "uring": server == "uring"}


def lacks_uring() -> str | None:
    """Return why mounts over io_uring cannot be tested here, or None."""
    if not ENABLE_URING.exists():
        return "the kernel has no FUSE over io_uring (Linux 6.14 and newer)"
    if not os.access(ENABLE_URING, os.W_OK):
        return "only root may set fuse.enable_uring"
    return None


@contextlib.contextmanager
def mounted(
    volume: Path | str,
    directory: Path,
    log: Path,
    *,
    more: Sequence[Path | str] = (),
    **options: object,
) -> Iterator[Mount]:
    """Mount in the background for the duration of a block; with further volumes if nested."""
    from dlfs.mount.options import MountOptions
    from dlfs.mount.supervise.background import mount_volume

    with contextlib.suppress(FileExistsError):  # it may be a mount whose server is dead
        directory.mkdir()
    uring = bool(options.setdefault("uring", False))
    with uring_offered() if uring else contextlib.nullcontext():
        background = mount_volume(
            str(volume),
            directory,
            MountOptions(**options),  # type: ignore[arg-type]
            more_volume_uris=[str(each) for each in more],
            log=log,
        )
    mount = Mount(Path(volume), directory, background.pid, log, background.transport)
    try:
        yield mount
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(mount.pid, signal.SIGCONT)
        while find_mount(directory) is not None:
            unmount(directory, lazy=True)
        wait_for_exit(mount.pid)


@contextlib.contextmanager
def stopped(mount: Mount) -> Iterator[None]:
    """Suspend a server during a block, in which no request may need it.

    A request that needs the server would never end; the server goes on after ``SECONDS_MAX``, and
    the test fails.
    """
    alarm = threading.Timer(SECONDS_MAX, os.kill, (mount.pid, signal.SIGCONT))
    stop_process(mount.pid)
    alarm.start()
    try:
        yield
        assert alarm.is_alive(), "a request needed the server"
    finally:
        alarm.cancel()
        alarm.join()
        os.kill(mount.pid, signal.SIGCONT)


AS_NOBODY = (
    *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
    # The interpreter may lie in a directory that only root may enter.
    *("--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"),
)


def run_cli(
    *arguments: str | Path | int,
    alone: bool = False,
    prefix: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> subprocess.CompletedProcess[str]:
    """Run ``dlfs``; in this process, one at a time, unless it is to have a process of its own."""
    words = [str(argument) for argument in arguments]
    if alone or prefix or pass_fds:
        return subprocess.run(
            [*prefix, sys.executable, "-m", "dlfs.cli", *words],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
            pass_fds=pass_fds,
        )
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def errno_of(call: Callable[[], object]) -> int:
    """Return the errno that a call fails with, or 0."""
    try:
        call()
    except OSError as error:
        return error.errno or -1
    return 0
