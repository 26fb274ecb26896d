"""Tests which samples stay in memory from epoch to epoch, by the bytes read from devices.

``dlfs.open`` says what ``memory_bytes`` promises; ``promised_bytes`` here is its formula.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dlfs.base.units import KIB
from dlfs.epoch.options import EpochOptions
from dlfs.epoch.selection import select
from dlfs.format.digests import Digests
from dlfs.reader import SampleReader
from dlfs.reader.epoch import Epoch
from tests.support.datasets import random_samples
from tests.unit.reader.conftest import CHUNK_BYTES

BATCH = 32
DEPTH = 16
GAP_BYTES = 4 * KIB
WINDOW_CHUNKS = 8
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


def no_column(name: str) -> NDArray[Any]:
    raise AssertionError(f"no test names a column, got {name!r}")


def chosen_epoch(reader: SampleReader, number: int, batch: int = BATCH, **options: Any) -> Epoch:
    """An epoch of ``Dataset.batches``, without a dataset: every argument but those of workers."""
    chosen = EpochOptions(
        batch_size=batch, seed=7, epoch=number, window_chunks=WINDOW_CHUNKS, **options
    )
    return Epoch(
        lambda: reader,
        chosen,
        dataset="test",
        digests=Digests(),
        sample_count=len(reader.directory),
        selection=select(reader.directory, no_column, chosen),
    )


def read_bytes(
    reader: SampleReader, samples: tuple[bytes, ...], epochs: int, **options: Any
) -> list[int]:
    """Bytes read from devices in each of the first epochs, every sample of which is checked."""
    found = []
    for number in range(epochs):
        before = reader.stats()["read_bytes"]
        with chosen_epoch(reader, number, **options) as epoch:
            for batch in epoch:
                for at, index in enumerate(batch.indices.tolist()):
                    assert batch.tobytes(at) == samples[index]
                batch.release()
        found.append(reader.stats()["read_bytes"] - before)
    return found


def reserve_bytes(
    lengths: NDArray[np.int64], memory_bytes: int, *, batch: int, window_chunks: int
) -> int:
    """Return the memory that the cache leaves to reads under way and to batches."""
    largest_chunks = -(-int(lengths.max()) // CHUNK_BYTES)
    sample_bytes = float(lengths.mean()) + 4 * KIB + GAP_BYTES / 3
    ahead_bytes = max(min(memory_bytes / 8, 2 * DEPTH * sample_bytes), 2 * batch * sample_bytes)
    return int((10 + 2 * largest_chunks + window_chunks) * CHUNK_BYTES + ahead_bytes)


def packed_bytes(lengths: NDArray[np.int64]) -> int:
    """Memory of samples: a run holds 32, or a quarter of all; its last may not fit; the map."""
    places = 1024
    while places * 3 // 4 < len(lengths):
        places *= 2
    runs = max(5, len(lengths) // 32 + 1)
    waste = runs * int(lengths.mean() + lengths.max()) // 2
    return int(lengths.sum() + 12 * len(lengths)) + waste + 16 * places + CHUNK_BYTES


def promised_bytes(
    first_bytes: int,
    lengths: NDArray[np.int64],
    memory_bytes: int,
    *,
    batch: int = BATCH,
    window_chunks: int = 0,
) -> float:
    """Return the most that a later epoch reads if the first one read ``first_bytes``."""
    reserve = reserve_bytes(lengths, memory_bytes, batch=batch, window_chunks=window_chunks)
    missing = max(0.0, 1 - max(0, memory_bytes - reserve) / packed_bytes(lengths))
    # Neighbouring slots may be lacking for a large sample: then the stream's reserve is doubled. A
    # fifth more: which samples stay depends on the order in which reads of a busy machine end.
    return first_bytes * min(1.0, 1.2 * missing) + 4 * CHUNK_BYTES + 8 * int(lengths.max())


def selections(count: int, seed: int) -> dict[str, dict[str, Any]]:
    random = np.random.default_rng(seed)
    few, many = (np.sort(random.permutation(count)[: count * part // 10]) for part in (2, 4))
    return {
        "few": {"where": few},
        "many": {"where": many},
        "few in storage order": {"where": few, "shuffle": None},
        "many in storage order": {"where": many, "shuffle": None},
        "list": {"order": random.permutation(many)},
        "all": {},
    }


SAMPLES: dict[str, Callable[[int], dict[bytes, bytes]]] = {
    "4 KiB": lambda seed: random_samples(1500, seed, low=4096, high=4097),
    "0 to 6000 bytes": lambda seed: random_samples(1500, seed),
    "larger than a chunk": lambda seed: random_samples(120, seed, low=100, high=60 * KIB),
}


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("choice", selections(100, 0))
@pytest.mark.parametrize("seed", range(2))
def test_a_share_of_memory_saves_its_share_of_every_later_epoch(bench, kind, choice, seed):
    made = bench(SAMPLES[kind](seed))
    options = selections(len(made.laid.samples), seed)[choice]
    chosen = next((options[name] for name in ("where", "order") if name in options), slice(None))
    lengths = np.array([len(sample) for sample in made.laid.samples], np.int64)[chosen]
    batch = 2 if kind == "larger than a chunk" else BATCH
    before: list[int] = []
    for share in SHARES:
        memory_bytes = int(packed_bytes(lengths) * share)
        with made.reader(memory_bytes=memory_bytes, depth=DEPTH, gap_bytes=GAP_BYTES) as reader:
            read = read_bytes(reader, made.laid.samples, 3, batch=batch, **options)
        for later in read[1:]:
            assert later <= promised_bytes(max(read), lengths, memory_bytes, batch=batch)
        for more, less in zip(read, before, strict=False):
            assert more <= less * 1.1 + 4 * CHUNK_BYTES
        # A batch that is larger than the memory has memory of its own, and is read in one piece.
        before = read if memory_bytes > 2 * batch * lengths.mean() else []


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("choice", selections(100, 0))
def test_with_memory_for_all_that_an_epoch_takes_the_second_one_reads_nothing(bench, kind, choice):
    made = bench(SAMPLES[kind](3))
    options = selections(len(made.laid.samples), 3)[choice]
    chosen = next((options[name] for name in ("where", "order") if name in options), slice(None))
    lengths = np.array([len(sample) for sample in made.laid.samples], np.int64)[chosen]
    largest_chunks = -(-int(lengths.max()) // CHUNK_BYTES)
    enough = packed_bytes(lengths) + (6 + 2 * largest_chunks) * CHUNK_BYTES
    whole = made.laid.geometry.chunk_bytes * (sum(run.chunk_count for run in made.laid.runs) + 8)
    for memory_bytes in (max(enough, whole if choice == "all" else 0), 10 * whole):
        with made.reader(memory_bytes=memory_bytes, gap_bytes=GAP_BYTES) as reader:
            first, *later = read_bytes(reader, made.laid.samples, 3, batch=BATCH, **options)
            assert first > 0
            assert later == [0, 0]


@pytest.mark.parametrize("shuffle", ["chunk", None])
def test_an_order_of_chunks_saves_the_share_that_is_not_a_window(bench, shuffle):
    made = bench({b"%d" % i: os.urandom(1000) for i in range(6000)})
    lengths = np.full(6000, 1000)
    before: list[int] = []
    for share in SHARES:
        memory_bytes = int(6000 * 1000 * share)
        with made.reader(memory_bytes=memory_bytes, depth=DEPTH) as reader:
            read = read_bytes(reader, made.laid.samples, 3, shuffle=shuffle)
        window = WINDOW_CHUNKS if shuffle else 1
        for later in read[1:]:
            assert later <= promised_bytes(max(read), lengths, memory_bytes, window_chunks=window)
        for more, less in zip(read, before, strict=False):
            assert more <= less * 1.05 + 4 * CHUNK_BYTES
        before = read


def test_samples_much_smaller_than_a_block_are_read_by_chunks_and_less_with_more_memory(bench):
    made = bench({b"%d" % i: os.urandom(200) for i in range(20000)})
    data_bytes = 20000 * 200
    before: list[int] = []
    for share in (0.25, 0.5, 0.75, 0.9):
        with made.reader(memory_bytes=int(data_bytes * share), depth=DEPTH) as reader:
            with chosen_epoch(reader, 0) as epoch:
                assert epoch.plan == "chunk_copy"
            read = read_bytes(reader, made.laid.samples, 3, batch=256)
        assert max(read[1:]) <= max(1.6 / share, 7 * (1 - share)) * data_bytes
        for more, less in zip(read[1:], before[1:], strict=False):
            assert more <= less * 1.05 + 4 * CHUNK_BYTES
        before = read


def test_draws_with_replacement_read_each_sample_once_where_all_fit(bench):
    made = bench(random_samples(500))
    weights = np.random.default_rng(0).random(500)
    with made.reader(memory_bytes=len(made.laid.samples) * 4 * KIB, gap_bytes=GAP_BYTES) as reader:
        read = read_bytes(reader, made.laid.samples, 12, weights=weights)
        assert sum(read) <= 500 * 8 * KIB
        assert read[-1] <= read[0] // 8


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_one_reader_share_what_is_cached(bench, ranks):
    made = bench(random_samples(900))
    where = np.arange(0, 900, 3)
    with made.reader(memory_bytes=8 * 300 * KIB, gap_bytes=GAP_BYTES) as reader:
        for number in range(3):
            before = reader.stats()["read_bytes"]
            epochs = [
                chosen_epoch(reader, number, batch=16, where=where, rank=rank, world_size=ranks)
                for rank in range(ranks)
            ]
            taken = [index for epoch in epochs for batch in epoch for index in batch.indices]
            assert sorted(taken) == where.tolist()
            for epoch in epochs:
                epoch.close()
            assert number == 0 or reader.stats()["read_bytes"] == before


def test_another_selection_takes_over_the_memory_of_the_last_one(bench):
    made = bench(random_samples(1500, low=4096, high=4097))
    random = np.random.default_rng(1)
    first, second = (np.sort(random.permutation(1500)[:500]) for _ in range(2))
    lengths = np.full(500, 4096)
    memory_bytes = packed_bytes(lengths) + 10 * CHUNK_BYTES
    with made.reader(memory_bytes=memory_bytes, gap_bytes=GAP_BYTES) as reader:
        assert read_bytes(reader, made.laid.samples, 2, where=first)[1] == 0
        for where in (second, first):
            assert read_bytes(reader, made.laid.samples, 5, where=where)[4] <= 500 * 4096 // 20


def test_validation_between_epochs_does_not_cost_training_its_memory(bench):
    made = bench(random_samples(1500, low=4096, high=4097))
    training, validation = np.arange(0, 1200, 2), np.arange(1200, 1400, 2)
    memory_bytes = packed_bytes(np.full(650, 4096)) + 10 * CHUNK_BYTES
    with made.reader(memory_bytes=memory_bytes, gap_bytes=GAP_BYTES) as reader:
        read = [
            read_bytes(reader, made.laid.samples, 1, where=where)[0]
            for _ in range(5)
            for where in (training, validation)
        ]
    # Training has come first and has all that it takes, but for what validation has under way: on a
    # busy machine some batches, and less than the samples of validation.
    assert max(read[2::2]) <= 3 * BATCH * 4096 < len(validation) * 4096
    assert all(later <= 1.2 * read[1] for later in read[3::2])


def test_bytes_that_fail_their_checksum_are_not_cached(bench):
    made = bench(random_samples(400, low=4096, high=4097))
    where = np.arange(0, 400, 2)
    bad = int(where[7])
    made.corrupt(bad, 12345)
    with made.reader(memory_bytes=600 * 4 * KIB, gap_bytes=GAP_BYTES) as reader:
        for number in range(3):
            with chosen_epoch(reader, number, where=where, on_error="skip") as epoch:
                taken = [index for batch in epoch for index in batch.indices.tolist()]
                assert [failure.index for failure in epoch.failures] == [bad]
            assert sorted(taken) == [index for index in where.tolist() if index != bad]
        made.corrupt(bad, 12345)  # as it was
        assert reader.read([bad]).tobytes(0) == made.laid.samples[bad]


def test_a_read_finds_what_an_epoch_has_cached_and_evicts_it_where_it_must(bench):
    made = bench(random_samples(1500, low=4096, high=4097))
    where = np.arange(0, 1500, 5)
    memory_bytes = packed_bytes(np.full(300, 4096)) + 10 * CHUNK_BYTES
    with made.reader(memory_bytes=memory_bytes, gap_bytes=GAP_BYTES) as reader:
        assert read_bytes(reader, made.laid.samples, 2, where=where)[1] == 0
        before = reader.stats()["read_bytes"]
        assert reader.read(where[:50]).tobytes(49) == made.laid.samples[int(where[49])]
        assert reader.get(int(where[60])) == made.laid.samples[int(where[60])]
        assert reader.get_if_cached(1) is None
        assert reader.stats()["read_bytes"] == before
        for start in range(0, 1500, 100):
            with reader.read(np.arange(start, start + 100)) as batch:
                assert batch.tobytes(7) == made.laid.samples[start + 7]
        assert read_bytes(reader, made.laid.samples, 3, where=where)[2] == 0


def test_pinned_batches_take_precedence_over_the_cache(bench):
    made = bench(random_samples(1500, low=4096, high=4097))
    where = np.arange(0, 1500, 2)
    with made.reader(memory_bytes=400 * 4 * KIB, gap_bytes=GAP_BYTES) as reader:
        for number in range(3):
            with chosen_epoch(reader, number, where=where) as epoch:
                held = list(epoch)
            for batch in held:
                for at, index in enumerate(batch.indices.tolist()):
                    assert batch.tobytes(at) == made.laid.samples[index]
        del held, batch
        read = read_bytes(reader, made.laid.samples, 8, where=where)
    assert read[-1] < 0.8 * 750 * 4 * KIB


def test_a_list_that_names_samples_again_needs_memory_for_each_of_them_once(bench):
    made = bench(random_samples(1500, low=4096, high=4097))
    order = np.random.default_rng(2).permutation(np.repeat(np.arange(0, 1500, 5), 4))
    memory_bytes = packed_bytes(np.full(300, 4096)) + 24 * CHUNK_BYTES
    with made.reader(memory_bytes=memory_bytes, gap_bytes=GAP_BYTES) as reader:
        first, *later = read_bytes(reader, made.laid.samples, 3, order=order)
    assert first < 2 * 300 * 8 * KIB
    assert later == [0, 0]


def test_one_large_sample_does_not_cost_the_others_their_memory(bench):
    samples = random_samples(1500, low=4096, high=4097)
    samples[b"large"] = os.urandom(1024 * KIB)
    made = bench(samples)
    where = np.append(np.arange(0, 1500, 2), 1500)
    lengths = np.array([len(made.laid.samples[index]) for index in where])
    memory_bytes = int(packed_bytes(np.full(750, 4096)) * 0.6) + 3 * 1024 * KIB
    with made.reader(memory_bytes=memory_bytes, gap_bytes=GAP_BYTES) as reader:
        read = read_bytes(reader, made.laid.samples, 3, where=where)
    assert read[2] <= 0.5 * (read[0] - lengths.max()) + lengths.max()


@pytest.mark.parametrize("part", [2, 5])
def test_on_demand_passes_after_a_selection_keep_what_they_read(bench, part):
    made = bench(random_samples(1500, low=4096, high=4097))
    chunk_count = sum(run.chunk_count for run in made.laid.runs)
    where = np.arange(0, 1500, part)
    with made.reader(memory_bytes=(chunk_count + 8) * CHUNK_BYTES, gap_bytes=GAP_BYTES) as reader:
        read_bytes(reader, made.laid.samples, 2, where=where)
        passes = []
        for _ in range(3):
            before = reader.stats()["read_bytes"]
            for start in range(0, 1500, 50):
                reader.read(np.arange(start, start + 50)).release()
            passes.append(reader.stats()["read_bytes"] - before)
        assert passes[1] <= 4 * CHUNK_BYTES  # the last reads of the first pass pinned packed runs
        assert passes[2] == 0
        assert read_bytes(reader, made.laid.samples, 2, where=where) == [0, 0]


def test_epochs_in_storage_order_take_over_the_memory_of_a_selection(bench):
    made = bench({b"%d" % i: os.urandom(1000) for i in range(6000)})
    data_bytes = 6000 * 1000
    where = np.arange(0, 6000, 2)
    with made.reader(memory_bytes=data_bytes // 2, depth=DEPTH) as reader:
        read_bytes(reader, made.laid.samples, 2, where=where, plan="direct")
        read = read_bytes(reader, made.laid.samples, 6, shuffle=None)
    assert read[5] <= 0.7 * data_bytes
