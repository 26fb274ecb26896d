"""The memory of a service: one arena for all its datasets, within its bound."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from tests.service.serving import Service, add_dataset, make_samples
from tests.support.scripts import hear, running, tell
from tests.support.waiting import wait_for

VERSIONS = 20
SAMPLES = 60
IMAGE_BYTES = 6000
CHOICES = ("label", "weight", "name", "label,weight")
CACHE_BYTES = 4 * MIB
PROCESSES = 2

READ_FIELDS = """
import sys
import numpy as np
import dlfs

SAMPLES = int(sys.argv[4])
versions = range(int(sys.argv[2]), int(sys.argv[3]))
volume = dlfs.connect(sys.argv[1])
datasets = {version: volume.dataset("d", version) for version in versions}
choices = [None, *(text.split(",") for text in sys.argv[5:])]

def check(version, batch, fields):
    numbers = batch.indices.tolist()
    names = ["image", "label", "weight", "name"] if fields is None else fields
    assert sorted(batch.fields) == sorted(names), list(batch.fields)
    if "label" in names:
        assert batch["label"].tolist() == [version * SAMPLES + n for n in numbers]
    if "weight" in names:
        assert batch["weight"].tolist() == [version + n / 4 for n in numbers]
    if "name" in names:
        assert batch["name"] == [f"{version}-{n}" for n in numbers]
    if "image" in names:
        for number, image in zip(numbers, batch["image"]):
            drawn = np.random.default_rng([version, number]).bytes(len(image))
            assert bytes(image) == drawn
    return numbers

for epoch in range(2):
    open_epochs = {
        (version, number): datasets[version].batches(7, seed=epoch, fields=choices[number])
        for version in versions for number in range(len(choices))
    }
    seen = {key: [] for key in open_epochs}
    while open_epochs:
        for key, batches in list(open_epochs.items()):
            batch = next(batches, None)
            if batch is None:
                assert sorted(seen[key]) == list(range(SAMPLES)), key
                del open_epochs[key]
            else:
                seen[key] += check(key[0], batch, choices[key[1]])
    print("read", flush=True)
    sys.stdin.readline()
"""

HOLD = """
import sys
import dlfs

dataset = dlfs.connect(sys.argv[1])[sys.argv[2]]
wanted = dataset.read(range(len(dataset))).to_list()
again = dataset.read(range(len(dataset)))
epoch = dataset.batches(16, seed=1)
held = [next(epoch) for _ in range(3)]
print("holds", flush=True)
sys.stdin.readline()
right = again.to_list() == wanted and all(
    batch.to_list() == [wanted[i] for i in batch.indices.tolist()] for batch in held
)
print(right, flush=True)
"""


def arena_files(service: Service) -> dict[int, int]:
    """Return the bytes that the service's arenas have of the system, by their inodes."""
    found = {}
    directory = f"/proc/{service.pid}/fd"
    for number in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"{directory}/{number}").startswith("/memfd:dlfs-arena"):
                status = os.stat(f"{directory}/{number}")
                found[status.st_ino] = status.st_blocks * 512
    return found


def check_memory(service: Service, bound_bytes: int) -> None:
    """Check that the service has one arena, within its bound."""
    memory = service.snapshot()["memory"]
    assert memory["held_bytes"] <= memory["memory_bytes"] <= bound_bytes
    (size_bytes,) = arena_files(service).values()
    assert 0 < size_bytes <= bound_bytes


