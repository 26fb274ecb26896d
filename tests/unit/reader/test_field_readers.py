"""Reading some of the fields of samples: only their bytes are read, and they are verified."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import ChecksumError, ClosedError
from dlfs.format.geometry import DataSpace
from dlfs.reader import field_readers
from dlfs.store.members import close_devices
from dlfs.store.recorded import open_members
from dlfs.store.transaction import load_generation
from tests.support.volumes import flip_copies, new_volume
from tests.support.writers import other_writer

COUNT = 40
IMAGE_BYTES = 20_000
TYPES = {
    "image": "bytes",
    "caption": "text",
    "label": "<i8[]",
    "mask": "|u1[?,?]",
    "box": "<c16[1]",
    "points": "<f4[?,3]",
    "empty": "bytes",
}
CHOICES: list[list[str]] = [
    ["label"],
    ["image"],
    ["label", "caption"],
    ["points", "box"],
    ["empty"],
    ["caption", "mask"],
]


@cache
def sample_of(number: int) -> dict[str, Any]:
    random = np.random.default_rng(number)
    return {
        "image": random.bytes(IMAGE_BYTES + number),
        "caption": "ä" * (number % 7),
        "label": number,
        "mask": random.integers(0, 255, (100 + number % 3, 111), np.uint8),
        "box": np.array([number], "<c16"),
        "points": np.full((number % 5, 3), number, "<f4"),
        "empty": b"",
    }


def fill(uris: str | list[str], **options: Any) -> None:
    with dlfs.open(uris) as volume, volume.writer("scenes", fields=TYPES, **options) as writer:
        for number in range(COUNT):
            writer.add(f"{number:03}", sample_of(number), attributes={"even": number % 2 == 0})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = new_volume(str(tmp_path_factory.mktemp("fields") / "volume.img"), size_bytes=16 * MIB)
    fill(made)
    return made


@pytest.fixture
def scenes(path: str) -> Iterator[dlfs.Dataset]:
    with dlfs.open(path, memory_bytes=MIB) as volume, volume["scenes"] as dataset:
        yield dataset


def check(batch: dlfs.Batch, chosen: list[str]) -> None:
    """Compare the chosen fields of a batch with what was written."""
    assert list(batch.fields) == chosen
    for name in chosen:
        values = batch[name]
        for at, number in enumerate(batch.indices.tolist()):
            expected = sample_of(number)[name]
            got = bytes(values[at]) if TYPES[name] == "bytes" else values[at]
            assert np.array_equal(got, expected), (name, number)


def read_bytes(dataset: dlfs.Dataset) -> int:
    return dataset.stats()["read_bytes"]


@pytest.mark.parametrize("chosen", CHOICES)
def test_only_the_chosen_fields_are_read(scenes: dlfs.Dataset, chosen: list[str]) -> None:
    check(scenes.read([3, 0, 39, 3, 7], fields=chosen), chosen)
    before = read_bytes(scenes)
    for batch in scenes.batches(8, seed=1, fields=chosen):
        check(batch, chosen)
    small = not {"image", "mask"} & set(chosen)
    assert read_bytes(scenes) - before <= COUNT * (8 * KIB if small else IMAGE_BYTES + 8 * KIB)


def test_a_choice_that_saves_little_reads_whole_samples(scenes: dlfs.Dataset) -> None:
    batch = scenes.read([1, 2], fields=["image", "mask"])
    check(batch, ["image", "mask"])
    assert batch.lengths.tolist() == scenes.lengths([1, 2]).tolist()


def test_all_ways_of_an_epoch_work(scenes: dlfs.Dataset) -> None:
    mask = scenes.column("even")
    ways: list[dict[str, Any]] = [
        {"shuffle": None},
        {"shuffle": "chunk", "window_chunks": 2},
        {"where": mask, "seed": 3},
        {"weights": mask.astype(float), "draws": 70},
        {"order": [5, 4, 5]},
        {"plan": "chunks"},
        {"plan": "chunk_copy"},
        {"plan": "direct"},
    ]
    for way in ways:
        expected = [batch.indices.tolist() for batch in scenes.batches(8, **way)]
        got = []
        for batch in scenes.batches(8, fields=["caption", "label"], **way):
            check(batch, ["caption", "label"])
            got.append(batch.indices.tolist())
        assert got == expected, way


def test_an_epoch_resumes_with_other_fields(scenes: dlfs.Dataset) -> None:
    whole = scenes.batches(7, seed=5, shuffle="chunk")
    expected = [next(whole).indices.tolist() for _ in range(3)]
    some = scenes.batches(7, seed=5, shuffle="chunk", fields=["label"])
    assert next(some).indices.tolist() == expected[0]
    again = scenes.batches(7, shuffle="chunk", fields=["image"]).resume(some.state())
    batch = next(again)
    check(batch, ["image"])
    assert batch.indices.tolist() == expected[1]
    whole = scenes.batches(7).resume(again.state())
    assert next(whole).indices.tolist() == expected[2]


def test_whole_samples_and_fields_do_not_share_memory(scenes: dlfs.Dataset) -> None:
    for _ in range(2):  # the second time from the cache
        for chosen in (["label"], ["image"], None):
            for batch in scenes.batches(16, seed=1, fields=chosen):
                check(batch, chosen or list(TYPES))
    assert scenes.sample(4)["label"] == 4


def test_other_processes_open_their_own_readers(scenes: dlfs.Dataset) -> None:
    scenes.read([1], fields=["label"])
    with pickle.loads(pickle.dumps(scenes)) as again:
        check(again.read([1], fields=["label"]), ["label"])
        assert read_bytes(again) <= 8 * KIB


def test_more_choices_than_readers_are_read_whole(
    scenes: dlfs.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field_readers, "SPANS_MAX", 1)
    for chosen in CHOICES:
        check(scenes.read([2, 9], fields=chosen), chosen)
    assert scenes.read([2], fields=["label"]).lengths.tolist() == [8]
    assert scenes.read([2], fields=["image"]).lengths.tolist() == scenes.lengths([2]).tolist()


def test_views_read_chosen_fields(scenes: dlfs.Dataset, path: str) -> None:
    with dlfs.open(path, memory_bytes=MIB) as volume, volume["scenes"] as other:
        view = dlfs.concat([scenes, other])
        before = read_bytes(scenes)
        numbers = []
        for batch in view.batches(16, seed=1, fields=["caption", "label"]):
            assert list(batch.fields) == ["caption", "label"]
            assert batch["label"].tolist() == (batch.indices % COUNT).tolist()
            numbers += batch.indices.tolist()
        assert sorted(numbers) == list(range(2 * COUNT))
        assert read_bytes(scenes) - before <= COUNT * 8 * KIB
        assert view.read([COUNT + 3], fields=["label"])["label"].tolist() == [3]
        for batch in dlfs.length_batches(scenes, 4 * IMAGE_BYTES * 2, fields=["label"]):
            check(batch, ["label"])


@pytest.mark.parametrize("plan", ["direct", "chunks", "chunk_copy"])
def test_fields_of_samples_of_many_chunks(tmp_path: Path, plan: Any) -> None:
    path = new_volume(str(tmp_path / "volume.img"), size_bytes=16 * MIB, chunk_bytes=8 * KIB)
    fill(path)
    with dlfs.open(path, memory_bytes=256 * KIB) as volume, volume["scenes"] as dataset:
        for chosen in (["label"], ["mask"], ["caption", "mask"], ["empty"]):
            for shuffle in ("global", None, "chunk"):
                expected = [b.indices.tolist() for b in dataset.batches(8, shuffle=shuffle)]
                batches = dataset.batches(8, shuffle=shuffle, fields=chosen, plan=plan)
                got = []
                for batch in batches:
                    check(batch, chosen)
                    got.append(batch.indices.tolist())
                assert got == expected
            check(dataset.read(range(COUNT), fields=chosen), chosen)


# ---- damage --------------------------------------------------------------------------------------


def damage(uris: list[str], index: int, field: str, copies: tuple[int, ...]) -> None:
    """Change a byte in the middle of a field of a sample, in some of its copies."""
    devices = open_members(uris)
    generation = load_generation(devices)
    close_devices(devices)
    (record,) = generation.catalog.datasets
    space = DataSpace(generation.geometry, record.data_runs)
    with dlfs.open(uris) as volume, volume["scenes"] as dataset:
        batch = dataset.read([index])
        part = batch[field] if TYPES[field] == "bytes" else batch._part(batch._place(field))
        inside = int(part.offsets[0] - batch.offsets[0] + part.lengths[0] // 2)
        address = int(dataset.directory.addresses([index])[0]) + inside
    flip_copies(generation, space, address, *copies)


Reads = Callable[[dlfs.Dataset, list[str]], dlfs.Batch]
READS: list[Reads] = [
    lambda dataset, fields: dataset.read([5], fields=fields),
    lambda dataset, fields: next(dataset.batches(1, order=[5], fields=fields)),
]


@pytest.mark.parametrize("read", READS, ids=["read", "epoch"])
def test_damage_is_an_error_of_the_fields_that_are_read(tmp_path: Path, read: Reads) -> None:
    path = new_volume(str(tmp_path / "volume.img"), size_bytes=16 * MIB)
    fill(path)
    damage([path], 5, "mask", (0,))
    with dlfs.open(path, memory_bytes=MIB) as volume, volume["scenes"] as dataset:
        check(read(dataset, ["image"]), ["image"])
        check(read(dataset, ["label", "caption"]), ["label", "caption"])
        with pytest.raises(ChecksumError, match="read field 'mask' of sample 5 '005' of dataset"):
            read(dataset, ["mask"])
        with pytest.raises(ChecksumError, match="read fields 'label' to 'box' of sample 5 '005'"):
            read(dataset, ["label", "box"])
        skipped = dataset.read([4, 5], fields=["mask"], on_error="skip")
        check(skipped, ["mask"])
        assert skipped.failures[0].span == ("mask",)
        replaced = dataset.read([4, 5], fields=["mask"], on_error="replace")
        assert replaced.indices.tolist() == [4, 6]
        check(replaced, ["mask"])
        with pytest.raises(ChecksumError, match="read sample 5"):
            read(dataset, ["image", "mask"])


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("read", READS, ids=["read", "epoch"])
def test_another_copy_of_a_field_is_read(tmp_path: Path, read: Reads, copy: int) -> None:
    uris = [str(tmp_path / f"member{number}") for number in range(2)]
    dlfs.format_volume(uris, size_bytes=16 * MIB, replicas=2)
    fill(uris)
    damage(uris, 5, "mask", (copy,))
    with dlfs.open(uris, memory_bytes=MIB) as volume, volume["scenes"] as dataset:
        check(read(dataset, ["mask"]), ["mask"])


# ---- columns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"dlfs:field:a:crc32c": None}, {"dlfs:field:a:bytes": [90, 5000]}],
)
def test_fields_without_sound_columns_are_read_whole(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = str(tmp_path / "volume.img")
    dlfs.format_volume(path, size_bytes=16 * MIB)
    columns: dict[str, Any] = {
        "dlfs:fields": ['{"a":"bytes","b":"bytes"}'] * 2,
        "dlfs:field:a:bytes": [90, 90],
        "dlfs:field:a:crc32c": np.zeros(2, np.uint32),
        "dlfs:field:b:bytes": [3000, 3000],
        "dlfs:field:b:crc32c": np.zeros(2, np.uint32),
    }
    columns = {k: v for k, v in {**columns, **changes}.items() if v is not None}
    with dlfs.open(path) as volume:
        with other_writer(), volume.writer("scenes") as writer:
            data = np.random.default_rng(1).integers(0, 256, 6180, np.uint8)
            writer.add_batch(
                [b"x", b"y"], data, np.array([0, 3090]), np.array([3090, 3090]), attributes=columns
            )
        with volume["scenes"] as dataset:
            batch = dataset.read([0], fields=["a"])
            assert batch.lengths.tolist() == [3090]
            assert bytes(batch["a"][0]) == data[:90].tobytes()


def test_a_batch_of_a_closed_dataset_names_the_reason(path: str) -> None:
    with dlfs.open(path) as volume, volume["scenes"] as dataset:
        batch = dataset.read([3], fields=["label"])
    with pytest.raises(ClosedError, match="is closed"):
        _ = batch["label"]
