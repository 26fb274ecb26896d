"""The native server without a kernel: replies when a handler fails."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from dlfs._native import fuse as native
from dlfs._native.abi import Failure
from dlfs.errors import ChecksumError, StaleError
from dlfs.mount import native_server
from dlfs.mount.kernel_replies import READDIR
from dlfs.mount.mount_view import MountView
from dlfs.mount.native_server import NativeMount, widen_read_ahead
from dlfs.mount.view import ShownDataset
from dlfs.reader import MovedError


class Replies:
    """Records the replies to upcalls."""

    def __init__(self) -> None:
        self.given: list[tuple[int, bytes, int]] = []

    def reply(self, upcall_id: int, data: bytes = b"", *, error: int = 0) -> None:
        self.given.append((upcall_id, data, error))


@pytest.mark.parametrize(
    ("error", "number", "logged"),
    [
        (KeyError("no such dataset"), errno.EIO, "KeyError: 'no such dataset'"),
        (RuntimeError("a defect"), errno.EIO, "RuntimeError: a defect"),
        (ChecksumError("read sample 1: wrong"), errno.EIO, "read sample 1: wrong"),
        (MemoryError(), errno.ENOMEM, "ENOMEM"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_upcall_gets_a_reply(
    error: Exception, number: int, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_upcall: native.Upcall) -> bytes:
        raise error

    mount = NativeMount.__new__(NativeMount)
    replies = Replies()
    mount._path = "/mnt"
    mount._fuse = replies  # type: ignore[assignment]
    mount._handlers = {READDIR: fail}
    upcall: Any = SimpleNamespace(kind=READDIR, id=7)
    with caplog.at_level(logging.ERROR):
        trio.run(mount._answer, upcall)
    assert replies.given == [(7, b"", number)]
    assert logged in caplog.text


def test_only_the_mount_itself_reads_ahead_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.stat(tmp_path).st_dev
    device = f"{os.major(found)}:{os.minor(found)}"
    knob = tmp_path / device / "read_ahead_kb"
    knob.parent.mkdir()
    knob.write_text("128")
    monkeypatch.setattr(native_server, "DEVICES", tmp_path)
    for path, of in ((tmp_path, "0:4095"), (tmp_path, None), (tmp_path / "gone", device)):
        widen_read_ahead(str(path), of)
        assert knob.read_text() == "128"
    widen_read_ahead(str(tmp_path), device)
    assert knob.read_text() == "1024"


class AnsweredFuse:
    """A library whose withdrawal of a dataset waits for the reply to an upcall."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.withdrawn = False

    def reader_number(self, _number: int) -> int:
        return 0

    def withdraw_dataset(self, _number: int) -> None:
        self.withdrawn = self.answered.wait(100)


def test_a_failure_is_answered_while_the_dataset_is_removed() -> None:
    """A dataset is removed while a read of it, which failed since it was moved, is explained."""
    mount = NativeMount.__new__(NativeMount)
    fuse: Any = AnsweredFuse()
    info: Any = SimpleNamespace(name="d", version=1, uuid="u")
    view = MountView([None])  # type: ignore[list-item]
    (volume,) = view.volumes
    dataset = ShownDataset(volume, info, 1, loaded=SimpleNamespace(close=int))  # type: ignore[arg-type]
    dataset.pin()
    view._shown, volume.by_uuid = [dataset], {"u": dataset}  # type: ignore[dict-item]
    view.server, mount._view, mount._fuse = mount, view, fuse

    async def remove() -> None:
        volume._update([])
        while not dataset.load_lock.locked():
            await trio.lowlevel.checkpoint()

    def explain(_failure: Any) -> MovedError:
        trio.from_thread.run(remove)
        return MovedError("moved")

    mount._readers = {1: SimpleNamespace(explain=explain)}  # type: ignore[dict-item]
    upcall: Any = SimpleNamespace(dataset=1, reader=0, failure=Failure())

    async def answer() -> None:
        async with trio.open_nursery() as view.nursery:
            try:
                with trio.fail_after(50), pytest.raises(StaleError, match="removed"):
                    await mount._report_failure(upcall)
            finally:
                fuse.answered.set()

    trio.run(answer)
    assert fuse.withdrawn
    assert mount._readers == {}
