"""Children that are forked while other threads open, load, read and close.

The first test stops a thread at every lock that it takes, and at every lock that it releases, and
forks there. The second forks at random moments, under several threads. The child uses the objects
that these threads share, and must read what was written, or refuse with an error of this package.

DLFS_FORKS is the number of random forks, DLFS_FORK_SECONDS the longest time of a child: what hangs,
hangs for ever, so the default is generous. DLFS_FORK_SEED repeats a run.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import dlfs
from dlfs.base.forks import Lock
from dlfs.base.units import KIB, MIB
from tests.service.serving import Service
from tests.support.forked import run_forked
from tests.support.nvme import DEFAULT_NQN, Namespace, ScriptedTarget, Subsystem

# Python 3.12 warns of any fork of a process with threads; here such forks are under test.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.timeout(1200),
]

CHILD_SECONDS = float(os.environ.get("DLFS_FORK_SECONDS", "60"))
FORKS = int(os.environ.get("DLFS_FORKS", "12"))
COUNT = 120
MEMORY_BYTES = 2 * MIB
KINDS = ["file", "threads", "nvme", "service"]


def value_of(number: int) -> dict[str, Any]:
    return {"image": random.Random(number).randbytes(3000 + number), "caption": f"it is {number}"}


PATHS = [b"class%d/%04d" % (n // 40, n) for n in range(COUNT)]


class World:
    """A volume with one dataset, and the objects that the threads of a test share.

    Attributes:
        volume, dataset, batch, view, epoch: objects that other threads may be using, or None.
    """

    def __init__(self, open_volume: Callable[[], dlfs.Volume]) -> None:
        self._open = open_volume
        self.clear()

    def clear(self) -> None:
        self.volume: dlfs.Volume | None = None
        self.dataset: dlfs.Dataset | None = None
        self.batch: dlfs.Batch | None = None
        self.view: dlfs.DatasetView | None = None
        self.epoch: dlfs.Epoch | None = None

    def open(self) -> dlfs.Volume:
        self.volume = volume = self._open()
        return volume

    def run(self) -> None:
        """Open, load and read everything once, and close it."""
        with self.open() as volume:
            self.dataset = dataset = volume.dataset("d")
            self.view = view = dlfs.concat([dataset, dataset])
            self.batch = batch = dataset.read([1, 2])
            assert dataset.paths() == PATHS
            assert dataset.column("number").tolist() == list(range(COUNT))
            assert dataset.read([3], fields=["caption"])["caption"] == ["it is 3"]
            assert dataset.directory.largest_bytes > 3000
            self.epoch = epoch = dataset.batches(16, seed=1)
            assert next(epoch).indices.size == 16
            assert len(view.read([0, COUNT])) == 2
            volume.refresh()
            del batch
            epoch.close()
            dataset.close()

    # ---- what a child does ---------------------------------------------------------------------

    def use(self) -> None:
        """Use what is there as a program does; errors other than a refusal propagate."""
        for step in (self._use_epoch, self._use_batch, self._use_dataset, self._use_view):
            with suppress(dlfs.ClosedError):
                step()
        with suppress(dlfs.ClosedError):
            if self.volume is not None:
                assert [info.name for info in self.volume.datasets()] == ["d"]
                self.volume.refresh()
        with suppress(dlfs.ClosedError):
            if self.dataset is not None:
                assert self.dataset.paths() == PATHS
        for one in (self.epoch, self.dataset, self.volume):
            if one is not None:
                one.close()
        with self._open() as volume, volume.dataset("d") as dataset:
            assert dataset.sample(5) == value_of(5)

    def _use_dataset(self) -> None:
        dataset = self.dataset
        if dataset is None:
            return
        assert dataset.paths() == PATHS
        assert dataset.sample(7) == value_of(7)
        assert dataset.column("number").tolist() == list(range(COUNT))
        assert dataset.read([9], fields=["caption"])["caption"] == ["it is 9"]
        assert dataset.directory.largest_bytes > 3000
        batch = next(dataset.batches(8, seed=2))
        images = [bytes(image) for image in batch["image"]]
        assert images == [value_of(index)["image"] for index in batch.indices.tolist()]

    def _use_batch(self) -> None:
        if self.batch is not None:
            assert [bytes(image) for image in self.batch["image"]] == [
                value_of(number)["image"] for number in (1, 2)
            ]

    def _use_view(self) -> None:
        if self.view is not None:
            assert [str(text) for text in self.view.read([4, COUNT + 4])["caption"]] == [
                "it is 4"
            ] * 2

    def _use_epoch(self) -> None:
        if self.epoch is not None:
            with suppress(StopIteration):
                batch = next(self.epoch)
                assert [int(text[6:]) for text in batch["caption"]] == batch.indices.tolist()


def make_volume(uri: str) -> None:
    dlfs.format_volume(uri, chunk_bytes=64 * KIB)
    with dlfs.open(uri) as volume, volume.writer("d") as writer:
        for number, path in enumerate(PATHS):
            writer.add(path, value_of(number), attributes={"number": number})


@contextmanager
def served(kind: str, folder: Path) -> Iterator[Callable[[], dlfs.Volume]]:
    """Yield what opens a volume of a kind."""
    if kind == "nvme":
        with ScriptedTarget([Subsystem(DEFAULT_NQN, [Namespace(24 * MIB, block_bytes=4096)])]) as t:
            make_volume(t.uri())
            uri = t.uri(timeout_ms=20000, connect_ms=20000, reconnect_ms=20000)
            yield lambda: dlfs.open(uri, memory_bytes=MEMORY_BYTES)
        return
    path = folder / "volume.img"
    with path.open("wb") as file:
        file.truncate(24 * MIB)
    make_volume(str(path))
    if kind != "service":
        engine: Any = "auto" if kind == "file" else "threads"
        yield lambda: dlfs.open(str(path), memory_bytes=MEMORY_BYTES, engine=engine)
        return
    service = Service([str(path)], folder / "s.sock")
    try:
        service.wait_ready()
        yield lambda: dlfs.connect(service.uri, timeout_s=60)
    finally:
        service.close()


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with served(request.param, tmp_path) as open_volume:
        yield World(open_volume)


def fork(use: Callable[[], None], where: str) -> None:
    """Run something in a child, which must end in time and without an error."""

    def child() -> None:
        faulthandler.dump_traceback_later(CHILD_SECONDS, exit=True, file=sys.__stderr__)
        use()

    code = run_forked(child)
    assert code == 0, f"a child that was forked {where} ended with {code}"


# ---- at every lock -------------------------------------------------------------------------------


class Stops:
    """Stops a thread whenever it has taken a lock, or is about to release one.

    Args:
        monkeypatch: changes the class of locks until the test ends.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: SimpleQueue[str | None] = SimpleQueue()
        self.go_on: SimpleQueue[None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        enter, leave, acquire = Lock.__enter__, Lock.__exit__, Lock.acquire

        def stop(what: str) -> None:
            if threading.current_thread() is self.thread:
                caller = sys._getframe(2)
                name = caller.f_code.co_filename.partition("dlfs/")[2]
                self.places.put(f"{what} at {name}:{caller.f_lineno}")
                self.go_on.get()

        def take(lock: Lock, *arguments: Any, **named: Any) -> bool:
            taken = acquire(lock, *arguments, **named)
            stop("with a lock taken")
            return taken

        def begin(lock: Lock) -> bool:
            taken = enter(lock)
            stop("with a lock taken")
            return taken

        def end(lock: Lock, *exception: Any) -> None:
            stop("with a lock still held")
            leave(lock, *exception)
            stop("with a lock just released")

        monkeypatch.setattr(Lock, "acquire", take)
        monkeypatch.setattr(Lock, "__enter__", begin)
        monkeypatch.setattr(Lock, "__exit__", end)

    def run(self, work: Callable[[], None]) -> Iterator[str]:
        """Run something in a thread, and yield where it stops."""
        problems: list[BaseException] = []

        def main() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001
                problems.append(error)
            finally:
                self.places.put(None)

        self.thread = threading.Thread(target=main)
        self.thread.start()
        try:
            while (place := self.places.get()) is not None:
                yield place
                self.go_on.put(None)
        finally:
            thread, self.thread = self.thread, None
            self.go_on.put(None)
            thread.join()
        assert problems == []


@pytest.mark.parametrize("world", sorted({*KINDS} - {"threads"}), indirect=True)
def test_a_child_reads_wherever_another_thread_holds_a_lock(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = Stops(monkeypatch)
    seen: dict[str, int] = {}
    for place in stops.run(world.run):
        seen[place] = seen.get(place, 0) + 1
        if seen[place] <= 2:  # the same line of code with the same state, over and over
            fork(world.use, place)
    assert len(seen) > 20
    held = {place.partition(" at ")[2].partition(":")[0] for place in seen}
    assert {"dataset/dataset.py", "directory/frozen.py", "attributes/table.py"} <= held


# ---- at random moments ---------------------------------------------------------------------------


class Others:
    """Threads that open, load, read and close the objects of a world until they are ended."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self.problems: list[BaseException] = []
        self._world = world
        self._draw = draw
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=[work])
            for work in (world.run, self._read, self._close)
        ]

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._ended.is_set() and not self.problems:
            try:
                work()
            except dlfs.ClosedError:
                pass  # another thread closes
            except BaseException as error:  # noqa: BLE001
                self.problems.append(error)

    def _read(self) -> None:
        dataset = self._world.dataset
        if dataset is not None:
            assert dataset.paths(0, 3) == PATHS[:3]
            assert dataset.sample(11) == value_of(11)
            self._world.batch = dataset.read([1, 2])

    def _close(self) -> None:
        self.wait(self._draw.random() / 20)
        dataset = self._world.dataset
        if dataset is not None and self._draw.random() < 0.2:
            dataset.close()

    def wait(self, seconds: float) -> None:
        self._ended.wait(seconds)

    def __enter__(self) -> Others:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_a_child_reads_whenever_it_is_forked(world: World) -> None:
    seed = int(os.environ.get("DLFS_FORK_SEED") or random.randrange(1 << 32))
    print(f"DLFS_FORK_SEED={seed}")
    draw = random.Random(seed)
    with Others(world, random.Random(seed + 1)) as others:
        for number in range(FORKS):
            others.wait(draw.random() ** 3 / 10)
            fork(world.use, f"as the {number + 1}th at random, seed {seed}")
            assert others.problems == []
    assert others.problems == []
