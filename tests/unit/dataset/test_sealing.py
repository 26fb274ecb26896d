"""The seal of an import in steps: sorted streams of all steps, merged while others write."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.attributes import builder
from dlfs.base.units import KIB, MIB
from dlfs.dataset import committed_steps, sealing, step_cutter
from dlfs.dataset.step_writer import StepWriter
from dlfs.errors import ExistsError, StaleError
from dlfs.store import excerpts
from tests.support.volumes import new_volume, read_dataset, write_dataset

CHUNK_BYTES = 4 * KIB
STEP_BYTES = 40 * KIB


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have many blocks and excerpts of few samples."""
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    monkeypatch.setattr(sealing, "BUFFERED_SAMPLES", 64)
    monkeypatch.setattr(sealing, "BLOCK_SAMPLES_MIN", 16)
    monkeypatch.setattr(excerpts, "READ_BYTES", 4096)


@pytest.fixture
def volume(tmp_path: Path) -> Any:
    path = new_volume(tmp_path / "v.img", size_bytes=32 * MIB, chunk_bytes=CHUNK_BYTES)
    with dlfs.open(path) as opened:
        yield opened


def add(writer: Any, samples: dict[bytes, bytes], columns: dict[str, Any]) -> None:
    lengths = np.array([len(data) for data in samples.values()], np.int64)
    writer.add_batch(
        list(samples),
        b"".join(samples.values()),
        np.cumsum(lengths) - lengths,
        lengths,
        attributes=columns,
    )


def content(volume: dlfs.Volume, name: str) -> tuple[Any, ...]:
    with volume[name] as dataset:
        directory = dataset.session.directory
        columns = {key: dataset.column(key) for key in dataset.columns}
        return (
            directory.names(),
            directory.lengths().tolist(),
            directory.crcs().tolist(),
            directory.empty_directories(),
            {key: (str(values.dtype), values.tolist()) for key, values in columns.items()},
        )


def random_columns(count: int, first: int) -> dict[str, Any]:
    numbers = np.arange(first, first + count)
    return {
        "int": numbers,
        "bool": numbers % 3 == 0,
        "float": numbers.astype(np.float32) / 7,
        "vector": np.stack([numbers, -numbers], axis=1),
        "class": np.array([f"c{n % 5}" for n in numbers], object),
        "mostly": np.array(["" if n < 2000 else f"only {n}" for n in numbers], object),
        "text": np.array([f"text é {n}" * (n % 3) for n in numbers], object),
    }


@pytest.mark.parametrize("sorted_source", [True, False])
def test_steps_are_merged_to_the_dataset_of_one_writer(
    volume: dlfs.Volume, monkeypatch: pytest.MonkeyPatch, sorted_source: bool
) -> None:
    monkeypatch.setattr(builder, "DICTIONARY_VALUES_MAX", 300)
    chance = random.Random(1)
    paths = [b"%d/%s%d" % (n % 7, b"x" * (n % 50), n) for n in range(3000)]
    paths.sort() if sorted_source else chance.shuffle(paths)
    sizes = [
        chance.choice([0, 1, 30, 200, 5 * CHUNK_BYTES + 3]) // (n % 9 + 1) for n in range(3000)
    ]
    samples = {path: chance.randbytes(size) for path, size in zip(paths, sizes, strict=True)}
    for name in ("whole", "steps"):
        writer: Any = volume.writer(name, layout="path")
        if name == "steps":
            writer.abort()
            writer = volume.step_writer(name, {}, step_bytes=STEP_BYTES, layout="path")
        with writer:
            for first in range(0, 3000, 100):
                chosen = dict(list(samples.items())[first : first + 100])
                add(writer, chosen, random_columns(100, first))
            for path in (b"empty/a/b", b"empty", b"0", b"zzz", b"zzz"):
                writer.add_directory(path)
    assert content(volume, "steps") == content(volume, "whole")
    assert list(volume.verify()) == []
    assert read_dataset(volume, "steps") == samples


