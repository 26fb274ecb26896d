"""The progress of an import for other programs of its host."""

from __future__ import annotations

import select
import threading
from typing import Any
from uuid import uuid4

import pytest

from dlfs.errors import FormatError
from dlfs.ingest.workers import publishing
from dlfs.ingest.workers.publishing import ProgressSocket, read_progress

PROGRESS = {"name": "x", "workers": [{"name": "host:1"}] * 300}


def ask(published: ProgressSocket, volume: Any) -> list[Any]:
    """Read the progress as another program does."""
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(read_progress(volume))
        except FormatError as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert published.listening is not None
    select.select([published.listening], [], [])
    published.answer()
    thread.join()
    return found


def test_who_connects_gets_the_progress() -> None:
    volume = uuid4()
    with ProgressSocket(volume, lambda: PROGRESS) as published:
        assert ask(published, volume) == [PROGRESS]
        assert ask(published, volume) == [PROGRESS]
        assert read_progress(uuid4()) is None
    assert read_progress(volume) is None


def test_another_user_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = uuid4()
    with ProgressSocket(volume, lambda: PROGRESS) as published:
        monkeypatch.setattr(publishing, "_is_trusted", lambda _: False)
        (error,) = ask(published, volume)
    assert "expected a process of this user, got one of another" in str(error)


def test_an_import_goes_on_if_the_name_is_taken() -> None:
    volume = uuid4()
    with ProgressSocket(volume, lambda: PROGRESS), ProgressSocket(volume, dict) as second:
        assert second.listening is None


def test_a_program_that_has_gone_does_not_matter() -> None:
    volume = uuid4()
    with ProgressSocket(volume, lambda: PROGRESS) as published:
        published.answer()  # nothing waits
        assert ask(published, volume) == [PROGRESS]
