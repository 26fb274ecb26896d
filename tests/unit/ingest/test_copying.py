"""Copies between volumes: fields, refusals, damage, and copies that are interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dlfs
from dlfs.base.arguments import Layout
from dlfs.base.units import KIB, MIB
from dlfs.dataset import committed_steps
from dlfs.format.bad_records import BadRecord, BadReport
from dlfs.ingest import copying
from dlfs.ingest.progress import Progress
from tests.support.files import write_at
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem

SAMPLES = {f"{number:03}": bytes([number]) * (number * 100) for number in range(200)}


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Make a volume with the dataset ``d``, and return its URI."""
    return make_volume(tmp_path / "source.img", SAMPLES)


@pytest.fixture
def target(tmp_path: Path) -> str:
    """Make an empty volume, and return its URI."""
    return make_volume(tmp_path / "target.img", {})


def make_volume(path: Path, samples: dict[str, bytes], size_bytes: int = 16 * MIB) -> str:
    dlfs.format_volume(str(path), size_bytes=size_bytes, chunk_bytes=64 * KIB)
    if samples:
        with dlfs.open(str(path)) as volume, volume.writer("d") as writer:
            for name, data in samples.items():
                writer.add(name, data, attributes={"number": int(name)})
    return str(path)


def contents(uri: str) -> list[tuple[str, int]]:
    with dlfs.open(uri) as volume:
        return [(info.name, info.version) for info in volume.datasets()]


def test_fields_and_arrays_are_copied(tmp_path: Path, target: str) -> None:
    path = make_volume(tmp_path / "fields.img", {})
    with dlfs.open(path) as volume, volume.writer("d", layout="path") as writer:
        for number in range(20):
            mask = np.full((number % 3, 2), number, np.int16)
            sample = {"image": bytes(number), "mask": mask, "text": f"t {number}"}
            writer.add(f"{number:02}", sample, attributes={"weight": number / 4})
    with dlfs.open(path) as volume, dlfs.open(target) as other, volume["d"] as original:
        dlfs.copy_dataset(original, other)
        with other["d"] as copy:
            assert copy.fields == original.fields
            assert copy.digests == original.digests
            assert copy.sample(7)["text"] == "t 7"
            assert copy.sample(8)["mask"].tolist() == [[8, 8]] * 2
            assert not dlfs.diff(original, copy)


def test_volumes_of_a_storage_node_are_copied_from_and_to(source: str) -> None:
    with ScriptedTarget([Subsystem(DEFAULT_NQN, [Namespace(16 * MIB)])]) as target:
        remote = target.uri()
        dlfs.format_volume(remote, chunk_bytes=64 * KIB)
        with dlfs.open(source) as volume, dlfs.open(remote) as other:
            with volume["d"] as original:
                dlfs.copy_dataset(original, other)
            with other["d"] as original:
                dlfs.copy_dataset(original, volume, "back")
            with volume["d"] as first, volume["back"] as last:
                assert not dlfs.diff(first, last)


def test_a_large_sample_is_read_alone(monkeypatch, source: str, target: str) -> None:
    monkeypatch.setattr(copying, "BLOCK_BYTES", 10_000)
    done = []
    with dlfs.open(source) as volume, dlfs.open(target) as other, volume["d"] as original:
        dlfs.copy_dataset(original, other, progress=lambda now: done.append(now.samples_done))
        with other["d"] as copy:
            assert not dlfs.diff(original, copy)
    assert done[-1] == len(SAMPLES)
    assert 1 in np.diff(done)


def test_a_name_that_is_taken_gets_a_version(source: str) -> None:
    with dlfs.open(source) as volume, volume["d"] as original:
        assert dlfs.copy_dataset(original, volume).version == 2
        assert dlfs.copy_dataset(original, volume, "e").version == 1
        with pytest.raises(dlfs.UsageError, match="name a new dataset"):
            dlfs.copy_dataset(original, volume, "a@1")
    assert contents(source) == [("d", 1), ("d", 2), ("e", 1)]


def test_a_full_target_stays_as_it_was(tmp_path: Path, source: str) -> None:
    small = make_volume(tmp_path / "small.img", {}, 2 * MIB)
    with dlfs.open(source) as volume, dlfs.open(small) as other, volume["d"] as original:
        free = other.free_bytes
        with pytest.raises(dlfs.SpaceError):
            dlfs.copy_dataset(original, other)
        other.refresh()
        assert (other.datasets(), other.free_bytes) == ([], free)


