"""Readers that are open while their dataset is moved to other members, which then go away."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import BlockDevice, MemoryDevice, open_device
from dlfs.connection.connection import LocalConnection, OpenOptions
from dlfs.store import formatting, recorded
from tests.golden import c_reader
from tests.support.descriptors import open_names
from tests.support.devices import WrappingDevice
from tests.support.volumes import read_dataset, write_dataset
from tests.support.waiting import wait_for

SIZE = 3 * MIB
COUNT = 40


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    made = [str(tmp_path / f"member{number}") for number in range(3)]
    dlfs.format_volume(made[0], size_bytes=SIZE, chunk_bytes=16 * KIB)
    with dlfs.open(made[0]) as volume, volume.writer("data") as writer:
        for i in range(COUNT):
            writer.add(b"%02d" % i, sample(i), attributes={"number": i})
        writer.add(b"large", LARGE, attributes={"number": COUNT})
    return made


LARGE = np.arange(200_000, dtype=np.uint8).tobytes()
MEMORY_BYTES = 4 * 16 * KIB
"""Less than ``LARGE``: a part that was read is read again from the devices."""


def sample(index: int) -> bytes:
    return bytes([index]) * (1000 + 500 * index)


def overwrite(file: str) -> None:
    """Overwrite the chunks of a device that was removed, as its next user does."""
    size = os.path.getsize(file)
    with open(file, "r+b") as opened:
        opened.seek(1 * MIB)
        opened.write(os.urandom(size - 1 * MIB))


def move(files: list[str], end: Callable[[str], None]) -> None:
    """Move the dataset to other members; the first one goes away."""
    with dlfs.open(files[0]) as volume:
        volume.grow(files[1], size_bytes=SIZE)
        report = volume.shrink([0])
        assert report.removed == (files[0],)
        assert report.moved_bytes > 0
    end(files[0])


def lose(file: str) -> None:
    os.truncate(file, 512 * KIB)


@pytest.mark.parametrize("end", [overwrite, lose])
def test_reads_follow(files: list[str], end: Callable[[str], None]) -> None:
    with dlfs.open(files[0]) as volume, volume["data"] as dataset, volume["data"] as other:
        assert dataset[3] == sample(3)
        move(files, end)
        assert dataset.get(b"07") == sample(7)
        assert dataset[COUNT] == LARGE
        with dataset.read(range(COUNT)) as batch:
            assert batch.to_list() == [sample(i) for i in range(COUNT)]
        assert other.column("number").tolist() == list(range(COUNT + 1))
        buffer = bytearray(len(LARGE))
        assert other.read_into(COUNT, buffer) == len(LARGE)
        assert buffer == LARGE
        assert b"".join(other.read_pieces(COUNT)) == LARGE


VIEWS: dict[str, Callable[[dlfs.Dataset], dlfs.DatasetView]] = {
    "concat": lambda dataset: dlfs.concat([dataset, dataset]),
    "split": lambda dataset: dlfs.split(dataset, 0.999)[0],
    "mix": lambda dataset: dlfs.mix({dataset: 2.0, dlfs.split(dataset, 0.5)[0]: 1.0}),
    "view of views": lambda dataset: dlfs.concat([dlfs.concat([dataset]), dataset]),
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("end", [overwrite, lose])
def test_views_follow(files: list[str], end: Callable[[str], None], kind: str) -> None:
    with dlfs.open(files[0]) as volume, volume["data"] as dataset:
        view = VIEWS[kind](dataset)
        paths = [view.path(index) for index in range(10)]
        assert len(view.read([0, 1])) == 2
        move(files, end)
        with view.read(range(10)) as batch:
            assert batch.to_list() == [dataset.get(path) for path in paths]
        assert view[3] == dataset.get(paths[3])
        assert view.column("number", range(10)).tolist() == [int(path) for path in paths]
        for batch in view.batches(4, seed=1):
            with batch:
                assert batch.to_list() == [view[index] for index in batch.indices.tolist()]


@pytest.mark.parametrize("kind", ["tokens", "lengths", "concat"])
def test_epochs_of_lists_are_exact_while_their_dataset_moves(files: list[str], kind: str) -> None:
    def start(dataset: dlfs.Dataset) -> Iterator[Any]:
        if kind == "tokens":
            return dlfs.token_batches(dataset, 500, batch_size=7, dtype="u1", seed=3)
        if kind == "lengths":
            return dlfs.length_batches(dataset, 400_000, seed=3)
        return dlfs.concat([dataset, dataset]).batches(5, seed=3)

    def content(batch: Any) -> list[bytes]:
        return [bytes(row) for row in (batch.tokens if kind == "tokens" else batch)]

    with dlfs.open(files[0], memory_bytes=1 * MIB) as volume, volume["data"] as dataset:
        expected = [content(batch) for batch in start(dataset)]
        epoch = start(dataset)
        seen = [content(next(epoch)) for _ in range(2)]
        move(files, overwrite)
        seen += [content(batch) for batch in epoch]
        assert seen == expected


def test_columns_follow_at_their_first_use(files: list[str]) -> None:
    with dlfs.open(files[0]) as volume:
        uses: list[Callable[[dlfs.Dataset], object]] = [
            lambda dataset: dataset.attributes_to_arrow().column("number").to_pylist()[:3],
            lambda dataset: dataset.fields,
            lambda dataset: dataset.columns,
            lambda dataset: dataset.column("number")[:3].tolist(),
        ]
        datasets = [volume["data"] for _ in uses]
        move(files, overwrite)
        expected = [[0, 1, 2], {}, {"number": np.dtype(np.int64)}, [0, 1, 2]]
        for use, dataset, value in zip(uses, datasets, expected, strict=True):
            with dataset:
                assert use(dataset) == value


@pytest.mark.parametrize("plan", ["direct", "chunks"])
def test_an_epoch_is_exact_while_its_dataset_moves_twice(files: list[str], plan: str) -> None:
    with dlfs.open(files[0], memory_bytes=1 * MIB) as volume, volume["data"] as dataset:
        batches = dataset.batches(4, seed=1, plan=plan)
        seen: list[int] = []

        def take(count: int) -> None:
            for _ in range(count):
                with next(batches) as batch:
                    for index, data in zip(batch.indices.tolist(), batch.to_list(), strict=True):
                        assert data == (sample(index) if index < COUNT else LARGE)
                        seen.append(index)

        take(2)
        move(files, overwrite)
        take(3)
        with dlfs.open(files[1]) as other:
            other.grow(files[2], size_bytes=SIZE)
            other.shrink([files[1]])
        overwrite(files[1])
        take(len(batches))
        assert sorted(seen) == list(range(COUNT + 1))


def test_devices_that_are_not_read_any_more_are_closed(files: list[str]) -> None:
    def descriptors() -> int:
        return open_names().count(files[0])

    gc.disable()  # the devices must not wait for it
    try:
        with dlfs.open(files[0], memory_bytes=64 * KIB) as volume:
            dataset, other = volume["data"], volume["data"]
        with dataset, other:
            paths = other.paths()
            batches = dataset.batches(4, seed=1)
            next(batches).release()
            assert descriptors() == 1
            move(files, overwrite)
            assert other.get(paths[3]) == sample(3)
            assert descriptors() == 1
            dataset.paths()
            for batch in batches:
                batch.release()
            assert descriptors() == 0
    finally:
        gc.enable()


def test_the_uri_of_a_removed_member_leads_to_the_volume(files: list[str]) -> None:
    with dlfs.open(files[0]) as late:
        move(files, overwrite)
        late.refresh()
        assert late.uri == files[1]
        expected = read_dataset(late, "data")
    for uris in (files[0], files[:2]):
        with dlfs.open(uris) as volume:
            assert volume.uri == files[1]
            assert read_dataset(volume, "data") == expected
        given = [files[0]] if isinstance(uris, str) else uris
        assert c_reader.read_volume(given) == {(b"data", 1): expected}
    with dlfs.open(files[1]) as volume:
        volume.grow(files[0])  # it holds no other data
        assert len(volume.members) == 2


def test_the_error_for_a_removed_member_names_the_lost_one(files: list[str]) -> None:
    move(files, overwrite)
    os.unlink(files[1])
    with pytest.raises(dlfs.NotFoundError, match=f"open {files[1]}.*add the URI"):
        dlfs.open(files[0])


def test_a_device_that_left_and_came_back_is_a_member(files: list[str]) -> None:
    old, returned = files[:2], files[0]
    dlfs.format_volume(old, size_bytes=SIZE, chunk_bytes=16 * KIB, force=True)
    write_dataset(old, "data", {b"%02d" % i: sample(i) for i in range(COUNT)})
    with dlfs.open(old) as late, late["data"] as dataset:
        with dlfs.open(old) as volume:
            volume.grow(files[2], size_bytes=SIZE)
            volume.shrink([0])
            volume.grow(returned)
        overwrite(files[1])
        with dataset.read(range(COUNT)) as batch:
            assert batch.to_list() == [sample(i) for i in range(COUNT)]
        late.refresh()
        assert late.uri == f"{files[2]},{returned}"


def test_a_removed_device_leads_to_the_volume_after_further_moves(files: list[str]) -> None:
    with dlfs.open(files[0]) as late, late["data"] as dataset:
        move(files, overwrite)
        with dlfs.open(files[1]) as volume:
            volume.grow(files[2], size_bytes=SIZE)
            volume.shrink([0])
        overwrite(files[1])
        assert dataset[3] == sample(3)
        late.refresh()
        assert late.uri == files[2]
    with dlfs.open(files[0]) as volume:
        assert volume.uri == files[2]


def test_a_removed_device_that_became_smaller_is_no_error(files: list[str]) -> None:
    with dlfs.open(files[0]) as volume:
        volume.grow(files[1], size_bytes=SIZE)
        with dlfs.open(files[0]) as late:
            volume.shrink([0])
            os.truncate(files[0], 0)
            late.refresh()
            assert late.uri == files[1]


class NoticedDevice(WrappingDevice):
    """A device that calls a function before each read."""

    def __init__(self, inner: BlockDevice, notice: Callable[[], None]) -> None:
        super().__init__(inner)
        self.before_read = notice  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("removed", "moves"),
    [
        pytest.param(False, False, id="grows"),
        pytest.param(True, False, id="grows, opened by a removed device"),
        pytest.param(False, True, id="moves"),
    ],
)
def test_a_volume_may_change_at_any_read_of_its_opening(
    files: list[str], removed: bool, moves: bool
) -> None:
    """Each time, it changes before another one of the reads.

    Args:
        files: files of the volume.
        removed: True to open it by a device that it has left.
        moves: True if the volume moves to another device; False if it grows by that.
    """
    given, member, added = files[0], files[1 if removed else 0], files[2]
    if removed:
        move(files, overwrite)
    before = Path(member).read_bytes()
    reads = changed_at = 0

    def change() -> None:
        nonlocal reads
        reads += 1
        if reads == changed_at:
            with dlfs.open(member) as volume:
                volume.grow(added, size_bytes=SIZE)
                if moves:
                    volume.shrink([member])
                    overwrite(member)

    def opener(uri: str, *, writable: bool) -> BlockDevice:
        return NoticedDevice(open_device(uri, writable=writable), change)

    while True:
        Path(member).write_bytes(before)
        Path(added).unlink(missing_ok=True)
        reads, changed_at = 0, changed_at + 1
        options = OpenOptions(opener=opener)
        with dlfs.Volume(LocalConnection((given,), options)) as volume:
            volume.refresh()
            assert volume.uri in (member, f"{member},{added}", added)
            if reads < changed_at:
                break
            volume.refresh()
            assert volume.uri == (added if moves else f"{member},{added}")
    assert changed_at > 10


def test_a_member_may_leave_and_return_at_any_read_of_an_opening(files: list[str]) -> None:
    """Each time, it does so before another one of the reads, and is opened by an old record."""
    move(files, overwrite)
    with dlfs.open(files[1]) as volume:
        volume.grow(files[2], size_bytes=SIZE)
        expected = read_dataset(volume, "data")
    before = [Path(file).read_bytes() for file in files]
    reads = changed_at = 0

    def change() -> None:
        nonlocal reads
        reads += 1
        if reads == changed_at:
            with dlfs.open(files[2]) as volume:
                volume.shrink([files[1]])
                volume.grow(files[1])

    def opener(uri: str, *, writable: bool) -> BlockDevice:
        return NoticedDevice(open_device(uri, writable=writable), change)

    while reads >= changed_at:
        for file, content in zip(files, before, strict=True):
            Path(file).write_bytes(content)
        reads, changed_at = 0, changed_at + 1
        options = OpenOptions(opener=opener)
        with dlfs.Volume(LocalConnection((files[0],), options)) as volume:
            assert set(volume.uri.split(",")) == set(files[1:])
            assert read_dataset(volume, "data") == expected
    assert changed_at > 10


def test_damage_is_not_taken_for_a_move(files: list[str]) -> None:
    with dlfs.open(files[0]) as volume, volume["data"] as dataset:
        volume.grow(files[1], size_bytes=SIZE)
        overwrite(files[0])
        with pytest.raises(dlfs.DlfsError):
            dataset.read(range(COUNT))


@pytest.mark.parametrize("replicas", [1, 2])
def test_shared_chunks_stay_shared(tmp_path: Path, replicas: int) -> None:
    files = [str(tmp_path / f"m{number}") for number in range(2 * replicas)]
    old, new = files[:replicas], files[replicas:]
    dlfs.format_volume(old, size_bytes=SIZE, chunk_bytes=16 * KIB, replicas=replicas)
    with dlfs.open(old) as volume:
        with volume.writer("data") as writer:
            writer.add(b"first", LARGE)
        with volume.append("data") as writer:
            writer.add(b"second", LARGE[::-1])
        before = volume.usage().stored_bytes
        volume.grow(new, size_bytes=SIZE)
        volume.shrink(old)
        assert volume.usage().stored_bytes == before
        with volume.dataset("data", 1) as dataset:
            assert dataset.get(b"first") == LARGE
        assert read_dataset(volume, "data") == {b"first": LARGE, b"second": LARGE[::-1]}
        assert list(volume.verify()) == []


def test_a_volume_is_not_shrunk_beyond_its_data(files: list[str]) -> None:
    with dlfs.open(files[0]) as volume:
        with pytest.raises(dlfs.UsageError, match="another group"):
            volume.shrink([0])
        volume.grow(files[1], size_bytes=1 * MIB + 256 * KIB)
        generation = volume.generation
        with pytest.raises(dlfs.SpaceError, match=r"have \d+ bytes .* room for \d+ bytes"):
            volume.shrink([0])
        with pytest.raises(dlfs.UsageError, match="expected one of its members"):
            volume.shrink([2])
        with pytest.raises(dlfs.UsageError, match="expected one of its members"):
            volume.shrink(["elsewhere"])
        with pytest.raises(dlfs.UsageError, match="another group"):
            volume.shrink([0, 1])
        volume.refresh()
        assert volume.generation == generation
        assert volume.shrink([1]).moved_bytes >= 0
        assert volume.uri == files[0]


def test_members_to_remove_are_named_by_any_form_of_their_uri() -> None:
    names = [f"shrink-{number}" for number in range(2)]
    try:
        dlfs.format_volume(f"mem:{names[0]}?size={SIZE}", chunk_bytes=16 * KIB)
        with dlfs.open(f"mem:{names[0]}") as volume:
            volume.grow(f"mem:{names[1]}?size={SIZE}")
            report = volume.shrink([f"mem:{names[1]}?size={SIZE // KIB}KiB"])
            assert report.removed == (f"mem:{names[1]}?size={SIZE}",)
    finally:
        for name in names:
            MemoryDevice.forget(name)


def reuse_chunks(volume: dlfs.Volume) -> None:
    """Move data within the volume, and use the old chunks for other data."""
    assert volume.rebalance().moved_bytes > 0
    with volume.writer("other") as writer:
        for number in range(volume.free_bytes // (16 * KIB) - 16):
            writer.add(b"%04d" % number, b"\xff" * (16 * KIB))


def test_a_part_of_a_sample_is_never_of_other_data(files: list[str]) -> None:
    with dlfs.open(files[0], memory_bytes=MEMORY_BYTES) as volume, volume["data"] as dataset:
        buffer = bytearray(1000)

        def read_parts() -> bytes:
            parts = bytearray()
            for offset in range(0, len(LARGE), len(buffer)):
                assert dataset.read_into(COUNT, buffer, offset_bytes=offset) == len(buffer)
                parts += buffer
            return bytes(parts)

        assert read_parts() == LARGE
        volume.grow(files[1], size_bytes=SIZE)
        assert read_parts() == LARGE
        reuse_chunks(volume)
        assert read_parts() == LARGE
        volume.remove("data")
        with volume.writer("again") as writer:
            writer.add(b"x", b"\xfe" * (volume.free_bytes - 16 * 16 * KIB))
        with pytest.raises(dlfs.StaleError):
            read_parts()


def test_a_part_is_never_of_another_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host, which does not see that this one has a member open, formats it."""
    monkeypatch.setattr(formatting, "refuse_open", lambda _path, _action: None)
    files = [str(tmp_path / f"striped{number}") for number in range(2)]
    dlfs.format_volume(files, size_bytes=SIZE, chunk_bytes=16 * KIB)
    with dlfs.open(files, memory_bytes=MEMORY_BYTES) as volume:
        with volume.writer("data") as writer:
            writer.add(b"large", LARGE)
        with volume["data"] as dataset:
            buffer = bytearray(1000)
            wrong: list[int] = []

            def read_parts() -> list[int]:
                """Read the sample in parts, and return the offsets that cannot be read."""
                lost = []
                for offset in range(0, len(LARGE), len(buffer)):
                    try:
                        dataset.read_into(0, buffer, offset_bytes=offset)
                    except dlfs.DlfsError:
                        lost.append(offset)
                    else:
                        if buffer != LARGE[offset : offset + len(buffer)]:
                            wrong.append(offset)
                return lost

            assert not read_parts()
            dlfs.format_volume(files[1], force=True, chunk_bytes=16 * KIB)
            with dlfs.open(files[1]) as other, other.writer("other") as writer:
                writer.add(b"x", b"\xfe" * (other.free_bytes - 16 * 16 * KIB))
            assert read_parts()
            assert not wrong


