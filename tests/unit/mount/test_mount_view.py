"""Several volumes in one view: their names, numbers and removal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import trio

import dlfs
from dlfs.errors import DeviceLostError, NotFoundError, StaleError
from dlfs.mount import mount_view, view
from dlfs.mount.mount_view import MountView
from dlfs.mount.supervise.inherited import DatasetNumbers
from dlfs.mount.view import ShownDataset, VolumeView
from dlfs.volume.volume import Volume

LABELS = ("b", "a", "a", "", "x/y", "..")


@pytest.fixture
def volumes() -> Iterator[list[Volume]]:
    with ExitStack() as stack:
        made = []
        for number, label in enumerate(LABELS):
            uri = f"mem:several{number}"
            dlfs.format_volume(uri + "?size=16MiB", force=True, label=label)
            made.append(stack.enter_context(dlfs.open(uri)))
            with made[-1].writer("d") as writer:
                writer.add("path", b"%d" % number)
        yield made


async def names(view: MountView, directory: int = 0) -> list[bytes]:
    await view.refresh(directory)
    return [name for name, _ in view.entries(directory)]


def test_names_of_volumes(volumes: list[Volume]) -> None:
    async def main() -> None:
        view = MountView(volumes, nested=True)
        await view.restore()
        uuids = [str(volume.uuid).encode() for volume in volumes[2:]]
        assert await names(view) == sorted([b"a", b"b", *uuids])
        for number, name in enumerate([b"b", b"a", *uuids], 1):
            found = await view.child(name)
            assert isinstance(found, VolumeView)
            assert found.number == number
            assert await names(view, number) == [b"d"]
            dataset = await view.child(b"d", number)
            assert isinstance(dataset, ShownDataset)
            assert (await view.load(dataset)).get("path") == b"%d" % (number - 1)
        assert len({shown.number for each in view.volumes for shown in view.shown_of(each)}) == 12
        for name in (b"d", b"b@1", b".."):
            with pytest.raises(NotFoundError, match="no such volume"):
                await view.child(name)
        for number in (7, 12):  # datasets
            with pytest.raises(StaleError):
                view.directory(number)
        with pytest.raises(StaleError, match="directory of a volume"):
            view.dataset(1)
        view.close()

    trio.run(main)


def test_space_and_times(volumes: list[Volume]) -> None:
    async def main() -> None:
        view = MountView(volumes[:2], nested=True)
        await view.restore()
        alone = [view.space(number) for number in (1, 2)]
        assert alone[0].capacity_bytes == volumes[0].capacity_bytes
        assert view.space() == tuple(map(sum, zip(*alone, strict=True)))
        dataset = await view.child(b"d", 2)
        assert view.space(dataset.number) == alone[1]
        assert view.modified_ns() == view.modified_ns(2) > view.modified_ns(1)
        view.close()

    trio.run(main)


def test_a_removed_volume_is_stale(volumes: list[Volume]) -> None:
    async def main() -> None:
        view = MountView(volumes[:1], nested=True)
        await view.restore()
        added = await view.add(volumes[1])
        dataset = await view.child(b"d", added.number)
        assert isinstance(dataset, ShownDataset)
        loaded = await view.load(dataset)
        await view.hide(added)
        assert await names(view) == [b"b"]
        assert await names(view, added.number) == [b"d"]  # for those that are in it
        with pytest.raises(NotFoundError):
            await view.child(b"a")
        await view.unhide(added)
        assert await names(view) == [b"a", b"b"]
        await view.remove(added)
        assert await names(view) == [b"b"]
        assert loaded is not None
        assert dataset.loaded is None
        for use in (view.directory, view.modified_ns, view.space, view.entries):
            with pytest.raises(StaleError):
                use(added.number)
        for number in (added.number, 0):
            with pytest.raises((StaleError, NotFoundError)):
                await view.child(b"d", number)
        with pytest.raises(StaleError):
            view.space(dataset.number)
        with pytest.raises(StaleError):
            await view.load(dataset)
        with pytest.raises(StaleError):
            await added.refresh()
        again = await view.add(volumes[1])
        assert (again.name, again.number > dataset.number) == (b"a", True)
        assert (await view.child(b"d", again.number)).number > again.number
        view.close()

    trio.run(main)


def test_the_next_server_has_the_same_numbers(volumes: list[Volume]) -> None:
    async def main() -> None:
        numbers = DatasetNumbers()
        first = MountView(volumes, nested=True, numbers=numbers)
        await first.restore()
        dataset = await first.child(b"d", 3)
        second = MountView(volumes, nested=True, numbers=numbers)
        restored = await second.restore()
        assert [shown.number for shown in restored] == list(range(1, 8))
        assert [volume.number for volume in second.volumes] == list(range(1, 7))
        assert second.dataset(dataset.number).volume is second.volumes[2]
        assert await second.restore() == restored
        later = await first.child(b"d", 1)
        assert [shown.number for shown in await second.restore()][-1] == later.number
        numbers.close()

    trio.run(main)


def test_a_volume_that_does_not_answer_is_shown_as_it_was(
    volumes: list[Volume], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(view, "ROOT_SECONDS", 0)
    monkeypatch.setattr(mount_view, "REFRESH_WAIT_SECONDS", 0.01)
    stuck = trio.Event()

    async def hang() -> None:
        await stuck.wait()
        raise DeviceLostError("gone")

    async def main() -> None:
        shown = MountView(volumes[:2], nested=True)
        await shown.restore()
        monkeypatch.setattr(shown.volumes[0], "refresh", hang)
        with trio.fail_after(60):
            async with trio.open_nursery() as shown.nursery:
                assert await shown.child(b"b") is shown.volumes[0]
                assert await names(shown) == [b"a", b"b"]
                assert await names(shown, 2) == [b"d"]
                assert shown.modified_ns(1) > 0
                stuck.set()
        assert "gone" in caplog.text
        assert await names(shown) == [b"a", b"b"]
        shown.close()

    trio.run(main)
