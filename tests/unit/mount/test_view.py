"""The datasets of a volume as a mount numbers them."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio

import dlfs
from dlfs.dataset.dataset import Dataset
from dlfs.errors import DeviceLostError, LimitError, NotFoundError, StaleError
from dlfs.mount import mount_view
from dlfs.mount import view as module
from dlfs.mount.mount_view import MountView
from dlfs.mount.view import LOADS_MAX, ShownDataset
from dlfs.volume.volume import Volume


@pytest.fixture
def volume() -> Iterator[Volume]:
    dlfs.format_volume("mem:view?size=16MiB", force=True)
    with dlfs.open("mem:view") as found:
        yield found


def add(volume: Volume, name: str) -> None:
    with volume.writer(name) as writer:
        writer.add("a", name.encode())


def all_loaded(view: MountView) -> list[ShownDataset]:
    return [dataset for dataset in view.shown_of(view.volumes[0]) if dataset.loaded is not None]


async def listed(view: MountView, directory: int = 0) -> list[bytes]:
    await view.refresh(directory)
    return [name for name, _ in view.entries(directory)]


def run(volume: Volume, body: Callable[[MountView], Awaitable[None]]) -> None:
    async def main() -> None:
        view = MountView([volume])
        try:
            await body(view)
        finally:
            view.close()

    trio.run(main)


def test_numbers_stay(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOT_SECONDS", 0)
    add(volume, "x")

    async def body(view: MountView) -> None:
        first = await view.child(b"x")
        add(volume, "x")
        second = await view.child(b"x")
        assert (first.number, second.number) == (1, 2)
        assert (first.info.version, second.info.version) == (1, 2)
        assert await view.child(b"x@1") is first
        assert view.dataset(1) is first
        for number in (0, 3, 65535):
            with pytest.raises(StaleError):
                view.dataset(number)
        with pytest.raises(NotFoundError):
            await view.child(b"y")

    run(volume, body)


@pytest.mark.parametrize("error", [DeviceLostError("gone"), NotFoundError("no such device")])
def test_the_list_stays_while_it_cannot_be_read(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(module, "ROOT_SECONDS", 0)
    add(volume, "x")
    refresh = volume.refresh

    def fail() -> None:
        raise error

    async def body(view: MountView) -> None:
        monkeypatch.setattr(volume, "refresh", fail)
        with pytest.raises(type(error)):
            await listed(view)  # no list was ever read
        monkeypatch.setattr(volume, "refresh", refresh)
        assert await listed(view) == [b"x"]
        monkeypatch.setattr(volume, "refresh", fail)
        assert await listed(view) == [b"x"]
        assert (await view.child(b"x")).number == 1
        monkeypatch.setattr(volume, "refresh", refresh)
        add(volume, "y")
        assert await listed(view) == [b"x", b"y"]

    run(volume, body)


def test_a_renamed_dataset_keeps_its_number(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOT_SECONDS", 0)
    add(volume, "x")

    async def body(view: MountView) -> None:
        before = await view.child(b"x")
        volume.rename("x", "y")
        add(volume, "x")
        loaded = await view.load(before)  # looked up under the old name
        assert loaded.get("a") == b"x"
        assert await view.child(b"y") is before
        assert (await view.child(b"x")).info.version == 2
        assert await listed(view) == [b"x", b"y"]

    run(volume, body)


class Stuck:
    """Has a view's loads wait when they are done; says how many do."""

    def __init__(self, view: MountView, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.waiting = threading.Semaphore(0)
        (volume,) = view.volumes
        real = volume._load

        def load(dataset: ShownDataset) -> Dataset:
            loaded = real(dataset)
            self.waiting.release()
            assert self.go.wait(60)
            return loaded

        monkeypatch.setattr(volume, "_load", load)

    async def wait_for(self, count: int) -> None:
        for _ in range(count):
            await trio.to_thread.run_sync(self.waiting.acquire)


def test_loads_that_hang_keep_nobody_else_waiting(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOT_SECONDS", 0)
    names = [f"stuck{number}" for number in range(LOADS_MAX + 1)]
    for name in (*names, "loaded"):
        add(volume, name)

    async def body(view: MountView) -> None:
        loaded = await view.load(await view.child(b"loaded"))
        stuck = Stuck(view, monkeypatch)
        free = trio.to_thread.current_default_thread_limiter().available_tokens
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(view.load, await view.child(name.encode()))
                await stuck.wait_for(LOADS_MAX)
                assert view.volumes[0]._load_limiter.available_tokens == 0
                assert trio.to_thread.current_default_thread_limiter().available_tokens == free
                assert await listed(view) == sorted(name.encode() for name in (*names, "loaded"))
                assert await view.load(await view.child(b"loaded")) is loaded
                stuck.go.set()
        assert len(all_loaded(view)) == len(names) + 1

    run(volume, body)


def test_what_is_removed_while_it_is_loaded_is_closed(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOT_SECONDS", 0)
    add(volume, "stuck")

    async def body(view: MountView) -> None:
        shown, closed = await view.child(b"stuck"), list[Dataset]()
        monkeypatch.setattr(Dataset, "close", lambda loaded: closed.append(loaded))
        stuck = Stuck(view, monkeypatch)
        refused: list[StaleError] = []

        async def open_it() -> None:
            try:
                await view.load(shown)
            except StaleError as error:
                refused.append(error)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_it)
                await stuck.wait_for(1)
                volume.remove("stuck")
                assert await listed(view) == []
                stuck.go.set()
        assert (len(closed), len(refused), all_loaded(view)) == (1, 1, [])
        monkeypatch.undo()
        closed[0].close()

    run(volume, body)


def test_removed_datasets_are_closed_when_unused(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOT_SECONDS", 0)
    add(volume, "x")

    async def body(view: MountView) -> None:
        shown = await view.child(b"x")
        loaded = await view.load(shown)
        shown.pin()
        volume.remove("x")
        assert await listed(view) == []
        assert view.modified_ns() == 0
        assert shown.loaded is loaded
        with pytest.raises(StaleError, match="was removed"):
            view.dataset(shown.number)
        shown.unpin()
        assert shown.loaded is None

    run(volume, body)


def test_what_took_a_removed_name_is_not_what_was_shown(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOT_SECONDS", 1000)
    add(volume, "x")
    add(volume, "y")

    async def body(view: MountView) -> None:
        shown = await view.child(b"x")
        other = await view.child(b"y")
        volume.remove("x")
        volume.remove("y")
        add(volume, "x")
        assert [info.version for info in volume.datasets()] == [shown.info.version + 1]
        for gone in (shown, other):
            with pytest.raises(StaleError, match="was removed"):
                await view.load(gone)  # the list has not been read again since
            assert gone.loaded is None
        view.expire()
        assert (await view.child(b"x")).number == 3
        with pytest.raises(StaleError, match="was removed"):
            await view.load(shown)
        await view.load(await view.child(b"x"))

    run(volume, body)


def test_numbers_run_out(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_view, "DATASET_MAX", 1)
    add(volume, "x")
    add(volume, "y")

    async def body(view: MountView) -> None:
        assert (await view.child(b"y")).number == 1
        assert (await view.child(b"y")).number == 1
        with pytest.raises(LimitError, match="mount the volume anew"):
            await view.child(b"x")

    run(volume, body)
