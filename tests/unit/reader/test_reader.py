"""Batches on demand: every sample as written, whatever the layout, memory and faults."""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
import weakref

import numpy as np
import pytest

from dlfs._native.device import NativeDevice
from dlfs.base.units import KIB, MIB
from dlfs.block.memory import MemoryDevice
from dlfs.errors import ChecksumError, ClosedError, DeviceError, DeviceTimeoutError, UsageError
from tests.support.datasets import random_samples
from tests.support.devices import Faults, FaultyNativeDevice
from tests.support.forked import run_forked
from tests.support.waiting import wait_for
from tests.unit.reader.conftest import batches_of

CHUNK_BYTES = 16 * KIB


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("fragment_chunks", [0, 2])
@pytest.mark.parametrize("memory_bytes", [64 * KIB, 512 * KIB, 64 * MIB])
def test_every_sample_is_read_as_written(bench, members, fragment_chunks, memory_bytes):
    made = bench(
        random_samples(700), members=members, fragment_chunks=fragment_chunks, first_chunk=3
    )
    with made.reader(memory_bytes=memory_bytes) as reader:
        random = np.random.default_rng(1)
        for _ in range(4):  # the later rounds find some of it in memory
            indices = random.permutation(700)
            for first in range(0, 700, 50):
                part = indices[first : first + 50]
                batch = reader.read(part)
                assert batch.to_list() == [made.laid.samples[i] for i in part]
                assert batch.indices.tolist() == part.tolist()


def test_samples_larger_than_a_chunk(bench):
    samples = random_samples(60, low=0, high=70 * KIB)  # chunks of 16 KiB
    for members in (1, 2):
        made = bench(samples, members=members, fragment_chunks=3)
        for memory_bytes in (64 * KIB, 256 * KIB, 16 * MIB):
            with made.reader(memory_bytes=memory_bytes) as reader:
                for _ in range(2):
                    batch = reader.read(range(60))
                    assert batch.to_list() == list(made.laid.samples)
                    del batch


def test_an_index_may_occur_more_than_once_and_empty_samples_are_empty(bench):
    made = bench({b"a": b"", b"b": b"x" * 100, b"c": b""})
    with made.reader() as reader:
        assert reader.read([1, 0, 1, 2, 1]).to_list() == [
            b"x" * 100,
            b"",
            b"x" * 100,
            b"",
            b"x" * 100,
        ]
        assert len(reader.read([])) == 0


def test_bad_indices_are_refused(bench):
    made = bench(random_samples(5))
    with made.reader() as reader:
        for bad in ([5], [-1], [0.5], [[0]], ["a"]):
            with pytest.raises(UsageError, match=r"expected (indices|integers)"):
                reader.read(bad)
        with pytest.raises(UsageError, match=r"indices 0\.\.4, got -7 at position 2"):
            reader.read([0, 4, -7, 9])
        with pytest.raises(UsageError, match="on_error"):
            reader.read([0], on_error="ignore")


def test_batches_keep_their_bytes_while_anything_points_at_them(bench):
    made = bench(random_samples(400, low=100))
    with made.reader(memory_bytes=256 * KIB) as reader:
        views = []
        for first in range(0, 400, 20):
            views += list(reader.read(range(first, first + 20)))  # the batches themselves are gone
        assert [bytes(view) for view in views] == list(made.laid.samples)
        stats = reader.stats()
        assert stats["private_batches"] > 0  # more is pinned than the memory holds
    assert bytes(views[0]) == made.laid.samples[0]  # closed, and still there
    del views
    gc.collect()
    with pytest.raises(ClosedError):
        reader.read([0])


def test_a_released_batch_says_so(bench):
    made = bench(random_samples(5))
    with made.reader() as reader:
        with reader.read([1, 2]) as batch:
            view = batch[0]
        with pytest.raises(ClosedError):
            batch[0]
        assert bytes(view) == made.laid.samples[1]


