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
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import SharedNamespaceDevice as Shared
from dlfs.block.lease import LeaseTimes
from dlfs.ingest.importer import ImportReport, import_dataset, open_source
from dlfs.ingest.workers.by_workers import StartLauncher, WorkersOptions
from dlfs.ingest.workers.coordinator import GrantTimes
from dlfs.ingest.workers.launching import ProcessLauncher
from dlfs.ingest.workers.listening import Listener
from tests.fault.test_workers_killed import children, make_folder
from tests.support.nvme import Namespace, ScriptedTarget, Subsystem
from tests.support.volumes import new_volume

STOPS = int(os.environ.get("DLFS_IMPORT_STOPS", "2"))
TIMES = LeaseTimes(renew_s=0.25, valid_s=6, drain_s=12, claim_s=0.5, poll_s=0.02)
SHORT: dict[str, Any] = {"timeout_ms": 4000, "reconnect_ms": 2000, "keepalive_ms": 2000}
"""Timeouts of the devices, which end within the drain time."""
CHUNK_BYTES = 16 * KIB


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "lease_times", TIMES)


@pytest.fixture
def target() -> Iterator[ScriptedTarget]:
    with ScriptedTarget([Subsystem("nqn.2026-11.org.dlfs:a", [Namespace(32 * MIB)])]) as made:
        yield made
        assert made.violations == []


def start_by_tcp(
    stack: ExitStack, count: int, _times: GrantTimes
) -> tuple[Listener, ProcessLauncher]:
    """Start workers that join as those elsewhere do."""
    listener = stack.enter_context(Listener("127.0.0.1"))
    return listener, ProcessLauncher(count, listener.invitation)


def import_folder(volume: str, folder: Path, workers: WorkersOptions | int = 0) -> ImportReport:
    with dlfs.open(volume) as target, closing(open_source(folder)) as source:
        source.buffer_bytes = 64 * KIB
        return import_dataset(target, source, "x", step_bytes=256 * KIB, workers=workers)


def check_equal(volume: str, report: ImportReport, folder: Path, plain: Path) -> None:
    plain_volume = str(new_volume(plain, size_bytes=32 * MIB, chunk_bytes=CHUNK_BYTES))
    expected = import_folder(plain_volume, folder).dataset
    info = report.dataset
    assert (info.content_digest, info.packing_digest) == (
        expected.content_digest,
        expected.packing_digest,
    )
    with dlfs.open(volume) as opened:
        assert not [*opened.verify()]
        assert not opened.unfinished()


@pytest.mark.parametrize("start", [None, start_by_tcp], ids=["processes", "joined"])
def test_workers_make_the_same_dataset(
    target: ScriptedTarget, tmp_path: Path, start: StartLauncher | None
) -> None:
    folder, uri = make_folder(tmp_path / "folder"), target.uri(**SHORT)
    dlfs.format_volume(uri, chunk_bytes=CHUNK_BYTES)
    report = import_folder(uri, folder, WorkersOptions(2, start=start))
    check_equal(uri, report, folder, tmp_path / "plain.img")


@pytest.mark.parametrize("number", range(STOPS))
def test_a_worker_is_stopped_past_its_deadline_and_continued(
    target: ScriptedTarget, tmp_path: Path, number: int
) -> None:
    folder, uri = make_folder(tmp_path / "folder"), target.uri(**SHORT)
    dlfs.format_volume(uri, chunk_bytes=CHUNK_BYTES)
    over = threading.Event()

    def stop_and_continue() -> None:
        drawn = random.Random(number)
        while not over.wait(0.5 + drawn.random()):
            if found := children(os.getpid()):
                pid = drawn.choice(found)
                os.kill(pid, signal.SIGSTOP)
                over.wait(TIMES.valid_s + TIMES.drain_s + 2)
                os.kill(pid, signal.SIGCONT)
                return

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        report = import_folder(uri, folder, WorkersOptions(2, start=start_by_tcp))
    finally:
        over.set()
        thread.join()
    check_equal(uri, report, folder, tmp_path / "plain.img")
