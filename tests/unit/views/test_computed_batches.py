"""Batches by length and packed tokens: budgets, exactness, ranks, states, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.errors import UsageError
from dlfs.views import lists, reading, tokens
from tests.support.files import flip_bit

COUNT = 600
RANDOM = np.random.default_rng(5)
DOCUMENTS = [
    np.concatenate([[index], RANDOM.integers(0, 60000, RANDOM.integers(0, 200))]).astype("<u2")
    for index in range(COUNT)
]
DOCUMENTS[77] = np.arange(40_000, dtype="<u2")  # longer than many sequences
DOCUMENTS[78] = np.empty(0, "<u2")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("tokens") / "volume.img")
    dlfs.format_volume(made, size_bytes=16 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(made) as volume:
        with volume.writer("documents") as writer:
            for index, document in enumerate(DOCUMENTS):
                writer.add(b"%04d" % index, document.tobytes())
        with volume.writer("odd") as writer:
            writer.add("even", b"ab")
            writer.add("three", b"abc")
    return made


@pytest.fixture(params=["dataset", "view"])
def dataset(path: str, request: pytest.FixtureRequest) -> Iterator[lists.Readable]:
    with dlfs.open(path, memory_bytes=MIB) as volume, volume["documents"] as opened:
        yield opened if request.param == "dataset" else dlfs.concat([opened])


# ---- batches by length ---------------------------------------------------------------------------

SHORT = np.array([index for index in range(COUNT) if index != 77])


def by_length(dataset: lists.Readable, **options) -> list[list[int]]:
    found = []
    for batch in dlfs.length_batches(
        dataset, 1000, token_bytes=2, where=SHORT, window_samples=128, **options
    ):
        for index, sample in zip(batch.indices.tolist(), batch, strict=True):
            assert bytes(sample) == DOCUMENTS[index].tobytes()
        found.append(batch.indices.tolist())
    return found


def test_a_batch_has_similar_lengths_within_the_budget(dataset) -> None:
    found = by_length(dataset, seed=1)
    assert sorted(index for batch in found for index in batch) == SHORT.tolist()
    for batch in found:
        lengths = [len(DOCUMENTS[index]) for index in batch]
        assert len(batch) * max(lengths) <= 1000
    padded = sum(len(batch) * max(len(DOCUMENTS[i]) for i in batch) for batch in found)
    assert padded < 1.15 * sum(len(DOCUMENTS[index]) for index in SHORT)
    longest = [max(len(DOCUMENTS[index]) for index in batch) for batch in found]
    assert longest != sorted(longest)
    assert max(map(len, by_length(dataset, max_samples=5))) == 5


def test_batches_by_length_differ_by_seed_and_epoch_and_repeat(dataset) -> None:
    orders = [by_length(dataset, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({str(order) for order in orders}) == 4
    assert by_length(dataset, seed=1, epoch=1) == orders[3]


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 1), (3, 2)])
def test_ranks_share_batches_by_length(dataset, world, workers) -> None:
    whole = by_length(dataset)
    shares = {
        (rank, worker): by_length(
            dataset, rank=rank, world_size=world, worker=worker, workers=workers
        )
        for rank in range(world)
        for worker in range(workers)
    }
    for (rank, worker), found in shares.items():
        assert found == whole[rank::world][worker::workers]
    full = by_length(dataset, rank=0, world_size=world, drop_last=True)
    assert len(full) == len(whole) // world


def test_batches_by_length_resume_at_another_world_size(dataset) -> None:
    options = {"token_bytes": 2, "where": SHORT, "window_samples": 128}
    epoch = dlfs.length_batches(dataset, 1000, seed=4, epoch=3, **options)
    before = [next(epoch).indices.tolist() for _ in range(11)]
    state = json.loads(json.dumps(epoch.state()))
    rest = [batch.indices.tolist() for batch in epoch]
    for rank in range(2):
        again = dlfs.length_batches(dataset, 1000, rank=rank, world_size=2, **options)
        assert [batch.indices.tolist() for batch in again.resume(state)] == rest[rank::2]
    assert before + rest == by_length(dataset, seed=4, epoch=3)
    with pytest.raises(UsageError, match="another version or dataset"):
        dlfs.length_batches(dataset, 999, **options).resume(state)


def test_a_sample_longer_than_the_budget_is_named(dataset) -> None:
    with pytest.raises(UsageError, match=r"at most 2000 bytes, got 80000 in sample 77 '0077'"):
        dlfs.length_batches(dataset, 1000, token_bytes=2)
    with pytest.raises(UsageError, match="max_tokens"):
        dlfs.length_batches(dataset, 0)


# ---- packed tokens -------------------------------------------------------------------------------


def line(dataset: lists.Readable, separator: int | None = None, **options) -> np.ndarray:
    order = dataset.order_epoch(dlfs.dataset.dataset.EpochOptions(**options)).indices().tolist()
    ends = [] if separator is None else [np.array([separator], "<u2")]
    return np.concatenate([part for index in order for part in (DOCUMENTS[index], *ends)])


@pytest.mark.parametrize("separator", [None, 65535])
@pytest.mark.parametrize("length", [1, 64, 1000, 30_000])
def test_sequences_are_the_documents_one_after_the_other(dataset, separator, length) -> None:
    where = SHORT[:40] if length == 1 else None
    expected = line(dataset, separator, seed=2, where=where)
    epoch = dlfs.token_batches(
        dataset, length, batch_size=7, separator=separator, seed=2, where=where
    )
    batches = list(epoch)
    found = np.concatenate([batch.tokens for batch in batches])
    assert found.shape == (len(expected) // length, length)
    assert found.reshape(-1).tolist() == expected[: found.size].tolist()
    assert found.dtype == np.uint16
    numbers = np.concatenate([batch.indices for batch in batches])
    assert numbers.tolist() == list(range(len(found)))


def test_the_document_of_each_token_is_given(dataset) -> None:
    order = dataset.order_epoch(dlfs.dataset.dataset.EpochOptions(shuffle=None)).indices().tolist()
    owners = np.concatenate([np.full(len(DOCUMENTS[index]), index) for index in order])
    for batch in dlfs.token_batches(dataset, 256, batch_size=16, shuffle=None):
        for number, documents in zip(batch.indices.tolist(), batch.documents, strict=True):
            owner = owners[number * 256 : (number + 1) * 256]
            steps = np.concatenate([[False], np.diff(owner) != 0])
            assert documents.tolist() == np.cumsum(steps).tolist()


@pytest.mark.parametrize("segment", [1 << 16, 3])
@pytest.mark.parametrize("blocks", [1 << 12, 5])
@pytest.mark.parametrize(("world", "workers"), [(1, 1), (2, 1), (3, 2)])
def test_ranks_share_sequences(dataset, monkeypatch, segment, blocks, world, workers) -> None:
    monkeypatch.setattr(lists, "SEGMENT_SAMPLES", segment)
    monkeypatch.setattr(reading, "AHEAD_SAMPLES", 2)
    monkeypatch.setattr(tokens, "BLOCK_DOCUMENTS", blocks)
    expected = line(dataset, seed=9)
    whole = expected[: len(expected) // 128 * 128].reshape(-1, 128)
    seen: dict[int, np.ndarray] = {}
    for rank in range(world):
        for worker in range(workers):
            epoch = dlfs.token_batches(
                dataset,
                128,
                batch_size=4,
                seed=9,
                rank=rank,
                world_size=world,
                worker=worker,
                workers=workers,
            )
            for batch in epoch:
                seen |= dict(zip(batch.indices.tolist(), batch.tokens, strict=True))
                assert all(number % world == rank for number in batch.indices.tolist())
    assert sorted(seen) == list(range(len(whole)))
    assert all(np.array_equal(seen[number], whole[number]) for number in seen)


def test_packing_resumes_in_the_middle_of_a_document(dataset) -> None:
    epoch = dlfs.token_batches(dataset, 100, batch_size=2, seed=6, epoch=1)
    whole = [batch.tokens for batch in dlfs.token_batches(dataset, 100, seed=6, epoch=1)]
    for _ in range(150):
        next(epoch)
    state = json.loads(json.dumps(epoch.state()))
    for rank in range(3):
        again = dlfs.token_batches(dataset, 100, rank=rank, world_size=3).resume(state)
        rest = [batch.tokens.tolist() for batch in again]
        assert rest == [tokens.tolist() for tokens in whole[300:][rank::3]]


@pytest.mark.parametrize("kind", ["<u2[?]", "bytes"])
def test_only_the_field_with_the_tokens_is_read(tmp_path, kind) -> None:
    path = str(tmp_path / "volume.img")
    dlfs.format_volume(path, size_bytes=16 * MIB, chunk_bytes=16 * KIB)
    types = {"raw": "bytes", "tokens": kind, "title": "text"}
    chosen = DOCUMENTS[:76]
    with dlfs.open(path, memory_bytes=MIB) as volume:
        with volume.writer("d", fields=types) as writer:
            for index, document in enumerate(chosen):
                tokens = document if kind != "bytes" else document.tobytes()
                sample = {"raw": bytes(50_000), "tokens": tokens, "title": "t" * index}
                writer.add(b"%04d" % index, sample)
        with volume["d"] as dataset:
            for source in (dataset, dlfs.concat([dataset])):
                expected = line(source, seed=2, separator=7)
                before = dataset.stats()["read_bytes"]
                epoch = dlfs.token_batches(
                    source, 64, batch_size=7, seed=2, field="tokens", separator=7
                )
                found = np.concatenate([batch.tokens for batch in epoch]).reshape(-1)
                assert found.dtype == np.uint16
                assert found.tolist() == expected[: len(expected) // 64 * 64].tolist()
                assert dataset.stats()["read_bytes"] - before < 76 * 8 * KIB
            assert dataset.field_lengths("title", [3, 9]).tolist() == [3, 9]
            for field, dtype in (("title", None), ("none", None), ("tokens", np.float32)):
                with pytest.raises(UsageError, match=r"text|no such field|integer dtype"):
                    dlfs.token_batches(dataset, 4, field=field, dtype=dtype)
            if kind != "bytes":
                with pytest.raises(UsageError, match=r"dtype of field 'tokens', <u2\[\?\]"):
                    dlfs.token_batches(dataset, 4, field="tokens", dtype=np.uint8)


def test_documents_that_are_no_tokens_are_refused(path) -> None:
    with dlfs.open(path) as volume, volume["odd"] as odd:
        with pytest.raises(UsageError, match=r"uint16, got 3 bytes in sample 1 'three'"):
            dlfs.token_batches(odd, 4)
        with pytest.raises(UsageError, match="integer dtype"):
            dlfs.token_batches(odd, 4, dtype=np.float32)
        with pytest.raises(UsageError, match="separator"):
            dlfs.token_batches(odd, 4, separator=65536)
        with pytest.raises(UsageError, match="on_error"):
            dlfs.token_batches(odd, 4, on_error="skip")
        with pytest.raises(UsageError, match="expected no fields"):
            dlfs.token_batches(odd, 4, fields=["x"])
        assert list(dlfs.token_batches(odd, 1000, dtype=np.uint8)) == []


def test_a_long_document_is_read_once(path) -> None:
    with dlfs.open(path, memory_bytes=MIB) as volume, volume["documents"] as dataset:
        epoch = dlfs.token_batches(dataset, 100, where=[77])
        assert len(list(epoch)) == 400
        stats = dataset.stats()
        assert stats["samples"] == 1, stats


def test_a_damaged_document_is_named(path, tmp_path) -> None:
    damaged = shutil.copy(path, tmp_path / "damaged.img")
    flip_bit(damaged, Path(path).read_bytes().index(DOCUMENTS[5].tobytes()))
    with dlfs.open(damaged) as volume, volume["documents"] as dataset:
        epoch = dlfs.token_batches(dataset, 64, batch_size=8)
        with pytest.raises(dlfs.ChecksumError, match="'0005'"):
            list(epoch)
