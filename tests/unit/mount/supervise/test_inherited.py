"""The numbers of datasets that the servers of one mount share."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import trio

import dlfs
from dlfs.base.units import MIB
from dlfs.mount.mount_view import MountView
from dlfs.mount.supervise.inherited import DatasetNumbers
from tests.fuse.mounting import add_dataset


def test_numbers_are_shared_by_descriptor() -> None:
    numbers, uuids = DatasetNumbers(), [uuid4() for _ in range(3)]
    for number, uuid in enumerate(uuids, 1):
        numbers.set(number, uuid)
    numbers.set_loaded(2)
    other = DatasetNumbers(numbers.descriptor)
    assert list(other) == uuids
    assert other.loaded() == {2}
    numbers.close()


def test_a_view_takes_over_what_another_one_has_shown_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "volume.img"
    dlfs.format_volume(str(path), size_bytes=16 * MIB)

    def write(name: str) -> None:
        add_dataset(path, name, {b"path": b"data"})

    async def show(present: MountView, new: MountView) -> None:
        write("first")
        first = await present.child(b"first")
        assert [shown and shown.number for shown in await new.restore()] == [first.number]
        write("second")
        present.expire()
        second = await present.child(b"second")
        restored = await new.restore()
        assert [shown and shown.name for shown in restored] == [b"first", b"second"]
        assert new.dataset(second.number).info.uuid == second.info.uuid
        write("third")
        new.expire()
        assert (await new.child(b"third")).number == second.number + 1

    numbers = DatasetNumbers()
    with dlfs.open(str(path)) as volume, dlfs.open(str(path)) as other:
        trio.run(show, MountView([volume], numbers=numbers), MountView([other], numbers=numbers))
    numbers.close()