def started(volume: dlfs.Volume, *steps: dict[bytes, bytes]) -> StepWriter:
    """Return a writer that has committed each of these as a step."""
    writer = volume.step_writer("x", {}, step_bytes=1, layout="path")
    for samples in steps:
        add(writer, samples, {"n": np.arange(len(samples))})
    return writer


@pytest.mark.parametrize(
    ("first", "second", "directory", "message"),
    [
        (b"a/b", b"a/b", b"", "'a/b': it was added already"),
        (b"a", b"a/b", b"", "'a/b': 'a' is a sample"),
        (b"a/b/c", b"a/b", b"", "'a/b/c': 'a/b' is a sample"),
        (b"a.b", b"a", b"a/c", "'a/c': 'a' is a sample"),
        (b"b", b"a", b"a", "'a': a sample has this path"),
    ],
)
def test_paths_of_two_steps_that_exclude_each_other(
    volume: dlfs.Volume, first: bytes, second: bytes, directory: bytes, message: str
) -> None:
    writer = started(volume, {first: b"1", b"m": b"3"}, {second: b"2"})
    if directory:
        writer.add_directory(directory)
    with pytest.raises(ExistsError, match=message):
        writer.seal()
    volume.refresh()
    assert volume.datasets() == []
    assert len(volume.unfinished()) == 1


def test_others_write_while_the_seal_merges(volume: dlfs.Volume) -> None:
    writer = started(volume, *({b"%d" % n: b"%d" % n} for n in range(40)))
    written: list[str] = []

    def write(_samples: int) -> None:
        if len(written) < 3:
            written.append(f"other{len(written)}")
            with dlfs.open(volume.uri) as other:
                write_dataset(other, written[-1], {b"a": b"b"})

    writer.seal(write)
    assert [info.name for info in volume.datasets()] == [*written, "x"]
    numbers = {b"%d" % n: b"%d" % n for n in range(40)}
    assert read_dataset(volume, "x") == numbers
    assert list(volume.verify()) == []


def test_the_journal_is_moved_while_the_seal_merges(
    tmp_path: Path, volume: dlfs.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 300
    monkeypatch.setattr(step_cutter, "STEP_SAMPLES", count)
    members = [volume.uri, str(tmp_path / "w.img")]
    volume.grow([members[1]], size_bytes=32 * MIB)
    merged: list[int] = []

    def move(samples: int) -> None:
        merged.append(samples)
        if len(merged) == 1:
            with dlfs.open(members) as other:
                other.shrink([members[1]])
            with open(members[1], "r+b") as removed:  # as others would that use the device
                removed.seek(MIB)
                removed.write(bytes(31 * MIB - 64 * KIB))

    with dlfs.open(members) as opened:
        writer = opened.step_writer("x", {}, step_bytes=10 * MIB, layout="path")
        for step in range(8):
            add(writer, {b"%d" % n: b"%d" % n for n in range(step, 8 * count, 8)}, {})
        writer.seal(move)
    assert sum(merged) > 8 * count  # a part was merged again
    volume.refresh()
    assert read_dataset(volume, "x") == {b"%d" % n: b"%d" % n for n in range(8 * count)}
    assert list(volume.verify()) == []


def test_an_import_that_is_abandoned_while_the_seal_merges(volume: dlfs.Volume) -> None:
    writer = started(volume, *({b"%d" % n: b"1"} for n in range(3)))

    def abandon(samples: int) -> None:
        if samples and volume.unfinished():
            with dlfs.open(volume.uri) as other:
                other.abandon("x")
            volume.refresh()

    with pytest.raises(StaleError, match="it is gone") as raised:
        writer.seal(abandon)
    assert not hasattr(raised.value, "__notes__")


def test_what_is_called_during_the_seal_can_end_it(volume: dlfs.Volume) -> None:
    writer = started(volume, {b"a": b"1"}, {b"b": b"2"})

    def end(_samples: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.seal(end)
    write_dataset(volume, "other", {b"a": b"b"})  # the volume is unlocked
    with volume.step_writer("x", {}, step_bytes=1, layout="path"):
        pass
    assert len(volume["x"]) == 2
