"""A connected volume is a local one: the same bytes, orders, failures and answers."""

from __future__ import annotations

import pickle
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import (
    ChecksumError,
    ClosedError,
    NotFoundError,
    ServiceLostError,
    StaleError,
    UsageError,
)
from dlfs.reader import parts
from dlfs.service.session import COPIED_BYTES_MAX
from tests.service.serving import SECONDS_MAX, Service, add_dataset, damage, make_volume

BAD = (3, 77, 300)


class World:
    """A volume with damaged samples, opened and connected."""

    def __init__(self, folder: Path, samples: dict[bytes, bytes]) -> None:
        self.samples = samples
        uri = make_volume(folder / "w.img", samples, label="w")
        damage(uri, *BAD)
        self.service = Service([uri], folder / "w.sock")
        self.service.wait_ready()
        self.volumes = dlfs.open(uri), dlfs.connect(self.service.uri)
        self.local, self.connected = (volume["d"] for volume in self.volumes)

    def both(self, ask: Callable[[dlfs.Dataset], Any]) -> Any:
        """Run an operation on both datasets; check that the results are equal, and return one."""
        answers = [outcome(ask, dataset) for dataset in (self.local, self.connected)]
        assert answers[0] == answers[1]
        return answers[0]

    def close(self) -> None:
        for opened in (self.local, self.connected, *self.volumes):
            opened.close()
        self.service.stop()
        self.service.close()


def outcome(ask: Callable[[dlfs.Dataset], Any], dataset: dlfs.Dataset) -> Any:
    """Return the result of an operation, or its error."""
    try:
        return plain(ask(dataset))
    except (dlfs.DlfsError, IndexError) as error:
        return type(error).__name__, re.sub(r".*(?=\(and \d+ more of)", "", str(error))


def plain(value: Any) -> Any:
    if isinstance(value, dlfs.Batch):
        with value:
            return value.indices.tolist(), value.to_list(), sorted(str(f) for f in value.failures)
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, samples: dict[bytes, bytes]) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"), samples)
    try:
        yield made
    finally:
        made.close()


NO_INDICES: list[Any] = [
    *(1.0, "1", b"1", None, True, np.True_, {1}, ...),
    *([1.5], ["1"], [None], [[1, 2]], [[1], [2, 3]], np.zeros((2, 2), int), np.zeros((0, 3), int)),
]
"""Values that are neither an index nor indices."""

OUTSIDE: list[Any] = [
    *(607, -608, 10**30, -(10**30), np.uint64(2**64 - 1), np.array(607)),
    *([607], [0, -608], [10**9], [10**30], [-(10**30)], [2**63, -1]),
    *(np.array([2**64 - 1], np.uint64), np.array([1, -608], np.int16)),
]
"""Indices of no sample of 607; the last of each is out of range."""


@pytest.mark.parametrize("index", NO_INDICES, ids=repr)
def test_a_value_that_is_no_index_is_refused(world: World, index: Any) -> None:
    for ask in (
        lambda dataset: dataset[index],
        lambda dataset: dataset.read(index),
        lambda dataset: dataset.lengths(index if index is not None else [None]),
        lambda dataset: dataset.batches(2, order=index if index is not None else [None]),
    ):
        name, text = world.both(ask)
        assert name == "UsageError", text
        assert "integer" in text or "as an array" in text
        assert "got " in text
    if index is not None:
        for dataset in (world.local, world.connected):  # their names of columns are not the same
            with pytest.raises(UsageError, match=r"expected indices as .*, got "):
                dataset.column("number", index)


@pytest.mark.parametrize("index", OUTSIDE, ids=repr)
def test_an_index_of_no_sample_is_an_index_error(world: World, index: Any) -> None:
    name, text = world.both(lambda dataset: dataset[index])
    assert name == "IndexError"
    wrong = next(one for one in np.ravel(np.array(index, object)) if not -607 <= one < 607)
    assert f"-607..606, got {wrong}" in text
    if np.ndim(index):
        name, text = world.both(lambda dataset: dataset.read(index))
        assert name == "UsageError"
        assert "expected indices 0..606, got " in text


