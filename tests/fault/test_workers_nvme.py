"""Imports by workers into a namespace over NVMe/TCP, whose workers stop past their deadlines.

The target is the scripted one, in this process; the workers are processes of their own, which join
by TCP, so that the coordinator cannot kill them: only the deadlines of their grants end their
writes. ``DLFS_IMPORT_STOPS`` is the number of rounds in which a worker is stopped (2 by default).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.block import SharedNamespaceDevice as Shared
from dlfs.block.lease import LeaseTimes
from dlfs.ingest.workers.by_workers import WorkersOptions
from dlfs.ingest.workers.coordinator import GrantTimes
from dlfs.ingest.workers.launching import ProcessLauncher
from dlfs.ingest.workers.listening import Listener
from dlfs.store.grants import GrantBook
from tests.support.equal_imports import (
    CHUNK_BYTES,
    contents,
    import_folder,
    make_folder,
    make_volume,
)
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem

STOPS = int(os.environ.get("DLFS_IMPORT_STOPS", "2"))
TIMES = LeaseTimes(renew_s=0.2, valid_s=4, drain_s=8, claim_s=0.2, poll_s=0.02)
SHORT: dict[str, Any] = {"timeout_ms": 6000, "reconnect_ms": 1500, "keepalive_ms": 2000}
"""Timeouts of the devices, which end within the drain time."""
STEP_BYTES = 1 * MIB
ROOM_BYTES = STEP_BYTES // 2
"""Room of the volume besides the import: without the chunks of a lost worker it does not end."""


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "lease_times", TIMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    plain = make_volume(tmp_path_factory.mktemp("plain") / "plain.img")
    import_folder(plain, folder, step_bytes=STEP_BYTES)
    return contents(plain)


@pytest.fixture
def uri(expected: tuple[Any, ...]) -> Iterator[str]:
    """A volume that has little more room than the import needs."""
    namespace = Namespace(expected[-1] + ROOM_BYTES + 1 * MIB)
    with ScriptedTarget([Subsystem("nqn.2026-11.org.dlfs:a", [namespace])]) as made:
        uri = made.uri(**SHORT)
        dlfs.format_volume(uri, chunk_bytes=CHUNK_BYTES)
        yield uri
        assert made.violations == []


class StoppingLauncher(ProcessLauncher):
    """Stops one of the workers at some moment, and continues it when all steps are committed.

    Then others have written what was granted to it.

    Args:
        count: number of workers.
        listener: where they join.
        begin: set when chunks are granted: from then on the worker is stopped.
        seed: of the moment, and of which worker.
    """

    def __init__(self, count: int, listener: Listener, begin: threading.Event, seed: int) -> None:
        super().__init__(count, listener.invitation)
        self._begin, self._chance = begin, random.Random(seed)
        self._over = threading.Event()
        self._stopped: int | None = None
        self._thread = threading.Thread(target=self._stop)
        self._thread.start()

    def _stop(self) -> None:
        self._begin.wait()
        if not self._over.wait(self._chance.random()):
            self._stopped = self._chance.choice(self._children).process.pid
            os.kill(self._stopped, signal.SIGSTOP)

    def close(self) -> None:
        self._over.set()
        self._begin.set()
        self._thread.join()
        for child in self._children:
            if child.process.pid == self._stopped:
                os.kill(self._stopped, signal.SIGCONT)
                assert child.process.wait(100) >= 0
        super().close()


@pytest.mark.parametrize("number", range(STOPS))
def test_a_worker_is_stopped_past_its_deadline_and_continued(
    uri: str,
    folder: Path,
    expected: tuple[Any, ...],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    granted = threading.Event()
    lost: list[int] = []
    take, lose = GrantBook.take, GrantBook.lose

    def taking(book: GrantBook, *arguments: Any) -> Any:
        granted.set()
        return take(book, *arguments)

    def losing(book: GrantBook, worker: str, until_s: float) -> None:
        lose(book, worker, until_s)
        lost.extend(run.chunk_count for grant in book.lost for run in grant.runs)

    monkeypatch.setattr(GrantBook, "take", taking)
    monkeypatch.setattr(GrantBook, "lose", losing)

    def start(stack: ExitStack, count: int, _times: GrantTimes) -> tuple[Listener, ProcessLauncher]:
        listener = stack.enter_context(Listener("127.0.0.1"))
        return listener, StoppingLauncher(count, listener, granted, number)

    import_folder(uri, folder, WorkersOptions(2, start=start), step_bytes=STEP_BYTES)
    print(f"round {number}: {sum(lost)} chunks of a lost worker")
    assert contents(uri) == expected
