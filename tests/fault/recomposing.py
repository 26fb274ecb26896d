"""Processes that read a volume while test_recomposing.py changes what it consists of.

``python -m tests.fault.recomposing`` forks a process for each line of JSON on its standard input:
its name, its kind and its arguments. Each process reads epochs without end, and checks every
sample. After each epoch it writes a ``Report`` as a line of JSON to standard output, or its error.
When standard input ends, all of them are ended.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import dlfs
from dlfs.base.units import KIB
from dlfs.errors import DlfsError
from dlfs.service import client
from tests.nvmet.volumes import assert_whole, read_epoch
from tests.support.datasets import random_samples
from tests.support.descriptors import own_threads

LOADED = client
SETS = 8
"""Datasets of the volume. The node service has no room for them all, so it opens them again."""
MEMORY_BYTES = 128 * KIB
"""Sample memory of a reader, less than a dataset."""
SAMPLE_BYTES_MAX = 20_000
ABSENT_S = 60.0
"""Longest time for which a storage node may not let anything be opened, in seconds."""


def samples_of(number: int) -> dict[bytes, bytes]:
    """Return the samples of a dataset by their paths."""
    return random_samples(24, seed=number, high=SAMPLE_BYTES_MAX)


def name_of(number: int) -> str:
    """Return the name of a dataset."""
    return f"set{number}"


@dataclass(frozen=True)
class Usage:
    """Resources that a process has."""

    descriptors: int
    threads: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Return the resources of a process."""
        folder = Path("/proc", str(pid))
        resident = int((folder / "statm").read_text().split()[1]) * mmap.PAGESIZE
        return cls(len(os.listdir(folder / "fd")), len(own_threads(pid)), resident)


@dataclass(frozen=True)
class Report:
    """What a reader has read, and what it has open.

    Attributes:
        name: name of the reader.
        pid: its process.
        epochs: number of epochs that it has read.
        slowest_s: time of the slowest epoch, in seconds.
        usage: its resources after the last epoch.
        error: traceback of the error that ended it; None if it reads on.
    """

    name: str
    pid: int
    epochs: int
    slowest_s: float
    usage: Usage
    error: str | None = None

    @classmethod
    def parse(cls, line: str | bytes) -> Report:
        """Return the report of a line of JSON."""
        values = json.loads(line)
        return cls(**{**values, "usage": Usage(**values["usage"])})


# ---- kinds of readers: generators that yield after each epoch ------------------------------------

Open = Callable[[], dlfs.Volume]
Opened = TypeVar("Opened", dlfs.Volume, dlfs.Dataset)


def read_one(open_volume: Open) -> Iterator[None]:
    """Read one dataset, which stays open."""
    expected = samples_of(0)
    with open_patiently(open_volume) as volume, volume[name_of(0)] as dataset:
        for seed in itertools.count():
            assert_whole(read_epoch(dataset, seed), expected)
            yield


def read_each(open_volume: Open, seed: int, *, reopen: bool) -> Iterator[None]:
    """Read datasets in turn, each opened anew.

    Args:
        open_volume: opens the volume.
        seed: seed of the order.
        reopen: True to open the volume for each epoch, too.
    """
    chance = random.Random(seed)
    volume = open_patiently(open_volume)
    for epoch in itertools.count():
        number = chance.randrange(SETS)
        with open_patiently(lambda: volume[name_of(number)]) as dataset:  # noqa: B023
            assert_whole(read_epoch(dataset, epoch), samples_of(number))
        if reopen:
            volume.close()
            volume = open_patiently(open_volume)
        yield


def open_patiently(open_once: Callable[[], Opened]) -> Opened:
    """Open a volume or a dataset, also while its storage node restarts."""
    deadline = time.monotonic() + ABSENT_S
    while True:
        try:
            return open_once()
        except DlfsError as error:
            if not error.retryable or time.monotonic() > deadline:
                raise


def read_files(root: str, seed: int) -> Iterator[None]:
    """Read the files of a mount, past the kernel's page cache."""
    chance = random.Random(seed)
    memory = file_memory()
    while True:
        number = chance.randrange(SETS)
        folder = os.path.join(os.fsencode(root), name_of(number).encode())
        expected = samples_of(number)
        for path, data in chance.sample(sorted(expected.items()), len(expected)):
            assert read_file(os.path.join(folder, path), memory) == data, path
        yield


def file_memory() -> mmap.mmap:
    """Allocate memory for ``read_file``."""
    return mmap.mmap(-1, SAMPLE_BYTES_MAX + mmap.PAGESIZE)


def read_file(path: bytes, memory: mmap.mmap) -> bytes:
    """Read a file into memory that O_DIRECT takes."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return memory[: os.readv(file, [memory])]
    finally:
        os.close(file)


def epochs_of(kind: str, uri: str, seed: int) -> Iterator[None]:
    """Return the epochs of a reader.

    Args:
        kind: ``local``, ``local-anew``, ``client``, ``client-anew`` or ``files``.
        uri: URI of the volume or of the service, or the mount point.
        seed: seed of the order in which it reads.
    """
    if kind == "files":
        return read_files(uri, seed)

    def open_volume() -> dlfs.Volume:
        if kind.startswith("client"):
            return dlfs.connect(uri, volume="main", timeout_s=ABSENT_S)
        return dlfs.open(uri, memory_bytes=MEMORY_BYTES)

    if kind in ("local", "client"):
        return read_one(open_volume)
    return read_each(open_volume, seed, reopen=kind == "local-anew")


# ---- the process ---------------------------------------------------------------------------------


def report(found: Report) -> None:
    """Write a report; one write, so that those of several processes do not mix."""
    os.write(1, json.dumps(asdict(found)).encode() + b"\n")


def run(name: str, kind: str, uri: str, seed: int, pause_s: float) -> None:
    """Read until the process is ended, with pauses; report each epoch, and the error."""
    epochs, slowest, began = 0, 0.0, time.monotonic()
    try:
        for epochs, _ in enumerate(epochs_of(kind, uri, seed), 1):
            slowest = max(slowest, time.monotonic() - began)
            report(Report(name, os.getpid(), epochs, slowest, Usage.of(os.getpid())))
            time.sleep(pause_s)
            began = time.monotonic()
    except (AssertionError, DlfsError, OSError):
        text = traceback.format_exc()[-3000:]
        report(Report(name, os.getpid(), epochs, slowest, Usage.of(os.getpid()), text))


def main() -> None:
    """Fork a reader for each request on standard input; end them when it ends."""
    children = []
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os.nice(5)
            run(**json.loads(line))
            os._exit(0)
        children.append(child)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