def test_a_part_is_read_of_another_copy_once_a_member_was_overwritten(tmp_path: Path) -> None:
    files = [str(tmp_path / f"copy{number}") for number in range(2)]
    dlfs.format_volume(files, size_bytes=SIZE, chunk_bytes=16 * KIB, replicas=2)
    with dlfs.open(files) as volume:
        with volume.writer("data") as writer:
            writer.add(b"large", LARGE)
        with volume["data"] as dataset:
            buffer = bytearray(1000)
            assert dataset.read_into(0, buffer) == len(buffer)
            with open(files[1], "r+b") as opened:
                opened.write(b"\xee" * SIZE)
            for _ in range(2):
                for offset in range(0, len(LARGE), len(buffer)):
                    count = dataset.read_into(0, buffer, offset_bytes=offset)
                    assert buffer[:count] == LARGE[offset : offset + count]


def test_pieces_go_on_after_a_move(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlfs.reader.parts.PIECE_BYTES", 16 * KIB)
    with dlfs.open(files[0]) as volume, volume["data"] as dataset:
        pieces = dataset.read_pieces(COUNT)
        found = [bytes(next(pieces)) for _ in range(3)]
        volume.grow(files[1], size_bytes=SIZE)
        reuse_chunks(volume)
        found += [bytes(next(pieces)) for _ in range(3)]
        volume.remove("other")
        volume.shrink([0])
        overwrite(files[0])
        found += [bytes(piece) for piece in pieces]
        assert b"".join(found) == LARGE


def test_idle_readers_find_members_that_came_later(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that leaves is gone at once: nothing on it leads to the others."""
    monkeypatch.setattr("dlfs.connection.placement.WATCH_S", 0.01)
    with dlfs.open(files[0]) as volume:
        expected = read_dataset(volume, "data")
        with volume["data"] as dataset:
            batches = dataset.batches(4, seed=1)
            seen = next(batches).to_list()
            run_elsewhere(f"grow({files[1]!r}, size_bytes={SIZE})", files[0])
            wait_for(lambda: volume.uuid in recorded._remembered, "the reader to look")
            run_elsewhere("shrink([0])", files[0])
            os.truncate(files[0], 0)
            wait_for(lambda: dataset.session.members == (files[1],), "the reader to look")
            seen += [data for batch in batches for data in batch.to_list()]
            assert sorted(seen) == sorted(expected.values())
            volume.refresh()
            assert volume.uri == files[1]


def run_elsewhere(change: str, uri: str) -> None:
    """Change the members of a volume in another process."""
    program = f"import dlfs\nwith dlfs.open({uri!r}) as volume:\n    volume.{change}"
    subprocess.run([sys.executable, "-c", program], check=True)
