"""Sessions that a forked child opens: one for each object, however many threads use it at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import ClosedError
from tests.support.forked import run_forked
from tests.support.volumes import new_volume, write_dataset

# Python 3.12 warns of any fork of a process with threads; here such a fork is under test.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[dlfs.Volume]:
    path = new_volume(str(tmp_path / "volume"), size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(path) as opened:
        write_dataset(opened, "d", {str(number): bytes([number]) * 100 for number in range(10)})
        yield opened


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Watched:
    """A connection that counts what is opened, and lets a second opening overtake the first."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._both = threading.Event()
        self.count = 0
        self.uri = connection.uri

    def _open(self, open_session: Callable[..., Any], *arguments: Any) -> Any:
        self.count += 1
        if self.count == 2:
            self._both.set()
        self._both.wait(0.5)  # without a second opening, which is right, this is all of the wait
        return open_session(*arguments)

    def open_volume(self) -> Any:
        return self._open(self._connection.open_volume)

    def open_dataset(self, *arguments: Any) -> Any:
        return self._open(self._connection.open_dataset, *arguments)


def in_two_threads(use: Callable[[], object]) -> list[object]:
    """Return what two threads get that begin to use something at once."""
    ready = threading.Barrier(2)
    results: list[object] = []

    def work() -> None:
        ready.wait()
        results.append(use())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("kind", ["volume", "dataset"])
def test_two_threads_of_a_child_open_one_session(volume: dlfs.Volume, kind: str) -> None:
    with volume["d"] as dataset:
        expected = volume.datasets() if kind == "volume" else dataset[5]
        before = open_files()

        def use() -> None:
            used: Any = volume if kind == "volume" else dataset
            used._connection = watched = Watched(used._connection)
            read: Callable[[], object] = volume.datasets if used is volume else lambda: dataset[5]
            assert in_two_threads(read) == [expected] * 2
            assert watched.count == 1
            used.close()
            assert open_files() <= before  # those of earlier tests may have been closed

        assert run_forked(use) == 0


def test_threads_of_a_child_never_get_the_parents_session(volume: dlfs.Volume) -> None:
    """Another thread may leave the session to the parent between any two reads of this one."""
    with volume["d"] as dataset:
        parents = dataset.session

        def use() -> None:
            owner = dataset._owner

            class Overtaken:
                @staticmethod
                def is_current() -> bool:
                    dataset._owner = owner
                    current = owner.is_current()
                    assert dataset[3] == bytes([3]) * 100  # opens the session of this process
                    return current

            dataset._owner = Overtaken()  # type: ignore[assignment]
            assert dataset.present_session is not parents
            assert dataset.session is not parents

        assert run_forked(use) == 0


def test_a_volume_closed_while_a_child_opens_it_stays_closed(volume: dlfs.Volume) -> None:
    inner = volume._connection
    before = open_files()

    class ClosedMeanwhile:
        uri = inner.uri

        def open_volume(self) -> object:
            volume.close()  # as another thread may
            return inner.open_volume()

    def use() -> None:
        volume._connection = ClosedMeanwhile()  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(ClosedError):
                volume.datasets()
        assert open_files() <= before  # those of earlier tests may have been closed

    assert run_forked(use) == 0