def test_versions_and_choices_of_fields_share_the_memory(
    serve: Callable[..., Service], tmp_path: Path
) -> None:
    path = str(tmp_path / "v.img")
    dlfs.format_volume(path, size_bytes=64 * MIB, chunk_bytes=64 * KIB)
    with dlfs.open(path) as volume:
        for version in range(1, VERSIONS + 1):
            with volume.writer("d") as writer:
                for number in range(SAMPLES):
                    image = np.random.default_rng([version, number]).bytes(IMAGE_BYTES)
                    label, weight = version * SAMPLES + number, version + number / 4
                    fields = {"image": image, "label": label, "weight": weight}
                    writer.add(f"{number:03}", {**fields, "name": f"{version}-{number}"})
    assert VERSIONS * SAMPLES * IMAGE_BYTES > 1.5 * CACHE_BYTES
    service = serve(path, options=("--cache", str(CACHE_BYTES)))
    with contextlib.ExitStack() as stack:
        bounds = np.linspace(1, VERSIONS + 1, PROCESSES + 1, dtype=int).tolist()
        readers = [
            stack.enter_context(
                running(READ_FIELDS, service.uri, str(first), str(end), str(SAMPLES), *CHOICES)
            )
            for first, end in itertools.pairwise(bounds)
        ]
        for _epoch in range(2):
            for reader in readers:
                assert hear(reader) == "read"
            check_memory(service, CACHE_BYTES)
            for reader in readers:
                tell(reader)
        for reader in readers:
            assert reader.wait(100) == 0
    wait_for(lambda: service.clients() == [], "the readers to go")
    found = service.snapshot()["datasets"]
    assert len(found) <= 16
    assert sum(entry["cache_bytes"] for entry in found) <= CACHE_BYTES


@pytest.fixture
def two(tmp_path: Path, volume: str, samples: dict[bytes, bytes]) -> tuple[str, int]:
    """Return a volume with two datasets without large samples, and memory that suffices for one."""
    small = {path: data[:6000] for path, data in samples.items()}
    for name in ("one", "two"):
        add_dataset(volume, small if name == "one" else make_small(7), name)
    return volume, int(1.7 * sum(map(len, small.values())))


def make_small(seed: int) -> dict[bytes, bytes]:
    return {path: data[:6000] for path, data in make_samples(seed=seed).items()}


def is_resident(dataset: dlfs.Dataset) -> bool:
    """Read a dataset twice; return True if the second time needs no request to the service."""
    everything = np.arange(len(dataset), dtype=np.uint64)
    native = dataset.session.reader.native
    native.read(everything)
    channel = native.take_channel()
    native.return_channel(channel, 0)
    before = channel.stats()["requests"]
    native.read(everything)
    return channel.stats()["requests"] == before


@pytest.mark.parametrize("ends", ["killed", "stopped"])
def test_a_client_that_holds_resident_batches(
    serve: Callable[..., Service], two: tuple[str, int], ends: str
) -> None:
    path, cache_bytes = two
    service = serve(path, options=("--cache", str(cache_bytes)))
    bound_bytes = arena_bound(cache_bytes)
    expected = {"one": None, "two": list(make_small(7).values())}
    with running(HOLD, service.uri, "one") as holder:
        assert hear(holder) == "holds"
        if ends == "stopped":
            os.kill(holder.pid, signal.SIGSTOP)
        with dlfs.connect(service.uri) as volume, volume["two"] as other:
            assert not is_resident(other)  # the first dataset has the memory
            for seed in range(3):
                for batch in other.batches(50, seed=seed):
                    with batch:
                        numbers = batch.indices.tolist()
                        assert batch.to_list() == [expected["two"][i] for i in numbers]
            check_memory(service, bound_bytes)
        if ends == "stopped":
            os.kill(holder.pid, signal.SIGCONT)
            tell(holder)
            assert hear(holder) == "True"
            assert holder.wait(100) == 0
        else:
            holder.kill()
            holder.wait()
    wait_for(lambda: service.clients() == [], "the client to be forgotten")
    with dlfs.connect(service.uri) as volume, volume["two"] as other:
        assert is_resident(other)
        assert other.read(range(len(other))).to_list() == expected["two"]
        with volume["one"] as first:
            assert not is_resident(first)
    check_memory(service, bound_bytes)
    service.stop()


def arena_bound(cache_bytes: int) -> int:
    """Return the bytes of an arena: whole huge pages."""
    return -(-cache_bytes // (2 * MIB)) * 2 * MIB
