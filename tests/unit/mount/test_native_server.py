"""The native mount without a kernel: what it answers when something is wrong with the answer."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from dlfs._native import fuse as native
from dlfs.errors import ChecksumError
from dlfs.mount import native_server as native_mount
from dlfs.mount.native_server import NativeMount, widen_read_ahead


class Answers:
    """Takes what the kernel would be told."""

    def __init__(self) -> None:
        self.given: list[tuple[int, dict[str, Any]]] = []

    def answer(self, ticket: int, **fields: Any) -> None:
        self.given.append((ticket, fields))


@pytest.mark.parametrize(
    ("error", "number", "told"),
    [
        (KeyError("no such slot"), errno.EIO, "KeyError: 'no such slot'"),
        (RuntimeError("a defect"), errno.EIO, "RuntimeError: a defect"),
        (ChecksumError("read sample 1: wrong"), errno.EIO, "read sample 1: wrong"),
        (MemoryError(), errno.ENOMEM, "ENOMEM"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_question_is_answered(
    error: Exception, number: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_question: native.FuseQuestion) -> dict[str, Any]:
        raise error

    mount = NativeMount.__new__(NativeMount)
    answers = Answers()
    mount._path = "/mnt"
    mount._fuse = answers  # type: ignore[assignment]
    mount._answers = {native.ASK_LIST: fail}
    question: Any = SimpleNamespace(kind=native.ASK_LIST, ticket=7)
    with caplog.at_level(logging.ERROR):
        trio.run(mount._answer, question)
    assert answers.given == [(7, {"error": number})]
    assert told in caplog.text


def test_only_the_mount_itself_reads_ahead_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.stat(tmp_path).st_dev
    device = f"{os.major(found)}:{os.minor(found)}"
    knob = tmp_path / device / "read_ahead_kb"
    knob.parent.mkdir()
    knob.write_text("128")
    monkeypatch.setattr(native_mount, "DEVICES", tmp_path)
    for path, of in ((tmp_path, "0:4095"), (tmp_path, None), (tmp_path / "gone", device)):
        widen_read_ahead(str(path), of)
        assert knob.read_text() == "128"
    widen_read_ahead(str(tmp_path), device)
    assert knob.read_text() == "1024"
