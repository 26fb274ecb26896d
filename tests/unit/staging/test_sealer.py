"""Sealing without a mount: what can go wrong, and crashes at every step."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from uuid import UUID, uuid4

import pytest
import trio
import trio.testing

import dlfs
from dlfs.errors import DeviceError, StaleError
from dlfs.ingest.formats.folder import FolderSource
from dlfs.staging import sealer as sealers
from dlfs.staging.area import StagingArea
from dlfs.staging.entries import identity_of
from dlfs.staging.incoming import open_incoming
from dlfs.staging.inode_table import Inode, InodeTable
from dlfs.staging.protocol import SealOptions, SealStatus
from dlfs.staging.sealer import Sealer
from dlfs.units import MIB

FILES = {f"{number % 3}/{number}": bytes([number]) * number for number in range(40)}


class Crash(BaseException):
    """Raised where the process is to end, as in a crash."""


class Place:
    """A volume and a staging area with one dataset, ``x``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "volume.img"
        dlfs.format_volume(str(path), size_bytes=16 * MIB)
        self.volume = dlfs.open(str(path))
        self.gone: list[bytes] = []
        self.area = StagingArea(folder / "area", self.volume.uuid)
        self.area.create(b"x", mode=0o755, uid=os.geteuid(), gid=os.getegid())
        for name, data in FILES.items():
            file = Path(self.area.path(b"x")) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)

    def sealer(self) -> tuple[Sealer, Inode]:
        table = InodeTable((0, 0))
        identity = identity_of(os.stat(self.area.path(b"x")))
        inode = table.note_lookup(table.root, b"x", identity, directory=True)
        return Sealer(self.volume, self.area, lambda _, name: self.gone.append(name)), inode

    def restart(self) -> list[bytes]:
        """Open the volume and the staging area again, and recover, as the next server does."""
        self.close()
        self.volume = dlfs.open(str(self.folder / "volume.img"))
        self.area = StagingArea(self.folder / "area", self.volume.uuid)
        return self.area.recover({info.uuid for info in self.volume.datasets()})

    def versions(self) -> list[int]:
        self.volume.refresh()
        return [info.version for info in self.volume.datasets() if info.name == "x"]

    def close(self) -> None:
        self.area.close()
        self.volume.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


async def ready() -> str | None:
    return None


def seal(place: Place, *attempts: Callable[[], None]) -> SealStatus:
    """Seal once for every attempt, after calling it; return the last status."""
    sealer, inode = place.sealer()

    async def main() -> SealStatus:
        status = sealer.status(inode)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sealer.run)
            for prepare in attempts:
                prepare()
                await sealer.request(inode, SealOptions(), ready)
                status = await ended(sealer, inode)
            nursery.cancel_scope.cancel()
        return status

    return trio.run(main)


async def ended(sealer: Sealer, inode: Inode) -> SealStatus:
    """Wait for the end of a seal."""
    with trio.fail_after(30):
        while True:
            found = sealer.ended(inode)
            status = found or sealer.status(inode)
            if status.state not in ("waiting", "sealing"):
                return status
            await trio.sleep(0.005)


def nothing() -> None:
    """Prepare nothing."""


def test_sealing(place: Place) -> None:
    status = seal(place, nothing)
    assert (status.state, status.version, status.samples_done) == ("sealed", 1, len(FILES))
    assert place.gone == [b"x"]
    assert place.area.names() == []
    with place.volume["x"] as dataset:
        assert {name: dataset.get(name) for name in FILES} == FILES


