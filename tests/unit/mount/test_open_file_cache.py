"""Samples held for open files: against a real dataset in memory, in a real trio loop."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import dlfs
from dlfs.dataset import Dataset
from dlfs.errors import ClosedError, LimitError
from dlfs.mount import open_file_cache as held
from dlfs.mount.open_file_cache import (
    SAMPLE_BYTES_MAX,
    SMALL_BYTES_MAX,
    Fetch,
    HeldSamples,
    OpenSample,
    ReadThreads,
    read_into,
)
from dlfs.reader import Batch
from dlfs.units import MIB

SIZES = [0, 1, 1000, 1000, 1000, 5000, SMALL_BYTES_MAX + 1]


def content(index: int) -> bytes:
    return bytes([index]) * SIZES[index]


@pytest.fixture
def dataset() -> Iterator[Dataset]:
    dlfs.format_volume("mem:held?size=16MiB", force=True)
    with dlfs.open("mem:held") as volume:
        with volume.writer("d") as writer:
            for index in range(len(SIZES)):
                writer.add(b"%d" % index, content(index))
        with volume.dataset("d") as found:
            yield found


class Slot:
    """Counts holds."""

    held = 0

    def hold(self) -> None:
        self.held += 1

    def let_go(self) -> None:
        self.held -= 1


class Bench:
    """Held samples of one dataset."""

    def __init__(self, held: HeldSamples, dataset: Dataset) -> None:
        self.held = held
        self.dataset = dataset
        self.slot = Slot()

    def open(self, index: int) -> OpenSample:
        return self.held.open(index, self.slot, self.dataset, index, SIZES[index])

    async def read(self, sample: OpenSample) -> bytes:
        with trio.fail_after(20):
            return await self.held.read(sample)

    async def settle(self) -> None:
        with trio.fail_after(20):
            while self.slot.held or self.held.held_bytes:
                await trio.sleep(0)


def run(
    dataset: Dataset, body: Callable[[Bench], Awaitable[None]], budget_bytes: int = MIB
) -> None:
    async def main() -> None:
        threads = ReadThreads(trio.lowlevel.current_trio_token())
        try:
            bench = Bench(HeldSamples(threads, budget_bytes=budget_bytes), dataset)
            await body(bench)
            await bench.settle()
        finally:
            threads.close()

    trio.run(main)


@pytest.mark.parametrize("budget_bytes", [0, 1, 1500, 6000, 16 * MIB])
def test_reads_whatever_the_budget(dataset: Dataset, budget_bytes: int) -> None:
    async def body(bench: Bench) -> None:
        samples = [bench.open(index) for index in range(len(SIZES))]
        for _ in range(2):
            for index, sample in enumerate(samples):
                assert await bench.read(sample) == content(index)
                assert bench.held.held_bytes <= max(budget_bytes, max(SIZES))
        for sample in samples:
            bench.held.release(sample)

    run(dataset, body, budget_bytes)


@pytest.mark.parametrize("budget_bytes", [1500, 16 * MIB])
def test_any_range_of_a_sample_whatever_the_budget(dataset: Dataset, budget_bytes: int) -> None:
    """One larger than the budget is verified, and then read part by part; it is not held."""
    large = len(SIZES) - 1

    async def body(bench: Bench) -> None:
        sample = bench.open(large)
        with trio.fail_after(20):
            for offset in (0, 1, 4096, SIZES[large] - 5, SIZES[large], SIZES[large] + 9):
                for size in (0, 1, 5000, 2 * SIZES[large]):
                    found = await bench.held.read_range(sample, offset, size)
                    assert bytes(found) == content(large)[offset : offset + size]
        assert bench.held.held_bytes == (0 if budget_bytes < SIZES[large] else SIZES[large])
        bench.held.release(sample)

    run(dataset, body, budget_bytes)


def test_many_at_once_in_a_small_budget(dataset: Dataset) -> None:
    async def body(bench: Bench) -> None:
        async def reader(start: int) -> None:
            for step in range(30):
                index = (start + step) % len(SIZES)
                sample = bench.open(index)
                assert await bench.read(sample) == content(index)
                bench.held.release(sample)

        async with trio.open_nursery() as nursery:
            for start in range(12):
                nursery.start_soon(reader, start)

    run(dataset, body, 2500)


def test_handles_share_a_sample(dataset: Dataset) -> None:
    async def body(bench: Bench) -> None:
        first, second = bench.open(5), bench.open(5)
        assert first is second
        assert bench.slot.held == 1
        assert await bench.read(first) is await bench.read(second)
        bench.held.release(first)
        assert bench.held.held_bytes == SIZES[5]
        bench.held.release(second)
        assert bench.held.held_bytes == 0

    run(dataset, body)


@pytest.mark.parametrize("index", [5, 6])
def test_the_bytes_of_a_closed_sample_are_freed_without_a_collector(
    dataset: Dataset, index: int
) -> None:
    async def body(bench: Bench) -> None:
        sample = bench.open(index)
        assert await bench.read(sample) == content(index)
        assert sample.fetch is not None
        fetch = weakref.ref(sample.fetch)
        bench.held.release(sample)
        with trio.fail_after(20):
            while fetch() is not None:  # its thread may be about to wait for the next one
                await trio.sleep(0)

    gc.disable()
    try:
        run(dataset, body)
    finally:
        gc.enable()


def test_closed_while_being_read(dataset: Dataset) -> None:
    async def body(bench: Bench) -> None:
        for _ in range(50):
            bench.held.release(bench.open(2))  # the slot is let go when the reading ends
            again = bench.open(2)
            assert await bench.read(again) == content(2)
            bench.held.release(again)

    run(dataset, body)


def test_nothing_is_read_ahead_when_the_kernel_has_it(dataset: Dataset) -> None:
    async def body(bench: Bench) -> None:
        for _ in range(10):
            bench.held.release(bench.open(2))
        await bench.settle()
        sample = bench.open(2)
        assert bench.held.held_bytes == 0
        assert await bench.read(sample) == content(2)
        bench.held.release(sample)

    run(dataset, body)


def test_errors_reach_the_reader_and_are_forgotten(dataset: Dataset) -> None:
    async def body(bench: Bench) -> None:
        sample = bench.open(2)
        assert await bench.read(sample) == content(2)
        dataset.close()
        assert await bench.read(sample) == content(2)
        other = bench.open(3)
        for _ in range(2):
            with pytest.raises(ClosedError):
                await bench.read(other)
            assert bench.held.held_bytes == SIZES[2]
        bench.held.release(sample)
        bench.held.release(other)

    run(dataset, body)


class Slow:
    """A dataset on a device that answers when it is told to."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.answers = threading.Event()

    def read(self, indices: Sequence[int], *, on_error: str = "raise") -> Batch:
        self.answers.wait(20)
        return self._dataset.read(indices, on_error=on_error)

    def __getitem__(self, index: int, /) -> bytes:
        self.answers.wait(20)
        return self._dataset[index]

    def get_kept(self, _index: int) -> bytes | None:
        return None