def test_stack_and_pack(bench):
    made = bench({b"%03d" % i: bytes([i] * 64) for i in range(100)})
    with made.reader() as reader:
        batch = reader.read(range(0, 100, 7))
        stacked = batch.stack(np.uint16, (4, 8))
        assert stacked.shape == (15, 4, 8)
        assert stacked[1].tobytes() == bytes([7] * 64)
        packed, offsets = batch.pack()
        assert packed.tobytes() == b"".join(made.laid.samples[i] for i in range(0, 100, 7))
        assert offsets.tolist() == list(range(0, 64 * 15 + 1, 64))
        with pytest.raises(UsageError, match=r"expected samples of 32 bytes.*got 64"):
            batch.stack(np.uint8, (32,))
        assert not batch.data.flags.writeable
        with pytest.raises(TypeError):
            batch[0][0] = 1


@pytest.mark.parametrize("memory_bytes", [128 * KIB, 64 * MIB])
def test_a_flipped_bit_is_named_and_costs_one_sample(bench, memory_bytes):
    made = bench(random_samples(300, low=50))
    made.corrupt(123, bit=77)
    with made.reader(memory_bytes=memory_bytes) as reader:
        for _ in range(2):
            with pytest.raises(ChecksumError) as caught:
                reader.read(range(100, 150))
            name = made.laid.directory.name(123)
            for part in (
                "sample 123",
                repr(name.decode()),
                "'test'",
                "mem:",
                "at byte",
                "expected CRC32C",
            ):
                assert part in str(caught.value)
            batch = reader.read(range(100, 150), on_error="skip")
            assert batch.indices.tolist() == [i for i in range(100, 150) if i != 123]
            assert batch.to_list() == [
                s for i, s in enumerate(made.laid.samples) if i in batch.indices
            ]
            assert [failure.index for failure in batch.failures] == [123]
            batch = reader.read(range(100, 150), on_error="replace")
            assert batch.indices[23] == 124
            assert batch.tobytes(23) == made.laid.samples[124]
            assert [failure.path for failure in batch.failures] == [name]
        assert reader.stats()["checksum_errors"] > 0


def faulty(made, **faults) -> list[NativeDevice]:
    return [
        FaultyNativeDevice(device.native, Faults(**({"seed": 7} | faults)), uri=device.uri)
        for device in made.devices
    ]


@pytest.mark.parametrize("memory_bytes", [128 * KIB, 64 * MIB])
def test_passing_faults_are_retried(bench, memory_bytes):
    made = bench(random_samples(400), members=2)
    natives = faulty(
        made, error_per_million=50_000, short_per_million=30_000, flip_per_million=30_000, reorder=1
    )
    with made.reader(natives, memory_bytes=memory_bytes, retry_count=20) as reader:
        for first in range(0, 400, 40):
            batch = reader.read(range(first, first + 40))
            assert batch.to_list() == list(made.laid.samples[first : first + 40])
        stats = reader.stats()
        assert stats["retries"] > 0
        assert stats["read_errors"] > 0


def test_the_reads_of_each_member_and_their_latency_are_counted(bench):
    made = bench(random_samples(400), members=2)
    natives = faulty(made, error_per_million=100_000)
    with made.reader(natives, memory_bytes=128 * KIB, retry_count=20) as reader:
        for first in range(0, 400, 40):
            reader.read(range(first, first + 40)).release()
        for batch in batches_of(reader, 32, plan="direct"):
            batch.release()
        members, stats = reader.member_stats(), reader.stats()
    assert [member["uri"] for member in members] == [device.uri for device in made.devices]
    assert not any(member["lost"] for member in members)
    assert sum(member["reads"] for member in members) == stats["reads"]
    assert 0 < sum(member["errors"] for member in members) < stats["reads"]
    for member in members:
        assert sum(member["latency"]) == member["reads"] > 0
        assert member["latency_ns"] > 0
        # Each read took at least as long as its bucket says, but for the first bucket.
        least_us = sum(n * 2**k for k, n in enumerate(member["latency"]) if k > 0)
        assert member["latency_ns"] >= 1000 * least_us
    assert stats["plan_ns"] > 0
    assert stats["device_ns"] > 0
    assert stats["verify_ns"] > 0


