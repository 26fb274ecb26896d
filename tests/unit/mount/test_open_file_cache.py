"""The open-file cache, with a real dataset in memory and a real trio loop."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.connection.connection import DatasetSession
from dlfs.dataset.dataset import Dataset
from dlfs.errors import ClosedError, StaleError
from dlfs.mount.open_file_cache import (
    EARLY_PAUSE,
    EARLY_SECONDS,
    LARGE_READS_MAX,
    PROMPT_PAUSE,
    SMALL_BYTES_MAX,
    OpenFileCache,
    OpenSample,
)

CHUNK_BYTES = 256 * KIB
SIZES = [0, 1, 1000, 1000, 1000, 5000, SMALL_BYTES_MAX + 1]


def content(index: int) -> bytes:
    return bytes([index]) * SIZES[index]


@pytest.fixture
def dataset() -> Iterator[Dataset]:
    dlfs.format_volume("mem:cache?size=16MiB", force=True)
    with dlfs.open("mem:cache") as volume:
        with volume.writer("d") as writer:
            for index in range(len(SIZES)):
                writer.add(b"%d" % index, content(index))
        with volume.dataset("d") as found:
            yield found


class Pins:
    """Counts pins of a dataset."""

    count = 0

    def pin(self) -> None:
        self.count += 1

    def unpin(self) -> None:
        self.count -= 1


class Setup:
    """A cache with samples of one dataset."""

    def __init__(self, cache: OpenFileCache, dataset: Dataset) -> None:
        self.cache = cache
        self.dataset = dataset
        self.pins = Pins()

    def open(self, index: int) -> OpenSample:
        return self.cache.open(
            index, self.pins, self.dataset, index, SIZES[index], chunk_bytes=CHUNK_BYTES
        )

    async def read(self, sample: OpenSample) -> bytes:
        with trio.fail_after(20):
            return await self.cache.read(sample)

    async def wait_until_unused(self) -> None:
        with trio.fail_after(20):
            while self.pins.count or self.cache.cached_bytes:
                await trio.sleep(0)


def run(
    dataset: Dataset, body: Callable[[Setup], Awaitable[None]], budget_bytes: int = MIB
) -> None:
    async def main() -> None:
        cache = OpenFileCache(budget_bytes=budget_bytes)
        try:
            setup = Setup(cache, dataset)
            await body(setup)
            await setup.wait_until_unused()
        finally:
            await trio.to_thread.run_sync(cache.close)

    trio.run(main)


@pytest.mark.parametrize("budget_bytes", [0, 1, 1500, 6000, 16 * MIB])
def test_samples_are_read_with_any_budget(dataset: Dataset, budget_bytes: int) -> None:
    async def body(setup: Setup) -> None:
        samples = [setup.open(index) for index in range(len(SIZES))]
        for _ in range(2):
            for index, sample in enumerate(samples):
                assert await setup.read(sample) == content(index)
                assert setup.cache.cached_bytes <= max(budget_bytes, max(SIZES))
        for sample in samples:
            setup.cache.release(sample)

    run(dataset, body, budget_bytes)


@pytest.mark.parametrize("budget_bytes", [1500, 16 * MIB])
def test_any_range_of_a_sample_whatever_the_budget(dataset: Dataset, budget_bytes: int) -> None:
    """A sample larger than a chunk and a MiB is read in ranges; it is not cached."""
    large = len(SIZES) - 1

    async def body(setup: Setup) -> None:
        sample = setup.open(large)
        with trio.fail_after(20):
            for offset in (0, 1, 4096, SIZES[large] - 5, SIZES[large], SIZES[large] + 9):
                for size in (0, 1, 5000, 2 * SIZES[large]):
                    found = await setup.cache.read_range(sample, offset, size)
                    assert bytes(found) == content(large)[offset : offset + size]
        assert setup.cache.cached_bytes == 0
        setup.cache.release(sample)

    run(dataset, body, budget_bytes)


def test_many_at_once_in_a_small_budget(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        async def reader(start: int) -> None:
            for step in range(30):
                index = (start + step) % len(SIZES)
                sample = setup.open(index)
                assert await setup.read(sample) == content(index)
                setup.cache.release(sample)

        async with trio.open_nursery() as nursery:
            for start in range(12):
                nursery.start_soon(reader, start)

    run(dataset, body, 2500)


def test_handles_share_a_sample(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        first, second = setup.open(5), setup.open(5)
        assert first is second
        assert setup.pins.count == 1
        assert await setup.read(first) is await setup.read(second)
        setup.cache.release(first)
        assert setup.cache.cached_bytes == SIZES[5]
        setup.cache.release(second)
        assert setup.cache.cached_bytes == 0

    run(dataset, body)


@pytest.mark.parametrize("index", [5, 6])
def test_the_bytes_of_a_closed_sample_are_freed_without_a_collector(
    dataset: Dataset, index: int
) -> None:
    async def body(setup: Setup) -> None:
        sample = setup.open(index)
        assert await setup.read(sample) == content(index)
        assert sample.load is not None
        load = weakref.ref(sample.load)
        setup.cache.release(sample)
        with trio.fail_after(20):
            while load() is not None:  # its task may not have ended yet
                await trio.sleep(0)

    gc.disable()
    try:
        run(dataset, body)
    finally:
        gc.enable()


def test_closed_while_being_read(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        for _ in range(50):
            setup.cache.release(setup.open(2))  # the dataset is unpinned when the read ends
            again = setup.open(2)
            assert await setup.read(again) == content(2)
            setup.cache.release(again)

    run(dataset, body)


def test_nothing_is_read_ahead_when_the_kernel_has_it(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        for _ in range(10):
            setup.cache.release(setup.open(2))
        await setup.wait_until_unused()
        sample = setup.open(2)
        assert setup.cache.cached_bytes == 0
        assert await setup.read(sample) == content(2)
        setup.cache.release(sample)

    run(dataset, body)


def test_errors_are_raised_and_not_cached(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        sample = setup.open(2)
        assert await setup.read(sample) == content(2)
        dataset.close()
        assert await setup.read(sample) == content(2)
        other = setup.open(3)
        for _ in range(2):
            with pytest.raises(ClosedError):
                await setup.read(other)
            assert setup.cache.cached_bytes == SIZES[2]
        setup.cache.release(sample)
        setup.cache.release(other)

    run(dataset, body)


class NothingAtOnce:
    """The session of a dataset and its reader, which has no sample at once: threads read all."""

    def __init__(self) -> None:
        self.reader = self

    def get_if_cached(self, _index: int) -> bytes | None:
        return None

    get_if_prompt = get_if_cached


class Broken:
    """A dataset whose reads fail with an error that no read should raise."""

    session = present_session = cast("DatasetSession", NothingAtOnce())

    def __getitem__(self, _index: int, /) -> bytes:
        raise RuntimeError("a planted defect")


def test_an_unexpected_error_ends_its_reads_only(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        broken = setup.cache.open(2, setup.pins, Broken(), 2, SIZES[2], chunk_bytes=CHUNK_BYTES)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a planted defect"):
                await setup.read(broken)
        sound = setup.open(3)
        assert await setup.read(sound) == content(3)
        setup.cache.release(broken)
        setup.cache.release(sound)

    run(dataset, body)


class Slow:
    """A dataset on a device that completes reads when the test says so."""

    present_session: DatasetSession | None

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.session = self.present_session = cast("DatasetSession", NothingAtOnce())
        self.completes = threading.Event()
        self.reads = 0

    def __getitem__(self, index: int, /) -> bytes:
        self.reads += 1
        assert self.completes.wait(20)
        return self._dataset[index]


class Moods(NothingAtOnce):
    """A reader whose devices send samples at once, or not."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        self.dataset = dataset
        self.prompt = True
        self.asked = 0

    def get_if_prompt(self, index: int) -> bytes | None:
        self.asked += 1
        return self.dataset[index] if self.prompt else None


