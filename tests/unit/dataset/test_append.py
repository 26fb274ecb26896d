"""A version that samples are appended to: its content, its space, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.connection.previous_version import SharedChunks
from dlfs.directory import FrozenDirectory
from dlfs.errors import ExistsError, NotFoundError, UsageError
from dlfs.store.chunk_reader import Window, scan_space
from tests.support.files import write_at
from tests.support.volumes import write_dataset

CHUNK_BYTES = 4096


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[dlfs.Volume]:
    path = tmp_path / "volume.img"
    dlfs.format_volume(path, size_bytes=8 << 20, chunk_bytes=CHUNK_BYTES, block_bytes=4096)
    with dlfs.open(path) as volume:
        yield volume


def write(volume: dlfs.Volume, samples: dict[str, bytes], *, append: bool = False) -> None:
    write_dataset(volume, "a", samples, append=append)


def read(dataset: dlfs.Dataset) -> dict[str, bytes]:
    """Return all samples, read by epochs and one by one."""
    one_by_one = {path.decode(): dataset.get(path) for path in dataset.paths()}
    in_epoch: dict[str, bytes] = {}
    paths = dataset.paths()
    for batch in dataset.batches(7):
        in_epoch |= {
            paths[index].decode(): bytes(sample)
            for index, sample in zip(batch.indices.tolist(), batch, strict=True)
        }
    assert in_epoch == one_by_one
    return one_by_one


def test_versions_of_growing_datasets_have_their_samples(volume: dlfs.Volume) -> None:
    generator = np.random.default_rng(3)
    samples: dict[str, bytes] = {}
    versions = []
    for version in range(1, 6):
        new = {f"{i % 7}/{version}-{i}": generator.bytes(997 * i % 6000) for i in range(23)}
        write(volume, new, append=version > 1)
        samples = {**samples, **new}
        versions.append(samples)
    for version, expected in enumerate(versions, 1):
        with volume.dataset("a", version) as dataset:
            assert read(dataset) == expected
    assert not list(volume.verify())
    for version in (3, 1, 5, 2):
        volume.remove("a", version)
        assert not list(volume.verify())
    assert read(volume["a"]) == versions[3]


def test_an_appended_version_takes_the_space_of_its_new_samples(volume: dlfs.Volume) -> None:
    empty = volume.free_bytes
    write(volume, {f"{i}": bytes([i]) * 4000 for i in range(200)})
    one = empty - volume.free_bytes
    write(volume, {"new": b"x" * 4000}, append=True)
    assert empty - volume.free_bytes - one <= 20 * CHUNK_BYTES  # directory, catalog, one sample
    volume.remove("a", 1)
    assert len(volume["a"]) == 201
    volume.remove("a")
    assert volume.free_bytes == empty


def test_an_earlier_version_can_be_appended_to(volume: dlfs.Volume) -> None:
    write(volume, {"one": b"1"})
    write(volume, {"two": b"2"}, append=True)
    with volume.append("a@1") as writer:
        writer.add("three", b"3")
    assert [info.version for info in volume.versions("a")] == [1, 2, 3]
    assert read(volume["a"]) == {"one": b"1", "three": b"3"}


def test_nothing_can_be_appended(volume: dlfs.Volume) -> None:
    write(volume, {"one": b"1"})
    write(volume, {}, append=True)
    write(volume, {"two": b"2"}, append=True)
    assert [info.sample_count for info in volume.versions("a")] == [1, 1, 2]
    with volume.writer("empty"):
        pass
    with volume.append("empty") as writer:
        writer.add("first", b"1")
    assert read(volume["empty"]) == {"first": b"1"}


def test_attributes_are_those_of_old_and_new_samples(volume: dlfs.Volume) -> None:
    with volume.writer("a") as writer:
        writer.add("m", b"", attributes={"label": 3, "text": "old"})
        writer.add("z", b"", attributes={"label": 4, "text": "older"})
    defaults = {"label": 0, "text": "", "weight": np.nan}
    with volume.append("a", defaults=defaults) as writer:
        writer.add("b", b"", attributes={"text": "new", "weight": 0.5})
        writer.add("n", b"", attributes={"label": 5})
    attributes = volume["a"].attributes
    assert volume["a"].paths() == [b"b", b"m", b"n", b"z"]
    assert attributes.column("label").tolist() == [0, 3, 5, 4]
    assert attributes.column("text").tolist() == ["new", "old", "", "older"]
    np.testing.assert_array_equal(attributes.column("weight"), [0.5, np.nan, np.nan, np.nan])
    assert attributes.column("label").dtype == np.int64
    with volume.append("a") as writer, pytest.raises(UsageError, match=r"'label'.*int64.*strings"):
        writer.add("c", b"", attributes={"label": "cat", "text": "", "weight": 1.0})


def test_new_samples_have_the_fields_of_the_old_ones(volume: dlfs.Volume) -> None:
    with volume.writer("a", fields={"image": "bytes", "mask": "|u1[?]"}) as writer:
        writer.add("b", {"image": b"one", "mask": np.arange(3, dtype=np.uint8)})
    with volume.append("a") as writer:
        with pytest.raises(UsageError, match="expected the fields image, mask, got bytes"):
            writer.add("c", b"bytes")
        with pytest.raises(UsageError, match="expected the fields image, mask, got image"):
            writer.add("c", {"image": b"two"})
        columns = {"dlfs:fields": ['{"x":"bytes"}']}
        with pytest.raises(UsageError, match="as in the samples before, got the fields"):
            writer.add_batch([b"c"], b"", np.zeros(1), np.zeros(1), attributes=columns)
        writer.add("a", {"image": b"two", "mask": np.arange(5, dtype=np.uint8)})
    with volume["a"].read([0, 1]) as batch:
        assert [bytes(image) for image in batch["image"]] == [b"two", b"one"]
        assert [mask.tolist() for mask in batch["mask"]] == [[0, 1, 2, 3, 4], [0, 1, 2]]


def test_fields_cannot_be_appended_to_bytes(volume: dlfs.Volume) -> None:
    write(volume, {"one": b"1"})
    with volume.append("a") as writer, pytest.raises(UsageError, match="got fields"):
        writer.add("two", {"image": b"2"})


def test_a_path_of_the_earlier_version_is_refused(volume: dlfs.Volume) -> None:
    write(volume, {"one/x": b"1"})
    for path in ("one/x", "one", "one/x/y"):
        with pytest.raises(ExistsError, match=path), volume.append("a") as writer:
            writer.add(path, b"2")
    assert len(volume.versions("a")) == 1
    write(volume, {"two": b"2"}, append=True)  # no lock is left


@pytest.mark.parametrize("name", ["b", "a@7"])
def test_there_must_be_a_version_to_append_to(volume: dlfs.Volume, name: str) -> None:
    write(volume, {"one": b"1"})
    with pytest.raises(NotFoundError, match=name[0]):
        volume.append(name)
    write(volume, {"two": b"2"}, append=True)


def test_appended_samples_with_attributes_stay_in_few_runs(volume: dlfs.Volume) -> None:
    for number in range(12):
        with volume.append("a") if number else volume.writer("a") as writer:
            writer.add(f"{number}", bytes(5000), attributes={"number": number})
    record = volume.session.catalog.datasets[-1]
    assert len(record.data_runs) <= 4  # samples around the first catalog, then the attributes
    assert volume["a"].attributes.column("number").tolist() == [0, 1, 10, 11, *range(2, 10)]


# ---- reading shared chunks once ------------------------------------------------------------------


def test_verification_and_repair_read_shared_chunks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uris = [str(tmp_path / name) for name in ("a.img", "b.img")]
    dlfs.format_volume(uris, size_bytes=8 << 20, chunk_bytes=CHUNK_BYTES, replicas=2)
    data = np.random.default_rng(5).bytes
    with dlfs.open(uris) as volume:
        for number in range(4):
            new = {f"{number}/{i}": data(1000) for i in range(40)} | {f"{number}/big": data(9000)}
            write(volume, new, append=number > 0)
        newest = volume.versions("a")[-1].stored_bytes
        count = 0

        def counted(*args: Any, **options: Any) -> Iterator[Window]:
            nonlocal count
            for window in scan_space(*args, **options):
                count += window.memory.nbytes
                yield window

        monkeypatch.setattr("dlfs.volume.verification.scan_space", counted)
        monkeypatch.setattr("dlfs.volume.copies.scan_space", counted)
        seen: list[tuple[int, int]] = []
        assert not list(volume.verify(progress=lambda *now: seen.append(now)))
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1]
        directories = 8 * CHUNK_BYTES
        assert count < 2 * (newest + 4 * directories)
        chunk = volume.session.catalog.datasets[0].data_runs[0].first_chunk
        member, offset = volume.session.superblock.geometry.locate(chunk, 0)
    count = 0
    assert dlfs.repair(uris).damaged == ()
    assert count < 2 * (newest + 4 * directories)
    write_at(uris[member], offset + 10, b"damaged")  # one copy of a sample that all versions have
    with dlfs.open(uris) as volume:
        assert [(found.kind, found.version) for found in volume.verify()] == [
            ("sample", version) for version in (1, 2, 3, 4)
        ]
        assert dlfs.repair(uris).damaged == ()
        assert not list(volume.verify())


def test_a_version_with_another_checksum_in_a_shared_chunk_is_read(volume: dlfs.Volume) -> None:
    write(volume, {"x": b"x" * 100, "y": b"y" * 5000})
    write(volume, {"z": b"z"}, append=True)
    catalog = volume.session.catalog
    first, second = catalog.datasets
    with volume["a"] as dataset:
        directory = dataset.directory
        shared = SharedChunks(volume.session.superblock.geometry, catalog.datasets)
        assert shared.size_bytes(first) == 0
        assert shared.size_bytes(second) == 3 * CHUNK_BYTES
        assert shared.start(second, directory) == 0
        with volume.dataset("a", 1) as earlier:
            shared.add_intact(first, earlier.directory)
        assert shared.start(second, directory) == 3 * CHUNK_BYTES
        shared.add_intact(first, Changed(directory))
        assert shared.start(second, directory) == 0


class Changed:
    """A directory in which one checksum differs."""

    def __init__(self, directory: FrozenDirectory) -> None:
        self.addresses, self.lengths = directory.addresses, directory.lengths
        self.crcs = lambda: directory.crcs() ^ np.uint32(1)
