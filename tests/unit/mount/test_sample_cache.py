"""The cache of the pyfuse3 server, with a real dataset in memory and a real trio loop."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import dlfs
from dlfs.base.units import MIB
from dlfs.dataset.dataset import Dataset
from dlfs.errors import DeviceLostError
from dlfs.mount.sample_cache import ENTRY_BYTES, READS_MAX, SampleCache
from tests.support.volumes import write_dataset

SIZES = [0, 1, 1000, 1000, 1000, 5000, MIB + 1]


def content(index: int) -> bytes:
    return bytes([index]) * SIZES[index]


@pytest.fixture
def dataset() -> Iterator[Dataset]:
    dlfs.format_volume("mem:cache?size=16MiB", force=True)
    with dlfs.open("mem:cache") as volume:
        write_dataset(volume, "d", {b"%d" % index: content(index) for index in range(len(SIZES))})
        with volume.dataset("d") as found:
            yield found


class Counted:
    """A dataset that counts the reads of samples, and may fail them or let them wait."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.reads: list[int] = []
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def __getitem__(self, index: int, /) -> bytes:
        self.reads.append(index)
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        return self._dataset[index]


class Setup:
    """A cache with samples of one dataset."""

    def __init__(self, dataset: Dataset, budget_bytes: int) -> None:
        self.cache = SampleCache(budget_bytes=budget_bytes)
        self.source = Counted(dataset)

    async def read(self, index: int) -> bytes:
        with trio.fail_after(20):
            return await self.cache.read(index, cast("Dataset", self.source), index, SIZES[index])


def run(
    dataset: Dataset, body: Callable[[Setup], Awaitable[None]], budget_bytes: int = MIB
) -> None:
    async def main() -> None:
        await body(Setup(dataset, budget_bytes))

    trio.run(main)


@pytest.mark.parametrize("budget_bytes", [0, 1, 1500, 9000, 16 * MIB])
def test_samples_are_read_with_any_budget(dataset: Dataset, budget_bytes: int) -> None:
    async def body(setup: Setup) -> None:
        for _ in range(2):
            for index in range(len(SIZES)):
                assert await setup.read(index) == content(index)
                most = max(budget_bytes, SIZES[index] + ENTRY_BYTES)
                assert setup.cache.cached_bytes <= most

    run(dataset, body, budget_bytes)


def test_the_least_recently_used_copy_is_evicted(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        for index in (2, 3, 2, 4, 2, 3):
            assert await setup.read(index) == content(index)
        assert setup.source.reads == [2, 3, 4, 3]

    run(dataset, body, 2 * (1000 + ENTRY_BYTES))


@pytest.mark.parametrize("offset", [0, 1, 4096, MIB - 5])
def test_ranges_of_a_large_sample_are_not_copied(dataset: Dataset, offset: int) -> None:
    async def body(setup: Setup) -> None:
        with trio.fail_after(20):
            found = await setup.cache.read_range(dataset, 6, offset, 5)
        assert found == content(6)[offset : offset + 5]
        assert setup.cache.cached_bytes == 0

    run(dataset, body)


def test_many_at_once_in_a_small_budget(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        async def reader(start: int) -> None:
            for step in range(30):
                index = (start + step) % len(SIZES)
                assert await setup.read(index) == content(index)

        async with trio.open_nursery() as nursery:
            for start in range(12):
                nursery.start_soon(reader, start)

    run(dataset, body, 2500)


def test_requests_for_a_sample_share_its_read(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        setup.source.go.clear()
        async with trio.open_nursery() as nursery:
            for _ in range(2 * READS_MAX):
                nursery.start_soon(setup.read, 5)
            await wait_all_tasks_blocked()
            setup.source.go.set()
        assert setup.source.reads == [5]

    run(dataset, body)


def test_errors_are_raised_and_not_cached(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        assert await setup.read(2) == content(2)
        setup.source.error = DeviceLostError("gone")
        assert await setup.read(2) == content(2)
        for _ in range(2):
            with pytest.raises(DeviceLostError):
                await setup.read(3)
        setup.source.error = None
        assert await setup.read(3) == content(3)
        assert setup.source.reads == [2, 3, 3, 3]

    run(dataset, body)


def test_a_request_that_is_cancelled_does_not_wait_for_its_read(dataset: Dataset) -> None:
    async def body(setup: Setup) -> None:
        setup.source.go.clear()
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(setup.read, 5)
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            setup.source.go.set()
        assert await setup.read(5) == content(5)

    run(dataset, body)