@pytest.mark.parametrize(
    "mask", [[], [True], [True] * 606, np.ones((607, 1), bool)], ids=lambda mask: str(len(mask))
)
def test_a_mask_is_as_long_as_the_dataset(world: World, mask: Any) -> None:
    name, text = world.both(lambda dataset: dataset[np.array(mask, bool)])
    assert name == "IndexError"
    assert "expected a mask of 607 samples, got one of shape (" in text


@pytest.mark.parametrize(
    ("index", "meant"),
    [
        (np.array([-1, 5, -128], np.int8), [606, 5, 479]),
        (np.array([-1, -607]), [606, 0]),
        ([-2, 7], [605, 7]),
        ((8, 9), [8, 9]),
        (range(604, 607), [604, 605, 606]),
        (np.array([606], np.uint16), [606]),
        ([np.int8(-1), 2**3], [606, 8]),
        (np.array([5], object), [5]),
        ([], []),
        (slice(-2, None), [605, 606]),
    ],
    ids=repr,
)
def test_indices_of_any_type_count_from_either_end(
    world: World, index: Any, meant: list[int]
) -> None:
    assert world.both(lambda dataset: dataset[index])[0] == meant


@pytest.mark.parametrize("index", [5, -602, np.int8(5), np.uint64(5), np.array(5)], ids=repr)
def test_one_sample_by_an_integer_of_any_type(world: World, index: Any) -> None:
    expected = [*world.samples.values()][5]
    assert world.both(lambda dataset: dataset[index]) == expected
    assert world.both(lambda dataset: dataset.path(index)) == [*world.samples][5]


def test_large_samples_come_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PIECE_BYTES", 1000)
    index, expected = max(enumerate(world.samples.values()), key=lambda pair: len(pair[1]))

    def read_into(dataset: dlfs.Dataset, offset_bytes: int, room_bytes: int) -> bytes:
        room = bytearray(room_bytes)
        return bytes(room[: dataset.read_into(index, room, offset_bytes=offset_bytes)])

    assert len(expected) == 150_000
    assert world.both(lambda d: b"".join(map(bytes, d.read_pieces(index)))) == expected
    assert world.both(lambda d: max(map(len, d.read_pieces(index)))) == 1000
    for start, length in ((0, 200_000), (1, 200_000), (700, 4000), (200_000, 5)):
        part = expected[start : start + length]
        assert world.both(lambda d, at=start, n=length: read_into(d, at, n)) == part
    for bad in (-1, 1.5, None):
        error, text = world.both(
            lambda d, at=bad: d.read_into(index, bytearray(9), offset_bytes=at)
        )
        assert (error, "expected an offset of 0 bytes or more" in text) == ("UsageError", True)
    for volume in world.volumes:
        with volume.dataset() as dataset:
            assert dataset.get([*world.samples][index]) == expected


@pytest.mark.parametrize("index", [True, 1.0, "x", None, [1], np.array([1])], ids=repr)
def test_methods_for_one_sample_take_one_integer(world: World, index: Any) -> None:
    for ask in (
        lambda dataset: dataset.path(index),
        lambda dataset: dataset.stat(index),
        lambda dataset: dataset.get_if_cached(index),
        lambda dataset: dataset.array(index),
    ):
        name, text = world.both(ask)
        assert (name, "expected an integer, got" in text) == ("UsageError", True)


def test_a_path_in_place_of_an_index_is_explained(world: World) -> None:
    assert world.both(lambda dataset: dataset["class0/00000"]) == (
        "UsageError",
        "look up a sample of dataset 'd': expected an integer, got 'class0/00000'; "
        "get(path) takes paths",
    )


def test_a_connected_volume_has_the_properties_of_a_local_one(world: World) -> None:
    local, connected = world.volumes
    assert connected.uri == world.service.uri
    assert connected.info() == local.info()
    assert connected.datasets() == local.datasets()
    for name in ("uuid", "label", "generation", "members", "chunk_bytes", "capacity_bytes"):
        assert getattr(connected, name) == getattr(local, name)
    assert connected.free_bytes == local.free_bytes
    assert "d" in connected
    assert "e" not in connected
    assert connected.dataset().uuid == local.dataset().uuid
    with pytest.raises(NotFoundError, match=f"find dataset 'e' on {world.service.uri}"):
        connected.dataset("e")


