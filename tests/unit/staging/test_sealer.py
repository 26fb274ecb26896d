"""Sealing without a mount: what can go wrong, and crashes at every step."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import (
    ClosedError,
    DeviceError,
    ExistsError,
    LimitError,
    LockedError,
    NotFoundError,
    UsageError,
)
from dlfs.staging import sealer as sealers
from dlfs.staging.area import StagingArea
from dlfs.staging.protocol import SealOptions, SealStatus
from dlfs.staging.sealer import Seal, Sealer, UndecidedError, failed_status
from dlfs.staging.source import StagedSource
from tests.support.files import write_files

FILES = {f"{number % 3}/{number}": bytes([number]) * number for number in range(40)}


class Crash(BaseException):
    """Raised where the process is to end, as in a crash."""


class Place:
    """A volume and a staging area with one dataset, ``x``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "area"
        self.path = str(folder / "volume.img")
        dlfs.format_volume(self.path, size_bytes=16 * MIB)
        self.open()
        self.begin("x")

    def open(self) -> None:
        self.volume = dlfs.open(self.path)
        self.area = StagingArea(self.folder, self.volume.uuid)
        self.sealer = Sealer(self.volume, self.area)

    def begin(self, name: str) -> Path:
        return write_files(self.folder / name, FILES)

    def seal(self, name: bytes = b"x", owner: int | None = None, **options: object) -> SealStatus:
        return self.sealer.seal(Seal(name, owner, SealOptions(**options)))  # type: ignore[arg-type]

    def restart(self) -> list[bytes]:
        """Open all again, and settle, as the next server does; return what had been sealed."""
        self.close()
        self.open()
        return list(self.sealer.settle())

    def versions(self) -> list[int]:
        self.volume.refresh()
        return [info.version for info in self.volume.datasets() if info.name == "x"]

    def check_files(self) -> None:
        """Check that the files lie in one place, whole: in the area, or in the volume."""
        if self.area.names() == [b"x"]:
            assert self.versions() == []
            found = {
                str(file.relative_to(self.folder / "x")): file.read_bytes()
                for file in (self.folder / "x").rglob("*")
                if file.is_file()
            }
        else:
            assert (self.area.names(), self.versions()) == ([], [1])
            with self.volume["x"] as dataset:
                found = {os.fsdecode(path): dataset.get(path) for path in dataset.paths()}
        assert found == FILES
        assert self.area.taken() == []

    def close(self) -> None:
        self.area.close()
        self.volume.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


def test_sealing(place: Place) -> None:
    status = place.seal(layout="path", seed=7)
    assert (status.state, status.version, status.samples_done) == ("sealed", 1, len(FILES))
    place.check_files()
    with place.volume["x"] as dataset:
        assert (dataset.info.layout, dataset.info.seed) == ("path", 7)
    assert len(os.listdir(place.folder / ".dlfs/removed")) == 1
    place.area.delete_removed()
    assert sorted(os.listdir(place.folder)) == [".dlfs"]
    with pytest.raises(NotFoundError, match="area/x is no directory"):
        place.seal()


STEPS = ["before it is taken", "after it is taken", "first block", "before the commit",
         "after the commit", "before it is removed", "after it is removed"]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_every_step(place: Place, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    from dlfs.store.transaction import Transaction

    owner, name, after = {
        "before it is taken": (StagingArea, "_move_out", False),
        "after it is taken": (StagingArea, "_move_out", True),
        "first block": (dlfs.DatasetWriter, "add_batch", True),
        "before the commit": (Transaction, "commit", False),
        "after the commit": (Transaction, "commit", True),
        "before it is removed": (StagingArea, "remove", False),
        "after it is removed": (StagingArea, "remove", True),
    }[step]
    original = getattr(owner, name)

    def crash(*args: object, **kwargs: object) -> None:
        if after:
            original(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash)
        with pytest.raises(Crash):
            place.seal()
    committed = STEPS.index(step) >= STEPS.index("after the commit")
    finished = place.restart()
    assert finished == ([b"x"] if step in ("after the commit", "before it is removed") else [])
    assert place.versions() == ([1] if committed else [])
    place.check_files()
    assert place.restart() == []
    if not committed:
        assert place.seal().version == 1
        place.check_files()


def test_a_crash_while_it_is_put_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder / "x/link").symlink_to("/etc/passwd")
    original = os.rmdir

    def crash(path: str, *, dir_fd: int | None = None) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", crash)
        with pytest.raises(Crash):
            place.seal()
    assert os.rmdir is original
    assert place.restart() == []
    assert (place.area.names(), place.area.taken()) == ([b"x"], [])


