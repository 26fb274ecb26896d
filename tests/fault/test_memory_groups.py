"""By default, nothing is killed for lack of memory in a control group smaller than the data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.base.units import GIB, KIB, MIB
from tests.service.serving import Service
from tests.support.memory_groups import MemoryGroup, memory_group

LIMIT_BYTES = 512 * MIB
SAMPLE_BYTES = 512 * KIB - 100
COUNT = GIB // (512 * KIB)
CLIENTS = 3

pytestmark = pytest.mark.slow

READ = """
import json, sys, zlib
import dlfs

def main(uri, seed, workers):
    opened = dlfs.connect(uri) if uri.startswith("unix:") else dlfs.open(uri)
    found = {}
    with opened as volume, volume["d"] as dataset:
        if workers:
            from dlfs.adapters.torch import Loader
            loader = Loader(dataset, 8, seed=seed, num_workers=workers, transform=zlib.crc32)
            for batch in loader:
                found.update(zip(batch.indices.tolist(), [int(crc) for crc in batch.samples]))
        else:
            for batch in dataset.batches(8, seed=seed):
                with batch:
                    found.update(zip(batch.indices.tolist(), map(zlib.crc32, batch)))
    print(json.dumps(sorted(found.items())), flush=True)

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""


def sample(number: int) -> bytes:
    """Return the bytes of a sample: no two samples have a block in common."""
    block = np.arange(SAMPLE_BYTES // 8 + 1, dtype=np.uint64)
    return (block * np.uint64(2654435761) + np.uint64(number << 40)).tobytes()[:SAMPLE_BYTES]


@pytest.fixture(scope="module", autouse=True)
def quick_opening() -> None:
    """Leave the default memory, which is under test."""


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[int]]]:
    """Make a volume of 1 GiB; return its URI and the CRC32 of each sample."""
    path = tmp_path_factory.mktemp("groups") / "v.img"
    dlfs.format_volume(str(path), size_bytes=COUNT * SAMPLE_BYTES + 128 * MIB)
    checks = []
    with dlfs.open(str(path)) as opened, opened.writer("d") as writer:
        for number in range(COUNT):
            data = sample(number)
            checks.append(zlib.crc32(data))
            writer.add(f"{number:06}", data)
    yield str(path), checks
    path.unlink()


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group(LIMIT_BYTES) as made:
        yield made


def read_in(group: MemoryGroup, uri: str, seed: int, workers: int = 0) -> subprocess.Popen[bytes]:
    """Start a program that reads an epoch."""
    command = (sys.executable, "-c", READ, uri, str(seed), str(workers))
    return group.run(*command, stdout=subprocess.PIPE)


def check(reader: subprocess.Popen[bytes], checks: list[int]) -> None:
    """Wait for a program, and check that each sample was read once and right."""
    output, _ = reader.communicate(timeout=500)
    assert reader.returncode == 0
    assert json.loads(output) == [[index, crc] for index, crc in enumerate(checks)]


def test_a_service_and_its_clients(
    group: MemoryGroup, volume: tuple[str, list[int]], tmp_path: Path
) -> None:
    uri, checks = volume
    program = group.wrapped("-m", "dlfs.cli")
    service = Service([uri], tmp_path / "s.sock", program=program).wait_ready()
    try:
        assert service.snapshot()["memory"]["memory_bytes"] == LIMIT_BYTES // 4
        readers = [read_in(group, service.uri, seed) for seed in range(CLIENTS)]
        for reader in readers:
            check(reader, checks)
        service.stop()
    finally:
        service.close()
    assert group.kills() == 0


@pytest.mark.torch
def test_a_loader_with_workers(group: MemoryGroup, volume: tuple[str, list[int]]) -> None:
    uri, checks = volume
    check(read_in(group, uri, 1, workers=4), checks)
    assert group.kills() == 0


@pytest.mark.fuse
def test_a_mount(group: MemoryGroup, volume: tuple[str, list[int]], tmp_path: Path) -> None:
    uri, checks = volume
    directory = tmp_path / "mnt"
    directory.mkdir()
    dlfs_command = (sys.executable, "-m", "dlfs.cli")
    log = (tmp_path / "log").open("wb")
    mount = group.run(*dlfs_command, "mount", uri, str(directory), stderr=log, stdout=log)
    assert mount.wait(100) == 0, (tmp_path / "log").read_text()
    try:
        for number in np.random.default_rng(1).permutation(COUNT).tolist():
            with open(directory / "d" / f"{number:06}", "rb") as file:
                assert zlib.crc32(file.read()) == checks[number]
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        subprocess.run([*dlfs_command, "umount", str(directory)], check=True, stderr=log)
        log.close()
    assert group.kills() == 0