@pytest.mark.parametrize(
    "ask",
    [
        lambda ds: ds.info,
        len,
        lambda ds: ds.sample_bytes,
        lambda ds: ds.paths(),
        lambda ds: ds.paths(5, 7),
        lambda ds: ds.path(-1),
        lambda ds: ds.path(10**6),
        lambda ds: ds.index(b"class1/00006"),
        lambda ds: ds.index("nowhere"),
        lambda ds: ds.index_of(["class0/00000", "x", b"sizes/000000"]),
        lambda ds: ["class0/00000" in ds, "x" in ds],
        lambda ds: ds.lower_bound(b"class3"),
        lambda ds: ds.lengths(),
        lambda ds: ds.lengths([0, 9]),
        lambda ds: ds.children(),
        lambda ds: ds.children(b"class1", b"00001"),
        lambda ds: ds.children(b"class1/empty"),
        lambda ds: ds.empty_directories(),
        lambda ds: [ds.stat(index) for index in range(0, len(ds), 31)],
        lambda ds: ds.get("class2/00002"),
        lambda ds: ds.get("class9/00002"),
        lambda ds: ds[-1],
        lambda ds: ds[10**6],
        lambda ds: ds[5:600:7],
        lambda ds: ds[np.array([-1, 0, 1])],
        lambda ds: ds[BAD[0]],
        lambda ds: ds.read([]),
        lambda ds: ds.read([0, 0, 5, 0]),
        lambda ds: ds.read([10**9]),
        lambda ds: ds.read([0, 1], on_error="shrug"),
        lambda ds: ds.read([1, *BAD, 2]),
        lambda ds: ds.read([1, *BAD, 2], on_error="skip"),
        lambda ds: ds.read([1, *BAD, 2], on_error="replace"),
        lambda ds: ds.batches(0),
        lambda ds: ds.columns,
        lambda ds: ds.column("number"),
        lambda ds: ds.column("name", [5, 0, 606]),
    ],
)
def test_connected_and_local_datasets_give_the_same_results(
    world: World, ask: Callable[[dlfs.Dataset], Any]
) -> None:
    world.both(ask)


INDICES = st.lists(st.integers(0, 606), max_size=80)


@settings(max_examples=60)
@given(indices=INDICES, on_error=st.sampled_from(["raise", "skip", "replace"]))
def test_any_batch_is_the_same(world: World, indices: list[int], on_error: str) -> None:
    answer = world.both(lambda ds: ds.read(indices, on_error=on_error))
    if not set(indices) & set(BAD):
        wanted = list(world.samples.values())
        assert answer[1] == [wanted[index] for index in indices]


@settings(max_examples=30)
@given(
    batch_size=st.integers(20, 200),
    seed=st.integers(0, 2**64 - 1),
    world_size=st.integers(1, 4),
    shuffle=st.sampled_from(["global", "chunk", None]),
    plan=st.sampled_from(["auto", "direct", "chunks", "chunk_copy"]),
    crossing=st.integers(0, 5),
    first=st.booleans(),
)
def test_an_epoch_can_be_resumed_on_the_other_connection(
    world: World,
    batch_size: int,
    seed: int,
    world_size: int,
    shuffle: str | None,
    plan: str,
    crossing: int,
    first: bool,
) -> None:
    options = {
        "seed": seed,
        "rank": world_size - 1,
        "world_size": world_size,
        "shuffle": shuffle,
        "plan": plan,
        "on_error": "skip",
    }
    whole = world.both(lambda ds: [plain(b) for b in ds.batches(batch_size, **options)])
    one, other = (world.local, world.connected) if first else (world.connected, world.local)
    with one.batches(batch_size, **options) as epoch:
        parts = [plain(batch) for _, batch in zip(range(crossing), epoch, strict=False)]
        state = epoch.state()
    with other.batches(batch_size, **options).resume(state) as epoch:
        remaining = [plain(batch) for batch in epoch]
    assert parts + remaining == whole