STEPS = ["before the record", "after the record", "first block", "before the commit",
         "after the commit", "before it is let go", "after it is let go"]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_every_step(place: Place, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    from dlfs.store.transaction import Transaction

    owner, name, after = {
        "before the record": (StagingArea, "begin_seal", False),
        "after the record": (StagingArea, "begin_seal", True),
        "first block": (dlfs.DatasetWriter, "add_batch", True),
        "before the commit": (Transaction, "commit", False),
        "after the commit": (Transaction, "commit", True),
        "before it is let go": (StagingArea, "take_out", False),
        "after it is let go": (StagingArea, "take_out", True),
    }[step]
    original = getattr(owner, name)

    def crash(*args: object, **kwargs: object) -> None:
        if after:
            original(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash)
        with pytest.raises(BaseExceptionGroup) as caught:
            seal(place, nothing)
    assert caught.value.split(Crash)[1] is None  # and nothing else went wrong
    committed = STEPS.index(step) >= STEPS.index("after the commit")
    finished = place.restart()
    assert finished == ([b"x"] if step in ("after the commit", "before it is let go") else [])
    assert place.versions() == ([1] if committed else [])
    assert place.area.names() == ([] if committed else [b"x"])
    assert place.restart() == []
    if not committed:
        assert seal(place, nothing).version == 1
    with place.volume["x"] as dataset:
        assert {name: dataset.get(name) for name in FILES} == FILES


def test_a_dataset_sealed_while_the_next_server_waits_is_taken_out(place: Place) -> None:
    """It opened the volume before the commit, and got the staging area after a crash behind it."""
    with dlfs.open(place.volume.uri) as opened_before:
        uuid = uuid4()
        place.area.begin_seal(b"x", uuid)
        with closing(FolderSource(place.area.path(b"x"))) as source:
            sealers.import_dataset(place.volume, source, "x", uuid=uuid)
        place.area.close()

        async def names() -> list[bytes]:
            with open_incoming(opened_before, place.folder / "area"):
                return sorted(os.listdir(os.fsencode(place.folder / "area/datasets")))

        assert trio.run(names) == []
    assert place.versions() == [1]


def test_a_failed_seal_leaves_the_dataset_open(place: Place) -> None:
    bad = Path(place.area.path(b"x")) / "link"

    def spoil() -> None:
        bad.symlink_to("/etc/passwd")

    status = seal(place, spoil)
    assert (status.state, status.kind) == ("open", "UsageError")
    assert "import x/link: expected no symbolic links" in (status.error or "")
    assert (place.versions(), place.area.names(), place.gone) == ([], [b"x"], [])
    assert not (place.folder / "area/datasets/x/seal").exists()
    assert seal(place, bad.unlink).state == "sealed"


def test_an_error_after_the_commit_is_ignored(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sealers.import_dataset

    def fail_late(*args: object, **kwargs: object) -> None:
        run(*args, **kwargs)  # type: ignore[arg-type]
        raise DeviceError("the very last write failed")

    monkeypatch.setattr(sealers, "import_dataset", fail_late)
    status = seal(place, nothing)
    assert (status.state, status.version, status.samples_done) == ("sealed", 1, len(FILES))
    assert (place.versions(), place.area.names()) == ([1], [])


def test_an_undecided_seal_stays_frozen_and_is_decided_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk failed")

    sealer, inode = place.sealer()

    async def main() -> SealStatus:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sealer.run)
            monkeypatch.setattr(place.area, "take_out", fail)
            await sealer.request(inode, SealOptions(), ready)
            undecided = await ended(sealer, inode)
            assert undecided.state == "undecided"
            assert "it was sealed, but cannot be taken out" in (undecided.error or "")
            with pytest.raises(OSError, match="busy"), sealer.changing(inode):
                pass
            monkeypatch.undo()
            await sealer.request(inode, SealOptions(), ready)
            status = await ended(sealer, inode)
            nursery.cancel_scope.cancel()
        return status

    assert trio.run(main).version == 1
    assert (place.versions(), place.area.names()) == ([1], [])


def test_a_volume_that_does_not_answer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DeviceError("read the superblock: no such device")

    def lose() -> None:
        monkeypatch.setattr(type(place.volume), "refresh", fail)
        monkeypatch.setattr(sealers, "import_dataset", fail)

    status = seal(place, lose, nothing, monkeypatch.undo)
    assert (status.state, status.version) == ("sealed", 1)
    assert (place.versions(), place.area.names()) == ([1], [])


def test_changes_and_seals_exclude_each_other(place: Place) -> None:
    sealer, inode = place.sealer()
    steps: list[str] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with sealer.changing(inode, inode):
                nursery.start_soon(request)
                await trio.testing.wait_all_tasks_blocked()
                steps.append("change")
                with pytest.raises(OSError, match="busy"), sealer.changing(inode):
                    pass
                with pytest.raises(OSError, match="busy"):
                    await sealer.request(inode, SealOptions(), ready)
                with pytest.raises(OSError, match="busy"):
                    await sealer.discard(inode, ready)

    async def request() -> None:
        with pytest.raises(OSError, match="busy"):
            await sealer.request(inode, SealOptions(), find_obstacle)
        steps.append("refused")

    async def find_obstacle() -> str:
        return "nobody is ready"

    trio.run(main)
    assert steps == ["change", "refused"]
    assert sealer.status(inode).error == "seal 'x': nobody is ready"


def test_discarding(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sealer, inode = place.sealer()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk failed")

    with monkeypatch.context() as patch:
        patch.setattr(place.area, "take_out", fail)
        with pytest.raises(OSError, match="the disk failed"):
            trio.run(sealer.discard, inode, ready)
    assert sealer.status(inode).state == "open"
    trio.run(sealer.discard, inode, ready)
    assert (place.gone, place.area.names()) == ([b"x"], [])
    assert sealer.ended(inode) is not None
    inode.links.clear()
    with pytest.raises(StaleError):
        sealer.status(inode)


def test_the_end_of_the_mount_abandons_a_seal(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealer, inode = place.sealer()
    begun, noticed = trio.Event(), threading.Event()
    begin = place.area.begin_seal

    def wait(name: bytes, uuid: UUID) -> None:
        begin(name, uuid)
        trio.from_thread.run_sync(begun.set)
        assert noticed.wait(30)

    monkeypatch.setattr(place.area, "begin_seal", wait)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sealer.run)
            await sealer.request(inode, SealOptions(), ready)
            await begun.wait()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            noticed.set()

    trio.run(main)
    assert (place.versions(), place.area.names(), place.gone) == ([], [b"x"], [])
    assert "the mount was ended" in (sealer.status(inode).error or "")
    assert place.restart() == []