def test_the_time_that_a_slow_consumer_costs_is_counted(bench):
    made = bench(random_samples(400))
    with made.reader(memory_bytes=64 * KIB) as reader:
        batches = batches_of(reader, 10, plan="direct")
        next(batches)
        # Memory is full, and nothing is taken.
        wait_for(lambda: reader.stats()["rest_ns"] > 0, "a reader that rests")
        batches.close()


def test_the_time_of_copies_is_counted(bench):
    made = bench(random_samples(50, low=100))
    with made.reader() as reader:
        reader.read(range(50)).pack()
        assert reader.stats()["copy_ns"] > 0


def test_a_bad_block_is_a_device_error(bench):
    made = bench(random_samples(300, low=50))
    address = int(made.laid.directory.addresses([50])[0])
    _, offset = made.member_offset(address)
    natives = faulty(made, bad_first_bytes=offset, bad_length_bytes=1)
    with made.reader(natives, memory_bytes=128 * KIB) as reader:
        with pytest.raises(DeviceError, match="sample 50"):
            reader.read([50])
        assert reader.read([200]).tobytes(0) == made.laid.samples[200]


@pytest.mark.parametrize("plan", ["read", "direct", "chunks", "chunk_copy"])
@pytest.mark.parametrize("seed", range(8))
def test_what_was_verified_is_not_written_again(bench, seed, plan):
    """Where a span fails its samples are read one by one, and share blocks with verified ones."""
    made = bench(random_samples(200, seed, high=3000))
    natives = faulty(made, seed=seed, error_per_million=300_000, flip_per_million=300_000)
    with made.reader(natives, memory_bytes=64 * KIB, depth=4, retry_count=1) as reader:
        for _ in range(5):
            given = 0
            if plan == "read":
                batches = iter([reader.read(range(200), on_error="skip")])
            else:
                batches = batches_of(reader, 20, plan=plan, on_error="skip")
            for batch in batches:
                given += len(batch)
                for index, view in zip(batch.indices.tolist(), batch, strict=True):
                    assert view == made.laid.samples[index], f"wrong bytes of sample {index}"
            del batches, batch, view
            assert given > 100


def test_a_device_that_does_not_answer_is_a_timeout(bench):
    made = bench(random_samples(100, low=50))
    natives = faulty(made, stall_per_million=1_000_000, stall_ms=3000)
    with made.reader(natives, timeout_ms=100) as reader:
        with pytest.raises(DeviceTimeoutError, match="sample 0"):
            reader.read([0])
        epoch = batches_of(reader, 10)
        with pytest.raises(DeviceTimeoutError):
            next(epoch)
        epoch.close()


def test_every_read_of_a_device_that_does_not_answer_ends(bench):
    made = bench(random_samples(100, low=50))
    natives = faulty(made, stall_per_million=1_000_000, stall_ms=3000)
    with made.reader(natives, timeout_ms=50, retry_count=0, memory_bytes=64 * KIB) as reader:
        for _ in range(6):
            with pytest.raises(DeviceTimeoutError):
                reader.read([0])
        assert reader.stats()["reads"] < 6  # it is hung: asked again now and then only


def test_a_member_that_does_not_answer_costs_only_its_own_samples(bench):
    made = bench(random_samples(400, low=50), members=2)
    natives = [
        faulty(made, stall_per_million=1_000_000, stall_ms=5000)[0],
        made.devices[1].native,
    ]
    with contextlib.ExitStack() as stack:  # a reader closes when what is stalled has ended
        for plan in (None, "direct", "chunks", "chunk_copy"):
            reader = made.reader(natives, timeout_ms=1000, retry_count=0, depth=2, gap_bytes=0)
            stack.enter_context(reader)
            if plan is None:
                batch = reader.read(range(400), on_error="skip")
            else:
                epoch = stack.enter_context(batches_of(reader, 400, plan=plan, on_error="skip"))
                batch = next(epoch)
            assert batch.to_list() == [made.laid.samples[i] for i in batch.indices]
            assert {failure.member for failure in batch.failures} == {made.devices[0].uri}
            assert len(batch.failures) + len(batch) == 400