def test_threads_read_while_the_devices_send_nothing_at_once(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        moods, slow = Moods(dataset), Slow(dataset)
        slow.session = slow.present_session = cast("DatasetSession", moods)
        slow.completes.set()

        async def read_one() -> None:
            sample = setup.cache.open(2, setup.pins, slow, 2, SIZES[2], chunk_bytes=CHUNK_BYTES)
            assert await setup.read(sample) == content(2)
            setup.cache.release(sample)

        await read_one()
        assert (moods.asked, slow.reads) == (1, 0)
        moods.prompt = False
        for _ in range(1 + PROMPT_PAUSE):
            await read_one()
        assert (moods.asked, slow.reads) == (2, 1 + PROMPT_PAUSE)
        moods.prompt = True
        await read_one()
        assert (moods.asked, slow.reads) == (3, 1 + PROMPT_PAUSE)

    run(dataset, body)


class Early(Moods):
    """A reader that counts the reads that began with a look-up, and how they ended."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self.begun: list[int] = []
        self.got: list[int] = []
        self.cancelled: list[int] = []

    def begin(self, index: int) -> EarlyRead:
        self.begun.append(index)
        return EarlyRead(self, index)


class EarlyRead:
    """A read that ends once."""

    def __init__(self, reader: Early, index: int) -> None:
        self._reader: Early | None = reader
        self._index = index

    def _end(self) -> Early:
        reader, self._reader = self._reader, None
        assert reader is not None
        return reader

    def get(self, length_bytes: int) -> bytes | None:
        reader = self._end()
        assert length_bytes == SIZES[self._index]
        reader.got.append(self._index)
        return reader.dataset[self._index] if reader.prompt else None

    def cancel(self) -> None:
        self._end().cancelled.append(self._index)


class EarlySource(Slow):
    """A dataset whose reads begin with look-ups."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self.early = Early(dataset)
        self.session = self.present_session = cast("DatasetSession", self.early)
        self.completes.set()

    def look_up(self, setup: Setup, index: int) -> None:
        setup.cache.expect(index, setup.pins, self, index, SIZES[index])

    async def read(self, setup: Setup, index: int) -> None:
        sample = setup.cache.open(
            index, setup.pins, self, index, SIZES[index], chunk_bytes=CHUNK_BYTES
        )
        assert await setup.read(sample) == content(index)
        setup.cache.release(sample)


def test_a_file_that_is_looked_up_is_read_meanwhile(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        source = EarlySource(dataset)
        for index in (2, 3, 2):
            source.look_up(setup, index)
            await source.read(setup, index)
        assert source.early.begun == source.early.got == [2, 3, 2]
        assert (source.early.asked, source.reads) == (0, 0)
        source.early.prompt = False
        source.look_up(setup, 4)
        await source.read(setup, 4)  # by a thread
        assert source.early.got == [2, 3, 2, 4]
        assert (source.early.asked, source.reads) == (0, 1)
        source.look_up(setup, 5)  # the devices are slow
        assert source.early.begun == [2, 3, 2, 4]

    run(dataset, body)


def test_a_dataset_that_has_to_be_opened_again_is_opened_by_a_thread(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        source = EarlySource(dataset)
        source.present_session = None
        source.look_up(setup, 2)
        await source.read(setup, 2)
        assert (source.early.begun, source.early.asked, source.reads) == ([], 0, 1)

    run(dataset, body)


def test_a_program_that_reads_another_file_has_left_the_one_looked_up(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        source = EarlySource(dataset)
        source.look_up(setup, 2)
        await source.read(setup, 3)
        assert (source.early.cancelled, source.early.got) == ([2], [])
        assert setup.pins.count == 0

    run(dataset, body)


def test_what_is_not_read_when_it_is_looked_up(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        source = EarlySource(dataset)
        opened = setup.cache.open(2, setup.pins, source, 2, SIZES[2], chunk_bytes=CHUNK_BYTES)
        for index in (0, 2, 6):  # empty, open, large
            source.look_up(setup, index)
        assert source.early.begun == []
        setup.cache.release(opened)
        for _ in range(10):  # files that are opened and not read
            setup.cache.release(setup.open(3))
        source.look_up(setup, 2)
        assert source.early.begun == []

    run(dataset, body)


def test_reads_in_vain_are_given_up_and_become_rare(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        source = EarlySource(dataset)
        for step in range(2 * (1 + EARLY_PAUSE)):
            source.look_up(setup, 2 + step % 2)
        assert len(source.early.begun) == 2
        assert source.early.cancelled == source.early.begun
        assert setup.pins.count == 0

    run(dataset, body)


@pytest.mark.parametrize("end", ["withdraw", "close"])
def test_an_early_read_ends_with_its_dataset_and_the_mount(dataset: Dataset, end: str) -> None:
    async def body(setup: Setup) -> None:
        source = EarlySource(dataset)
        source.look_up(setup, 2)
        assert setup.pins.count == 1
        setup.cache.withdraw(Pins())  # another one
        assert source.early.cancelled == []
        if end == "withdraw":
            setup.cache.withdraw(setup.pins)
        else:
            setup.cache.give_up_early_read()
        assert source.early.cancelled == [2]
        assert setup.pins.count == 0

    run(dataset, body)


def test_an_early_read_that_no_program_asks_for_is_given_up(dataset: Dataset) -> None:
    async def main() -> None:
        cache = OpenFileCache(budget_bytes=MIB)
        setup, source = Setup(cache, dataset), EarlySource(dataset)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.give_up_early_reads)
            await trio.sleep(EARLY_SECONDS / 2)
            source.look_up(setup, 2)
            await trio.sleep(EARLY_SECONDS)
            assert source.early.cancelled == []
            await trio.sleep(EARLY_SECONDS)
            assert source.early.cancelled == [2]
            nursery.cancel_scope.cancel()
        cache.close()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_requests_of_one_sample_share_a_read(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        slow = Slow(dataset)
        sample = setup.cache.open(2, setup.pins, slow, 2, SIZES[2], chunk_bytes=CHUNK_BYTES)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(setup.read, sample)
            await wait_all_tasks_blocked()
            assert setup.cache.cached_bytes == SIZES[2]
            slow.completes.set()
        assert slow.reads == 1
        assert await setup.read(sample) == content(2)
        setup.cache.release(sample)

    run(dataset, body)


def test_large_reads_do_not_delay_small_ones(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        slow = Slow(dataset)
        large = [
            setup.cache.open(inode, setup.pins, slow, 6, SIZES[6], chunk_bytes=CHUNK_BYTES)
            for inode in range(100, 101 + LARGE_READS_MAX)
        ]
        small = setup.open(2)
        async with trio.open_nursery() as nursery:
            for sample in large:
                nursery.start_soon(setup.read, sample)
            with trio.fail_after(20):
                while slow.reads < LARGE_READS_MAX:
                    await trio.sleep(0)
            assert await setup.read(small) == content(2)
            slow.completes.set()
        for sample in (*large, small):
            setup.cache.release(sample)

    run(dataset, body, 16 * MIB)


@pytest.mark.parametrize("index", [0, 5, 6])
def test_files_of_a_withdrawn_dataset_are_stale(dataset: Dataset, index: int) -> None:
    async def body(setup: Setup) -> None:
        read, unread = setup.open(index), setup.open(4)
        assert await setup.cache.read_range(read, 0, 10) == content(index)[:10]
        setup.cache.withdraw(setup.pins)
        await setup.wait_until_unused()
        for sample in (read, unread):
            with pytest.raises(StaleError, match="not in the mount any more"):
                await setup.cache.read_range(sample, 0, 10)
            setup.cache.release(sample)
        again = setup.open(index)  # of a dataset that was mounted again
        assert await setup.cache.read_range(again, 0, 10) == content(index)[:10]
        setup.cache.release(again)

    run(dataset, body)


def test_a_read_under_way_when_its_dataset_is_withdrawn_ends(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = threading.Event(), threading.Event()
    read_into = dataset.read_into

    def wait_and_read(index: int, buffer: bytearray, *, offset_bytes: int) -> int:
        began.set()
        assert go.wait(60)
        return read_into(index, buffer, offset_bytes=offset_bytes)

    monkeypatch.setattr(dataset, "read_into", wait_and_read)

    async def body(setup: Setup) -> None:
        sample = setup.open(6)
        results: list[bytes | memoryview] = []

        async def read() -> None:
            results.append(await setup.cache.read_range(sample, 0, SIZES[6]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.to_thread.run_sync(began.wait)
            setup.cache.withdraw(setup.pins)
            assert setup.pins.count == 1
            go.set()
            await setup.wait_until_unused()
        assert results == [content(6)]
        setup.cache.release(sample)

    run(dataset, body)