def test_a_failed_seal_puts_the_dataset_back(place: Place) -> None:
    link = place.folder / "x/link"
    link.symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="import x/link: expected no symbolic links"):
        place.seal()
    assert (place.versions(), place.area.names(), place.area.taken()) == ([], [b"x"], [])
    link.unlink()
    assert place.seal().state == "sealed"


@pytest.mark.parametrize("make_again", [False, True])
def test_an_open_file(place: Place, monkeypatch: pytest.MonkeyPatch, make_again: bool) -> None:
    stat = StagedSource._stat

    def begin_again(source: StagedSource) -> None:
        (place.folder / "x").mkdir()
        (place.folder / "x/new").write_bytes(b"new")
        stat(source)

    if make_again:
        monkeypatch.setattr(StagedSource, "_stat", begin_again)
    with (
        (place.folder / "x/0/3").open("ab"),
        pytest.raises(ExistsError if make_again else LockedError) as caught,
    ):
        place.seal()
    assert "import x/0/3: the file is open for writing" in str(caught.value)
    monkeypatch.undo()
    if make_again:
        (uuid,) = place.area.taken()
        taken = place.folder / f".dlfs/sealing/{uuid}/x"
        for named in (taken, place.folder / "x"):
            assert str(named) in str(caught.value)
        assert place.restart() == []
        assert (place.folder / "x/new").read_bytes() == b"new"
        assert (taken / "0/3").read_bytes() == FILES["0/3"]
        (place.folder / "x").rename(place.folder / "y")
        assert place.seal(b"y").samples_done == 1  # and x is back
        assert place.area.names() == [b"x"]
        place.check_files()
    else:
        place.check_files()


@pytest.mark.parametrize("name", [b"a@1", b"--help", b"a\nb", b" a", b"incoming", b"\xff", b""])
def test_names_that_no_dataset_may_have(place: Place, name: bytes) -> None:
    if name:
        place.begin(os.fsdecode(name))
    with pytest.raises(UsageError, match="a dataset's name is"):
        place.seal(name)
    with pytest.raises(LimitError, match="245 bytes"):
        place.seal(b"n" * 245)
    assert place.area.taken() == []


def test_without_samples(place: Place) -> None:
    (place.folder / "none/a/b").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="import none: expected at least one sample"):
        place.seal(b"none")
    status = place.seal(b"none", allow_empty=True)
    assert (status.samples_done, status.empty_directories) == (0, 2)
    with place.volume["none"] as dataset:
        assert [*dataset.empty_directories()] == [b"a/b"]