def test_an_end_that_is_missing_costs_only_its_samples(bench):
    made = bench(random_samples(400, low=50))
    addresses = made.laid.directory.addresses(range(400))
    cut = 1 * MIB + int(addresses.max()) // 2 // CHUNK_BYTES * CHUNK_BYTES
    whole = made.devices[0]
    with MemoryDevice(f"{whole.name}-cut", cut, writable=True) as short:
        short.write(0, whole.read(0, cut))
        with made.reader([short.native], memory_bytes=128 * KIB) as reader:
            batch = reader.read(range(400), on_error="skip")
            there = np.flatnonzero(addresses.astype(np.int64) < cut - MIB).tolist()
            assert batch.indices.tolist() == there
            assert batch.to_list() == [made.laid.samples[i] for i in there]
            assert {failure.code for failure in batch.failures} == {-errno.EINVAL}
        del batch
    MemoryDevice.forget(short.name)


@pytest.mark.parametrize("memory_bytes", [256 * KIB, 64 * MIB])
def test_blocks_larger_than_a_page(bench, memory_bytes):
    block = {"block_bytes": 16 * KIB, "device_block_bytes": 16 * KIB}
    made = bench(random_samples(200), chunk_bytes=64 * KIB, **block)
    with made.reader(memory_bytes=memory_bytes) as reader:
        kept = [reader.read(range(first, first + 20)) for first in range(0, 200, 20)]
        assert [sample for batch in kept for sample in batch.to_list()] == list(made.laid.samples)


def test_closing_while_others_read(bench):
    made = bench(random_samples(100))
    for _ in range(20):
        reader = made.reader(memory_bytes=256 * KIB)
        started = threading.Barrier(4)
        wrong = []

        def work(reader=reader, started=started, wrong=wrong) -> None:
            started.wait()
            try:
                while True:
                    if reader.read(range(30)).to_list() != list(made.laid.samples[:30]):
                        wrong.append("bytes")
            except ClosedError:
                pass

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        owner = weakref.ref(reader.native.handle)
        reader.close()
        for thread in threads:
            thread.join()
        assert not wrong
        assert owner() is None  # the last of them has freed it


def test_a_child_closes_its_copy(bench):
    made = bench(random_samples(10))
    reader = made.reader()
    batch = reader.read([1])

    def close() -> None:
        reader.close()
        batch.release()

    assert run_forked(close) == 0
    assert batch.tobytes(0) == made.laid.samples[1]
    assert reader.read([2]).tobytes(0) == made.laid.samples[2]


def test_many_threads_read_at_once(bench):
    made = bench(random_samples(500))
    errors = []
    with made.reader(memory_bytes=256 * KIB) as reader:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(30):
                    indices = random.integers(0, 500, 25)
                    assert reader.read(indices).to_list() == [made.laid.samples[i] for i in indices]
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


def test_one_sample_at_a_time(bench):
    samples = random_samples(200, low=0, high=3000)
    samples[b"large"] = bytes(range(256)) * 700  # larger than a chunk, and than the first buffer
    made = bench(samples)
    made.corrupt(60)
    with made.reader(memory_bytes=16 * MIB) as reader:
        assert reader.get_if_cached(10) is None
        for index in (10, 200, 10, 0):
            assert reader.get(index) == made.laid.samples[index]
        assert reader.get_if_cached(10) == made.laid.samples[10]
        with pytest.raises(ChecksumError, match="sample 60"):
            reader.get(60)
        for bad in (-1, 201):
            with pytest.raises(UsageError, match="expected an index"):
                reader.get(bad)


def test_samples_that_fit_in_memory_are_read_once(bench):
    """Also samples over several chunks: their runs use free memory before they evict others."""
    made = bench(random_samples(150, high=40 * KIB))
    with made.reader(memory_bytes=32 * MIB) as reader:
        random = np.random.default_rng(0)
        for _ in range(3):
            order = random.permutation(150)
            for first in range(0, 150, 10):
                part = order[first : first + 10]
                assert reader.read(part).to_list() == [made.laid.samples[i] for i in part]
        before = reader.stats()["reads"]
        reader.read(range(150))
        assert reader.stats()["reads"] == before