def test_a_damaged_sample_ends_the_copy(source: str, target: str) -> None:
    with dlfs.open(source) as volume, volume["d"] as original:
        place = original.stat(150)
        write_at(source, place.offset_bytes, b"\xff")
        with dlfs.open(target) as other, pytest.raises(dlfs.ChecksumError, match="150"):
            dlfs.copy_dataset(original, other)
    assert contents(target) == []


def test_a_copy_that_is_interrupted_leaves_nothing(monkeypatch, source: str, target: str) -> None:
    monkeypatch.setattr(copying, "BLOCK_BYTES", 400_000)

    def interrupt(_progress: object) -> None:
        raise KeyboardInterrupt

    with dlfs.open(source) as volume, dlfs.open(target) as other, volume["d"] as original:
        with pytest.raises(KeyboardInterrupt):
            dlfs.copy_dataset(original, other, progress=interrupt)
        assert not [each for each in threading.enumerate() if "dlfs-ingest" in each.name]
        assert contents(target) == []
        assert dlfs.copy_dataset(original, other).version == 1


@pytest.mark.parametrize("layout", ["shuffled", "path"])
@pytest.mark.parametrize("within", [False, True], ids=["to another volume", "in one volume"])
def test_a_copy_that_ends_early_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: Layout, within: bool
) -> None:
    monkeypatch.setattr(copying, "BLOCK_BYTES", 100_000)
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    one, two, three = (make_volume(tmp_path / f"{number}.img", {}) for number in range(3))
    with dlfs.open(one) as volume, volume.writer("d", layout=layout, seed=5) as writer:
        for name, data in SAMPLES.items():
            writer.add(name, data, attributes={"number": int(name)})
        writer.add_directory("empty")
        writer.bad += BadReport(2, {"malformed": 2}, (BadRecord("x.tar", "1", "short"),))
    target = one if within else two
    read: list[int] = []
    read_block = copying.DatasetSource._block

    def counted(self: copying.DatasetSource, indices: NDArray[np.uint64], *rest: Any) -> Any:
        read.append(len(indices))
        return read_block(self, indices, *rest)

    monkeypatch.setattr(copying.DatasetSource, "_block", counted)

    def copy(target: str, name: str, stop_at: float = np.inf) -> None:
        def interrupt(progress: Progress) -> None:
            if progress.samples_done >= stop_at:
                raise KeyboardInterrupt

        with dlfs.open(one) as volume, dlfs.open(target) as other, volume["d"] as original:
            dlfs.copy_dataset(original, other, name, step_bytes=300_000, progress=interrupt)

    for stop_at in (1, 100, 60):
        with pytest.raises(KeyboardInterrupt):
            copy(target, "e", stop_at)
    with dlfs.open(target) as other:
        (unfinished,) = other.unfinished()
    assert (unfinished.name, unfinished.origin["source"]) == ("e", "d@1")
    assert 0 < unfinished.sample_count < len(SAMPLES)
    read.clear()
    copy(target, "e")
    assert sum(read) == len(SAMPLES) - unfinished.sample_count
    copy(three, "e")
    with dlfs.open(one) as volume, dlfs.open(target) as other, dlfs.open(three) as whole:
        with volume["d"] as original, other["e"] as copied, whole["e"] as expected:
            assert not dlfs.diff(original, copied)
            assert copied.bad_records() == original.bad_records().of_version(1)
            assert copied.empty_directories() == [b"empty"]
            places = [each.directory.addresses().tolist() for each in (copied, expected, original)]
            assert places[0] == places[1] == places[2]
            assert original.digests == copied.digests == expected.digests
        assert list(other.verify()) == []


KILLED = """
import os, signal, sys, dlfs
from dlfs.ingest import copying
copying.BLOCK_BYTES = 400_000
def die(now):
    if now.samples_done >= int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
with dlfs.open(sys.argv[1]) as volume, dlfs.open(sys.argv[2]) as other, volume["d"] as dataset:
    dlfs.copy_dataset(dataset, other, progress=die)
"""


def test_a_copy_that_is_killed_leaves_nothing(source: str, target: str) -> None:
    words = [sys.executable, "-c", KILLED, source, target, str(len(SAMPLES) // 2)]
    assert subprocess.run(words).returncode == -signal.SIGKILL
    assert contents(target) == []
    with dlfs.open(source) as volume, dlfs.open(target) as other, volume["d"] as original:
        free = other.free_bytes
        assert dlfs.copy_dataset(original, other).version == 1
        assert other.usage().stored_bytes <= free - other.free_bytes
        assert not list(other.verify())