def open_slow(bench: Bench, slow: Slow, index: int) -> OpenSample:
    return bench.held.open(index, bench.slot, slow, index, SIZES[index])


async def read_slowly(bench: Bench, slow: Slow, sample: OpenSample) -> None:
    """Read a sample whose device answers when all tasks wait, which they can."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.read, sample)
        await wait_all_tasks_blocked()
        assert sample.fetch is not None
        assert sample.fetch.event is not None
        slow.answers.set()
    assert sample.fetch.data == content(sample.index)


def test_the_loop_waits_for_a_lone_sample(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(bench: Bench) -> None:
        slow = Slow(dataset)
        sample = open_slow(bench, slow, 2)
        slow.answers.set()
        assert await bench.read(sample) == content(2)
        assert sample.fetch is not None
        assert sample.fetch.event is None  # nobody had to be woken
        bench.held.release(sample)

    monkeypatch.setattr(held, "PATIENCE_SECONDS", 20)
    run(dataset, body)


def test_the_loop_waits_for_a_moment_only(dataset: Dataset) -> None:
    async def body(bench: Bench) -> None:
        slow = Slow(dataset)
        sample = open_slow(bench, slow, 2)
        await read_slowly(bench, slow, sample)
        bench.held.release(sample)

    run(dataset, body)


def test_the_loop_waits_for_none_of_several(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(bench: Bench) -> None:
        slow = Slow(dataset)
        samples = [open_slow(bench, slow, index) for index in (2, 3)]
        await read_slowly(bench, slow, samples[0])
        for sample in samples:
            bench.held.release(sample)

    monkeypatch.setattr(held, "PATIENCE_SECONDS", 20)
    run(dataset, body)


def test_too_large_to_open(dataset: Dataset) -> None:
    async def body(bench: Bench) -> None:
        with pytest.raises(LimitError, match="at most"):
            bench.held.open(9, bench.slot, dataset, 9, SAMPLE_BYTES_MAX + 1)
        assert bench.slot.held == 0

    run(dataset, body)


def test_batches_give_each_its_own(dataset: Dataset) -> None:
    fetches = [Fetch(dataset, index, lambda _: None) for index in (4, 2, 4, 0)]

    async def main() -> None:
        read_into(dataset, fetches)

    trio.run(main)
    assert [fetch.data for fetch in fetches] == [content(4), content(2), content(4), b""]
