"""Attributes of datasets on volumes: written, sealed, read, shared, removed."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import (
    ChecksumError,
    ClosedError,
    NotFoundError,
    SpaceError,
    StaleError,
    UsageError,
)
from dlfs.format.geometry import DataSpace
from dlfs.ingest.importer import import_dataset
from dlfs.ingest.source import SampleBlock, Source
from tests.support.files import write_at
from tests.support.forked import run_forked

Rows = dict[bytes, dict[str, Any]]


@pytest.fixture
def make_volume(tmp_path: Path) -> Generator[Callable[..., dlfs.Volume], None, None]:
    volumes: list[dlfs.Volume] = []

    def make(size_bytes: int = 8 * MIB, members: int = 1, **options: Any) -> dlfs.Volume:
        paths = [str(tmp_path / f"{len(volumes)}-{i}.img") for i in range(members)]
        dlfs.format_volume(paths, size_bytes=size_bytes, **options)
        volumes.append(dlfs.open(paths))
        return volumes[-1]

    yield make
    for volume in volumes:
        volume.close()


def rows_of(count: int, seed: int = 0) -> Rows:
    draw = random.Random(seed)
    return {
        b"d%d/%05d" % (i % 7, i): {
            "label": draw.randrange(10),
            "weight": draw.random(),
            "split": draw.choice(["train", "test"]),
            "caption": f"sample {i} " + "x" * draw.randrange(30),
        }
        for i in range(count)
    }


def check(dataset: dlfs.Dataset, rows: Rows) -> None:
    assert dataset.paths() == sorted(rows)
    for name in dataset.columns:
        assert dataset.column(name).tolist() == [rows[path][name] for path in sorted(rows)]


@pytest.mark.parametrize("layout", ["shuffled", "path"])
@pytest.mark.parametrize(
    "geometry",
    [
        {"chunk_bytes": 4 * KIB},
        {"chunk_bytes": 64 * KIB, "block_bytes": 64 * KIB},
        {"chunk_bytes": 16 * KIB, "members": 3, "replicas": 2},
    ],
    ids=["small", "large blocks", "replicas"],
)
def test_columns_are_in_index_order_however_samples_are_packed(
    make_volume: Callable[..., dlfs.Volume], geometry: dict[str, int], layout: str
) -> None:
    volume = make_volume(**geometry)
    rows = rows_of(700)
    paths = list(rows)
    random.Random(1).shuffle(paths)
    with volume.writer("ds", layout=layout, stage_bytes=20_000) as writer:
        for path in paths[:100]:
            writer.add(path, path * 30, attributes=rows[path])
        writer.add(paths[100], bytes(30_000), attributes=rows[paths[100]])  # larger than the stage
        for first in range(101, 700, 150):
            some = paths[first : first + 150]
            lengths = np.array([len(path) for path in some])
            columns = {name: [rows[path][name] for path in some] for name in rows[some[0]]}
            offsets = np.cumsum(lengths) - lengths
            writer.add_batch(some, b"".join(some), offsets, lengths, attributes=columns)
    with volume["ds"] as dataset:
        check(dataset, rows)
        assert dataset.column("label", [5, 1]).tolist() == dataset.column("label")[[5, 1]].tolist()
        assert dataset.get(paths[50]) == paths[50] * 30
        for batch in dataset.batches(64, shuffle="chunk"):
            assert [dataset.path(int(i)) for i in batch.indices]
        assert dataset.info.attribute_bytes >= 700 * 17
    assert list(volume.verify()) == []


def test_a_dataset_without_attributes_has_no_columns(
    make_volume: Callable[..., dlfs.Volume],
) -> None:
    volume = make_volume()
    with volume.writer("ds") as writer:
        writer.add("a", b"x")
    with volume["ds"] as dataset:
        assert dataset.columns == {}
        assert dataset.info.attribute_bytes == 0
        with pytest.raises(NotFoundError, match="'label'"):
            dataset.column("label")


def test_refused_attributes_leave_the_writer_unchanged(
    make_volume: Callable[..., dlfs.Volume],
) -> None:
    volume = make_volume()
    with volume.writer("ds") as writer:
        writer.add("a", b"x", attributes={"label": 3})
        with pytest.raises(UsageError, match="'label': expected int64, got strings"):
            writer.add("b", b"x", attributes={"label": "three"})
        zeros = np.zeros(2, np.int64)
        with pytest.raises(UsageError, match="expected 2 values"):
            writer.add_batch([b"b", b"c"], b"", zeros, zeros, attributes={"label": [1]})
        writer.add("b", b"y", attributes={"label": 4})
        assert writer.sample_count == 2
    with volume["ds"] as dataset:
        assert dataset.column("label").tolist() == [3, 4]


def test_removing_a_dataset_frees_the_chunks_of_its_attributes(
    make_volume: Callable[..., dlfs.Volume],
) -> None:
    volume = make_volume(chunk_bytes=4 * KIB)
    before = volume.free_bytes
    with volume.writer("ds") as writer:
        writer.add_batch(
            [b"%d" % i for i in range(5000)], b"", np.zeros(5000, int), np.zeros(5000, int),
            attributes={"x": np.arange(5000)},
        )  # fmt: skip
    info = volume.datasets()[0]
    assert info.attribute_bytes == 4096 + 40960  # the head and ten blocks
    assert before - volume.free_bytes >= info.stored_bytes
    volume.remove("ds")
    assert volume.free_bytes == before


def test_attributes_that_do_not_fit_leave_the_volume_unchanged(
    make_volume: Callable[..., dlfs.Volume],
) -> None:
    volume = make_volume(2 * MIB, chunk_bytes=4 * KIB)
    before = volume.free_bytes
    count = 100_000
    zeros = np.zeros(count, np.int64)
    paths = [b"%06d" % i for i in range(count)]
    writer = volume.writer("ds", layout="path")
    writer.add_batch(paths, b"", zeros, zeros, attributes={"x": np.arange(count)})
    with pytest.raises(SpaceError):
        writer.seal()
    volume.refresh()
    assert volume.free_bytes == before
    assert volume.datasets() == []


def parts(dataset: dlfs.Dataset) -> list[str]:
    root = Path(f"/dev/shm/dlfs-{os.geteuid()}")
    return sorted(path.name for path in root.glob(f"*{dataset.uuid.hex}*column*.part"))


def test_columns_are_loaded_one_by_one_into_shared_memory(
    make_volume: Callable[..., dlfs.Volume],
) -> None:
    volume = make_volume()
    rows = rows_of(100)
    with volume.writer("ds") as writer:
        for path, values in rows.items():
            writer.add(path, b"", attributes=values)
    first, second = volume["ds"], volume["ds"]
    assert parts(first) == []
    label = first.column("label")
    assert len(parts(first)) == 1
    assert second.column("label").tolist() == label.tolist()
    assert len(parts(first)) == 1
    first.column("caption")
    assert len(parts(first)) == 2
    first.close()
    second.close()
    assert parts(first) == []
    assert label.tolist() == [rows[path]["label"] for path in sorted(rows)]  # views stay good
    with pytest.raises(ClosedError):
        first.column("label")


def test_columns_in_other_processes(make_volume: Callable[..., dlfs.Volume]) -> None:
    volume = make_volume()
    rows = rows_of(50)
    with volume.writer("ds") as writer:
        for path, values in rows.items():
            writer.add(path, b"", attributes=values)
    with volume["ds"] as dataset, pickle.loads(pickle.dumps(dataset)) as again:
        dataset.column("label")
        check(again, rows)
        assert run_forked(check, dataset, rows) == 0
        check(dataset, rows)


def test_a_dataset_that_was_removed_is_stale(make_volume: Callable[..., dlfs.Volume]) -> None:
    volume = make_volume(2 * MIB, chunk_bytes=4 * KIB)
    with volume.writer("ds") as writer:
        writer.add("a", b"x", attributes={"x": 1, "y": 2})
    with volume["ds"] as dataset:
        assert dataset.column("x").tolist() == [1]
        volume.remove("ds")
        for name in ("other", "one more"):
            with volume.writer(name) as writer:
                writer.add("a", random.Random(1).randbytes(300_000))
        with pytest.raises(StaleError, match="it was removed"):
            dataset.column("y")
        assert dataset.column("x").tolist() == [1]


def test_each_block_of_a_column_is_read_from_a_copy_that_has_it_right(
    make_volume: Callable[..., dlfs.Volume],
) -> None:
    volume = make_volume(members=3, replicas=2)
    values = np.arange(20_000)
    with volume.writer("ds") as writer:
        zeros = np.zeros(len(values), int)
        writer.add_batch([b"%05d" % i for i in values], b"", zeros, zeros, attributes={"x": values})
    uri = volume.uri
    record = volume._local("test").catalog.datasets[0]
    geometry = volume._local("test").superblock.geometry
    space = DataSpace(geometry, record.split_data_runs(geometry.chunk_bytes)[1])
    for block, copy in ((3, 0), (5, 1)):  # of one chunk
        member, offset_bytes = space.resolve(block * 4096 + 7, copy)
        write_at(Path(uri.split(",")[member]), offset_bytes, b"\xee")
    with volume["ds"] as dataset:
        assert np.array_equal(dataset.column("x"), values)
    assert [finding.kind for finding in volume.verify()] == ["attributes"] * 2
    assert dlfs.repair(uri).damaged == ()
    assert list(volume.verify()) == []
    for copy in (0, 1):  # what no copy has
        member, offset_bytes = space.resolve(3 * 4096 + 7, copy)
        with Path(uri.split(",")[member]).open("r+b") as file:
            file.seek(offset_bytes)
            file.write(b"\xee")
    with volume["ds"] as dataset, pytest.raises(ChecksumError, match="block at byte 12288"):
        dataset.column("x")


def test_strings_keep_the_nuls_at_their_ends(make_volume: Callable[..., dlfs.Volume]) -> None:
    volume = make_volume()
    zeros = np.zeros(2, int)
    with volume.writer("ds") as writer:
        writer.add("a", b"", attributes={"x": "one\0"})
        writer.add_batch([b"b", b"c"], b"", zeros, zeros, attributes={"x": ["\0", "two\0\0"]})
    with volume["ds"] as dataset:
        assert dataset.column("x").tolist() == ["one\0", "\0", "two\0\0"]


class LabelledSource(Source):
    """Samples with labels."""

    name = "labelled"
    sample_count = None
    sample_bytes = None
    gives_shuffled = False
    skipped: Mapping[str, int] = {}
    empty_directories: Sequence[bytes] = ()
    left_out = 0

    def blocks(self, *, layout: str, seed: int) -> Generator[SampleBlock, None, None]:
        for block in range(3):
            paths = [b"%d/%d" % (block, i) for i in range(4)]
            data = np.arange(8, dtype=np.uint8) + 10 * block
            yield SampleBlock(
                paths, data, np.arange(0, 8, 2), np.full(4, 2),
                {"label": np.arange(4) + block, "block": np.full(4, f"b{block}")},
            )  # fmt: skip

    def finish(self) -> None: ...

    def close(self) -> None: ...


def test_an_import_keeps_what_its_source_says(make_volume: Callable[..., dlfs.Volume]) -> None:
    volume = make_volume()
    import_dataset(volume, LabelledSource(), "ds")
    with volume["ds"] as dataset:
        assert dataset.column("label").tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5]
        assert dataset.column("block").tolist() == ["b0"] * 4 + ["b1"] * 4 + ["b2"] * 4