def test_batches_outlive_dataset_and_service(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    service = serve(volume)
    wanted = list(samples.values())
    with dlfs.connect(service.uri) as connected, connected["d"] as dataset:
        first = dataset.read(range(300))
        epoch = dataset.batches(100, shuffle=None)
        second = next(epoch)
        epoch.close()
    other = dlfs.connect(service.uri)["d"]
    for seed in range(5):
        for batch in other.batches(50, seed=seed):
            batch.release()
    assert first.to_list() == wanted[:300]
    assert second.to_list() == [wanted[index] for index in second.indices.tolist()]
    service.stop()
    assert first.to_list() == wanted[:300]
    packed, offsets = first.pack()
    assert packed[offsets[5] : offsets[6]].tobytes() == wanted[5]


def test_a_pickle_is_the_place_and_not_the_data(serve: Callable[..., Service], volume: str) -> None:
    service = serve(volume)
    with dlfs.connect(service.uri, timeout_s=SECONDS_MAX) as connected, connected["d"] as dataset:
        for made in (connected, dataset):
            raw = pickle.dumps(made)
            assert len(raw) < 1000
            with pickle.loads(raw) as copy:
                assert copy.uuid == made.uuid
                assert repr(made).startswith(repr(copy).removesuffix(">"))
    with pytest.raises(ClosedError):
        dataset.read([0])
    with pytest.raises(ClosedError):
        connected.info()


def test_names_with_versions(serve: Callable[..., Service], volume: str) -> None:
    name, samples = "d", {b"one": b"1"}
    add_dataset(volume, samples, name)
    with dlfs.connect(serve(volume).uri) as served:
        assert [served[text].version for text in (name, "d@1", "d@2")] == [2, 1, 2]
        assert ("d@2" in served, "d@3" in served) == (True, False)
        with pytest.raises(NotFoundError, match="version 3"):
            served["d@3"]


def test_operations_that_need_devices_are_refused_through_a_service(
    serve: Callable[..., Service], volume: str
) -> None:
    connected = dlfs.connect(serve(volume).uri)
    for change in (
        lambda: connected.writer("x"),
        lambda: connected.remove("d"),
        lambda: list(connected.verify()),
    ):
        with pytest.raises(UsageError, match=r"through unix:.*open the volume itself: "):
            change()
    with pytest.raises(UsageError):
        dlfs.repair(connected.uri)


def test_datasets_come_and_go(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    connected = dlfs.connect(serve(volume).uri)
    old = connected["d"]
    add_dataset(volume, {b"new": b"bytes"}, "e")
    assert "e" not in connected
    connected.refresh()
    assert connected["e"].get("new") == b"bytes"
    with dlfs.open(volume) as local:
        local.remove("d")
        with local.writer("filler") as writer:  # over what was freed
            for path in samples:
                writer.add(path, b"\xff" * 6000)
    with pytest.raises(StaleError, match="read dataset 'd' version 1"):
        old.read(range(len(old)))
    with pytest.raises((StaleError, NotFoundError)):
        connected["d"]
    connected.refresh()
    with pytest.raises(NotFoundError):
        connected["d"]


def test_columns_of_a_removed_version_whose_chunks_are_used_again_are_stale(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    with dlfs.connect(serve(volume).uri) as connected, connected["d"] as old:
        assert len(old) == len(samples)
        with dlfs.open(volume) as local:
            local.remove("d")
            for number in range(2):  # over what was freed
                with local.writer(f"filler{number}") as writer:
                    writer.add("x", bytes(local.free_bytes // 2))
        with pytest.raises(StaleError, match="it was removed"):
            old.column("number")


def test_another_volume_in_the_place_of_the_served_one_is_named(
    serve: Callable[..., Service], volume: str, tmp_path: Path
) -> None:
    place = Path(volume)
    other_place = tmp_path / "another.img"
    found = dlfs.format_volume(str(other_place), size_bytes=place.stat().st_size).uuid
    with dlfs.open(str(other_place)) as other, other.writer("x") as writer:
        writer.add("x", bytes(16 << 20))
    with dlfs.connect(serve(volume).uri) as served, served["d"] as dataset:
        expected = served.uuid
        with place.open("r+b") as file:
            file.write(other_place.read_bytes())
        message = (
            f"{re.escape(volume)} now holds volume {found}, expected volume {expected}: it was"
        )
        with pytest.raises(StaleError, match=f"read dataset 'd' version 1 .*: {message}"):
            dataset[:]
        with pytest.raises(StaleError, match=message):
            served.refresh()


def test_a_sample_larger_than_a_channel_copies_by_default(
    serve: Callable[..., Service], tmp_path: Path
) -> None:
    path, length = tmp_path / "large.img", COPIED_BYTES_MAX + 3 * MIB + 17
    dlfs.format_volume(str(path), size_bytes=2 * length)
    with dlfs.open(str(path)) as volume, volume.writer("d") as writer:
        writer.add("large", bytes(length - 1) + b"!")
        writer.add("small", b"small")
    with dlfs.connect(serve(str(path)).uri) as served, served["d"] as dataset:
        for _ in range(3):
            with dataset.read([1, 0]) as batch:
                assert batch.lengths.tolist() == [5, length]
                assert bytes(batch[1][-2:]) == b"\0!"
        assert [len(batch) for batch in dataset.batches(1)] == [1, 1]
        assert dataset.get("small") == b"small"


def test_several_volumes(serve: Callable[..., Service], volume: str, tmp_path: Path) -> None:
    other = make_volume(tmp_path / "other.img", {b"a": b"other"}, label="texts")
    uri = serve(volume, other).uri
    with pytest.raises(UsageError, match=r"expected the name of one of: 'images' \(.*'texts'"):
        dlfs.connect(uri)
    with pytest.raises(NotFoundError, match="'videos'"):
        dlfs.connect(uri, volume="videos")
    texts = dlfs.connect(uri, volume="texts")
    assert texts["d"].get("a") == b"other"
    again = dlfs.connect(uri, volume=str(texts.uuid))
    assert again.label == "texts"
    assert len(dlfs.connect(uri, volume="images")["d"]) == 607


def test_no_service(tmp_path: Path) -> None:
    path = tmp_path / "none.sock"
    with pytest.raises(ServiceLostError, match=f"connect to unix:{path}: No such file"):
        dlfs.connect(f"unix:{path}", timeout_s=0.05)
    for wrong, problem in (("/x", "expected unix:"), (f"unix:/{'x' * 120}", "at most 107 bytes")):
        with pytest.raises(UsageError, match=problem):
            dlfs.connect(wrong)
    with pytest.raises(UsageError, match="above 0 s"):
        dlfs.connect("unix:/x", timeout_s=0)


def test_checksum_errors_name_the_place(world: World) -> None:
    with pytest.raises(ChecksumError, match=r"w\.img at byte \d+, \d+ bytes: expected CRC32C"):
        world.connected.read([BAD[1]])


def test_an_unknown_column_is_not_found(world: World) -> None:
    there = "no such column; there are: 'name' and 'number'"
    with pytest.raises(NotFoundError, match=f"through {world.service.uri}: {there}"):
        world.connected.column("weight")


def test_an_unknown_dataset_is_stale(world: World) -> None:
    _, connected = world.volumes
    connection = connected.session.connection
    identity = dlfs.connection.connection.DatasetIdentity(uuid.uuid4(), "x", 1)
    with pytest.raises(StaleError, match="it was removed"):
        dlfs.Dataset(connection, identity).open()


def test_a_view_of_connected_datasets(world: World) -> None:
    def read(dataset: dlfs.Dataset) -> Any:
        first, second = dlfs.split(dataset, 0.3)
        view = dlfs.mix({first: 0.5, second: 0.5}, samples=900)
        with view.batches(64, seed=4, on_error="skip") as epoch:
            return [plain(batch) for batch in epoch]

    assert sum(len(indices) for indices, _, _ in world.both(read)) > 800
