"""What lies above the datasets: listings that are resumed, times, ``incoming``."""

from __future__ import annotations

import stat
from collections.abc import Iterator

import pytest
import trio

import dlfs
from dlfs.errors import NotFoundError, StaleError
from dlfs.mount import view as module
from dlfs.mount.inode_numbers import DATASET_DEPTH, INCOMING, ROOT, pack
from dlfs.mount.list_directories import INCOMING_NAME, ListDirectories
from dlfs.mount.mount_view import MountView
from dlfs.mount.options import MountOptions
from dlfs.volume.volume import Volume


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    monkeypatch.setattr(module, "ROOT_SECONDS", 0)
    dlfs.format_volume("mem:lists?size=16MiB", force=True)
    with dlfs.open("mem:lists") as found:
        for name in "bdf":
            add(found, name)
        yield found


def add(volume: Volume, name: str) -> None:
    with volume.writer(name) as writer:
        writer.add("a", name.encode())


async def listed(lists: ListDirectories, position: int = 0) -> list[tuple[bytes, int]]:
    return [(name, after) for name, _, after in await lists.listing(ROOT, position)]


def test_a_listing_goes_on_behind_each_entry(volume: Volume) -> None:
    async def main() -> None:
        lists = ListDirectories(MountView([volume]), MountOptions(incoming="/area"))
        entries = await listed(lists)
        assert [name for name, _ in entries] == [b"b", b"d", b"f", INCOMING_NAME]
        for number, (_, after) in enumerate(entries, 1):
            assert await listed(lists, after) == entries[number:]

    trio.run(main)


def test_a_listing_goes_on_while_entries_change(volume: Volume) -> None:
    async def main() -> None:
        lists = ListDirectories(MountView([volume]), MountOptions())
        (_, behind_b), (_, behind_d), (_, behind_f) = await listed(lists)
        add(volume, "d")  # a new version, which has another number
        await lists.getattr(ROOT)
        assert [name for name, _ in await listed(lists, behind_d)] == [b"f"]
        volume.remove("d")
        add(volume, "c")
        add(volume, "e")
        assert [name for name, _ in await listed(lists)] == [b"b", b"c", b"e", b"f"]
        assert [name for name, _ in await listed(lists, behind_b)] == [b"c", b"e", b"f"]
        assert [name for name, _ in await listed(lists, behind_d)] == [b"e", b"f"]
        volume.rename("f", "a")
        volume.rename("b", "g")
        await lists.getattr(ROOT)
        assert [name for name, _ in await listed(lists, behind_b)] == [b"c", b"e", b"g"]
        assert [name for name, _ in await listed(lists, behind_f)] == [b"g"]
        assert len(await listed(lists, 60000)) == 4  # no entry had this position

    trio.run(main)


def test_a_listing_of_volumes(volume: Volume) -> None:
    """The kernel asks for the attributes of those that are listed, which may be old."""

    async def main() -> None:
        dlfs.format_volume("mem:more?size=16MiB", force=True)
        with dlfs.open("mem:more") as more:
            view = MountView([volume, more], nested=True)
            await view.restore()
            lists = ListDirectories(view, MountOptions())
            entries = list(await lists.listing(ROOT, 0))
            assert {found.attribute_seconds for _, found, _ in entries} == {0}
            await view.remove(view.volumes[1])
            behind_first = entries[0][2]
            assert await listed(lists, behind_first) in ([], [entries[1][::2]])
            assert len(await listed(lists)) == 1

    trio.run(main)


def test_times_rise_with_each_change(volume: Volume) -> None:
    async def main() -> None:
        lists = ListDirectories(MountView([volume]), MountOptions())
        first = (await lists.getattr(ROOT)).modified_ns
        assert (await lists.getattr(ROOT)).modified_ns == first
        volume.remove("b")
        second = (await lists.getattr(ROOT)).modified_ns
        assert second > first
        assert (await lists.getattr(ROOT)).modified_ns == second
        resumed = ListDirectories(MountView([volume]), MountOptions(), resumed=True)
        assert (await resumed.getattr(ROOT)).modified_ns > second

    trio.run(main)


def test_look_ups(volume: Volume) -> None:
    async def main() -> None:
        view = MountView([volume])
        lists = ListDirectories(view, MountOptions(incoming="/area", file_mode=0o440))
        found = await lists.lookup(ROOT, b"d")
        assert (found.inode, found.mode) == (pack(1, DATASET_DEPTH, 0), stat.S_IFDIR | 0o550)
        assert found.attribute_seconds > found.entry_seconds == 1.0
        assert not lists.answers_for(found.inode)
        assert lists.answers_for(found.inode, b"..")
        for inode, name in ((found.inode, b".."), (ROOT, b".."), (ROOT, b".")):
            assert (await lists.lookup(inode, name)).inode == ROOT
        link = await lists.lookup(ROOT, INCOMING_NAME)
        assert link == await lists.getattr(INCOMING)
        assert (link.inode, link.mode, link.size_bytes) == (INCOMING, stat.S_IFLNK | 0o777, 5)
        assert lists.readlink() == b"/area"
        with pytest.raises(NotFoundError):
            await lists.lookup(ROOT, b"e")
        for stale in (found.inode, pack(9, DATASET_DEPTH, 0)):
            with pytest.raises(StaleError):
                await lists.getattr(stale)
        assert (await lists.statfs()).sample_count == 3
        view.close()

    trio.run(main)
