"""Helpers of the tests of keepers: programs that use a mount all the time, and scripted servers."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import random
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import DlfsError
from dlfs.mount.mountpoint import detach, find_dlfs, find_mount
from dlfs.mount.options import MountOptions
from dlfs.mount.supervise.background import MountRequest
from dlfs.mount.supervise.inherited import InheritedMount
from dlfs.mount.supervise.keeper import Keeper, Server, can_keep
from dlfs.mount.supervise.replacement import Predecessor
from tests.fuse.mounting import Mount, add_dataset, wait_for_exit

NEEDS_KEEPER = [
    pytest.mark.fuse,
    pytest.mark.skipif(not can_keep(MountOptions(uring=False)), reason="needs Linux 6.9"),
]
"""Marks of the tests whose mounts have keepers."""

READERS = 8
FILES = {
    b"d%d/%03d" % (folder, file): random.Random(f"{folder} {file}").randbytes(5000)
    for folder in range(4)
    for file in range(50)
}


def make_volume(folder: Path) -> Path:
    """Make a volume with the dataset `train` of FILES."""
    volume = folder / "volume.img"
    dlfs.format_volume(str(volume), size_bytes=16 * MIB)
    add_dataset(volume, "train", FILES)
    return volume


def drop_caches() -> None:
    """Have programs send requests again, where the test may do that."""
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3")


@contextlib.contextmanager
def running_programs(mount: Mount) -> Iterator[None]:
    """Run the programs in a block; any error or wrong byte of them fails it."""
    ended = threading.Event()

    def repeat(look: Callable[[random.Random], None], seed: int) -> int:
        draw = random.Random(seed)
        count = 0
        while not ended.is_set() or not count:
            look(draw)
            count += 1
        return count

    def read(draw: random.Random) -> None:
        path = draw.choice(list(FILES))
        assert (mount / "train" / os.fsdecode(path)).read_bytes() == FILES[path]

    def map_file(draw: random.Random) -> None:
        path = draw.choice(list(FILES))
        with (
            open(mount / "train" / os.fsdecode(path), "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        ):
            assert bytes(mapped) == FILES[path]

    def find(_draw: random.Random) -> None:
        assert sum(len(files) for _, _, files in os.walk(mount / "train")) == len(FILES)

    def pack(_draw: random.Random) -> None:
        packed = subprocess.run(
            ["tar", "c", "-f", "-", "-C", mount / "train", "."], stdout=subprocess.PIPE, check=True
        )
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            for member in filter(tarfile.TarInfo.isfile, archive.getmembers()):
                file = archive.extractfile(member)
                assert file is not None
                assert file.read() == FILES[os.fsencode(member.name.removeprefix("./"))]

    with ThreadPoolExecutor(READERS + 3) as pool:
        looks = [*[read] * READERS, map_file, find, pack]
        running = [pool.submit(repeat, look, seed) for seed, look in enumerate(looks)]
        try:
            yield
        finally:
            ended.set()
        assert all(task.result() for task in running)


# ---- keepers with scripted servers ---------------------------------------------------------------


def unmounting(directory: Path) -> Server:
    """Return a server that answers, and ends because the mount is detached."""

    def server(kept: InheritedMount, ready: Callable[[], None]) -> None:
        kept.connect()
        ready()
        detach(str(directory))

    return server


def start_keeper(directory: Path, server: Server, *, replaces: bool = False) -> int:
    """Start a keeper in a child process, which exits with 1 if it fails; return its process ID."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    os.setpgid(0, 0)
    try:
        before = Predecessor(*find_dlfs(directory, "replace")) if replaces else None
        request = MountRequest([], str(directory), MountOptions(), None)
        Keeper(request, server, lambda: None, before).run()
        code = 0
    except DlfsError:
        pass
    finally:
        os._exit(code)


@contextlib.contextmanager
def kept(directory: Path, servers: list[Server]) -> Iterator[int]:
    """Run a keeper whose n-th server is the n-th function; yield its process ID."""
    directory.mkdir()
    started = os.memfd_create("started")

    def server(kept: InheritedMount, ready: Callable[[], None]) -> None:
        number = os.fstat(started).st_size
        os.pwrite(started, b".", number)
        servers[number](kept, ready)

    pid = start_keeper(directory, server)
    try:
        yield pid
        wait_for_exit(pid)
    finally:
        left = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (pid, *map(int, left)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(started)
        while find_mount(directory) is not None:
            detach(str(directory))