def test_a_commit_whose_error_is_not_final(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sealers.import_dataset

    def fail_late(*args: object, **kwargs: object) -> None:
        run(*args, **kwargs)  # type: ignore[arg-type]
        raise DeviceError("the very last write failed")

    monkeypatch.setattr(sealers, "import_dataset", fail_late)
    status = place.seal()
    assert (status.state, status.version, status.samples_done) == ("sealed", 1, len(FILES))
    place.check_files()


@pytest.mark.parametrize("committed", [True, False])
def test_a_volume_that_does_not_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    run = sealers.import_dataset

    def fail(*args: object, **kwargs: object) -> None:
        if committed:
            run(*args, **kwargs)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(type(place.volume), "refresh", lose)
        monkeypatch.setattr(type(place.volume), "refresh", lose)
        raise DeviceError("write: no such device")

    def lose(*_: object) -> None:
        raise DeviceError("read the superblock: no such device")

    monkeypatch.setattr(sealers, "import_dataset", fail)
    with pytest.raises(UndecidedError, match="it is unknown whether the dataset was sealed") as got:
        place.seal()
    place.sealer.note_error(b"x", failed_status(got.value))
    (listed,) = place.sealer.datasets(None, {})
    assert (listed.name, listed.status.state) == ("x", "undecided")
    with pytest.raises(DeviceError, match="read the superblock"):
        place.seal()
    monkeypatch.undo()
    assert place.seal().version == 1  # it is decided now
    place.check_files()


def test_files_that_cannot_be_removed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_area: StagingArea, _uuid: UUID) -> None:
        raise OSError(errno.EIO, "the disk failed")

    with monkeypatch.context() as patch:
        patch.setattr(StagingArea, "remove", fail)
        assert place.seal().state == "sealed"
    assert len(place.area.taken()) == 1
    assert place.restart() == [b"x"]
    place.check_files()


def test_discarding(place: Place) -> None:
    discard = Seal(b"x", None)
    (place.folder / "x/link").symlink_to("/etc/passwd")
    with (
        (place.folder / "x/0/3").open("ab"),
        pytest.raises(LockedError, match="import x/0/3: the file is open for writing"),
    ):
        place.sealer.discard(discard)
    assert place.area.names() == [b"x"]
    place.sealer.discard(discard)
    assert (place.area.names(), place.area.taken(), place.versions()) == ([], [], [])
    with pytest.raises(NotFoundError):
        place.sealer.discard(discard)


@pytest.mark.parametrize("path", [b"../other", b"/tmp", b"..", b".", b"", b"x/0", b"x\0"])
def test_a_path_is_no_name(place: Place, path: bytes) -> None:
    (place.folder.parent / "other").mkdir()
    for refused in (place.seal, lambda name: place.sealer.discard(Seal(name, None))):
        with pytest.raises(UsageError):
            refused(path)
    assert (place.folder.parent / "other").is_dir()
    assert place.area.names() == [b"x"]


@pytest.mark.root
def test_other_users(place: Place) -> None:
    nobody, theirs = 65534, place.begin("theirs")
    for refused in (place.seal, lambda **_: place.sealer.discard(Seal(b"x", nobody))):
        with pytest.raises(DeviceError, match="belongs to user 0, not to user 65534") as caught:
            refused(owner=nobody)
        assert caught.value.errno == errno.EACCES
    os.chown(theirs, nobody, nobody)
    with pytest.raises(DeviceError, match=r"import theirs/0/0: it belongs to user 0") as caught:
        place.seal(b"theirs", nobody)
    assert caught.value.errno == errno.EACCES
    assert place.area.names() == [b"theirs", b"x"]
    assert [each.name for each in place.sealer.datasets(nobody, {})] == ["theirs"]
    assert [each.name for each in place.sealer.datasets(None, {})] == ["theirs", "x"]
    for file in theirs.rglob("*"):
        os.chown(file, nobody, nobody)
    assert place.seal(b"theirs", nobody).samples_done == len(FILES)


def test_the_end_of_the_server_abandons_a_seal(place: Place) -> None:
    place.sealer.end()
    with pytest.raises(ClosedError, match="the mount was ended"):
        place.seal()
    place.check_files()
    assert place.area.names() == [b"x"]


def test_a_list_with_errors_and_progress(place: Place) -> None:
    place.begin("y")
    under_way = {b"x": Seal(b"x", None, status=SealStatus("sealing", samples_done=3))}
    place.sealer.note_error(b"y", failed_status(LockedError("y is locked")))
    place.sealer.note_error(b"none", failed_status(NotFoundError("there is none")))
    x, y = place.sealer.datasets(None, under_way)
    assert (x.status.state, x.status.samples_done) == ("sealing", 3)
    assert (y.status.error, y.contents.files) == ("y is locked", len(FILES))
    place.seal(b"y")
    assert [each.name for each in place.sealer.datasets(None, under_way)] == ["x"]
