"""Epochs that go on with a copy of their dataset, and copies that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.dataset import committed_steps, sealing
from dlfs.errors import UsageError
from dlfs.format.digests import BLOCK_SAMPLES, Digests
from dlfs.ingest import copying
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.reader import Epoch

CHUNK = 16 * KIB
ROUNDS = 3
COUNT = 120
BATCH = 4

Samples = Mapping[str, bytes]


def lengths(seed: int) -> list[int]:
    """Lengths of samples of all kinds: empty, small, near a chunk, and larger than one."""
    drawn = np.random.default_rng(seed).integers(0, 6000, COUNT).tolist()
    return [0, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, *drawn[5:]]


def samples_of(round_: int) -> Samples:
    return {
        f"{ROUNDS - round_}/{number:03}": bytes([number]) * (size // 2 * 2)
        for number, size in enumerate(lengths(round_))
    }


def make_volume(folder: Path, *names: str, **options: Any) -> str:
    folder.mkdir(exist_ok=True)
    paths = [str(folder / name) for name in names]
    options = {"chunk_bytes": CHUNK, "size_bytes": 16 * MIB, **options}
    dlfs.format_volume(paths, **options)
    return ",".join(paths)


def add(writer: dlfs.DatasetWriter, samples: Samples) -> None:
    for path, data in samples.items():
        attributes = {"class": path[0], "weight": len(data) / 2, "place": np.arange(3.0)}
        writer.add(path, data, attributes=attributes)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dlfs.Dataset]:
    """A dataset that was appended to twice: chunks end early where versions end."""
    with dlfs.open(make_volume(tmp_path_factory.mktemp("one"), "a.img")) as volume:
        for number in range(ROUNDS):
            with volume.append("d") if number else volume.writer("d", seed=3) as writer:
                add(writer, samples_of(number))
                writer.add_directory(f"empty {number}")
        with volume["d"] as dataset:
            yield dataset


@pytest.fixture(scope="module")
def copied(
    original: dlfs.Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dlfs.Dataset]:
    """A copy on other disks, under another name and version, written in steps."""
    uri = make_volume(tmp_path_factory.mktemp("three"), "a.img", "b.img", "c.img", replicas=2)
    with dlfs.open(uri) as volume, pytest.MonkeyPatch.context() as patched:
        patched.setattr(committed_steps, "PAUSE_S", 0.0)
        patched.setattr(copying, "BLOCK_BYTES", 100_000)
        volume.writer("staged").seal()
        dlfs.copy_dataset(original, volume, "staged", step_bytes=250_000)
        assert list(volume.verify()) == []
        with volume["staged"] as dataset:
            yield dataset


def seen(batches: Any) -> list[bytes]:
    return [bytes(sample) for batch in batches for sample in batch]


Begin = Callable[..., Epoch]

ORDERS: dict[str, dict[str, Any]] = {
    "global": {"shuffle": "global"},
    "chunks": {"shuffle": "chunk", "window_chunks": 3},
    "storage": {"shuffle": None},
    "some": {"where": np.arange(COUNT)},
    "some in storage order": {"where": np.arange(COUNT), "shuffle": None},
    "weighted": {"weights": "weight", "draws": 100},
    "listed": {"order": np.arange(100)[::-1]},
}
VIEWS: dict[str, Callable[[dlfs.Dataset], Any]] = {
    "dataset": lambda dataset: dataset,
    "select": lambda dataset: dlfs.select(dataset, dataset.column("class") == "2"),
    "mix": lambda dataset: dlfs.mix({dataset: 1, dlfs.select(dataset, np.arange(40)): 2}),
    "concat": lambda dataset: dlfs.concat([dataset, dlfs.select(dataset, [7, 8])]),
}


def go_on(begin: Begin, other: Begin, steps: int = 3) -> None:
    """Check that an epoch of three ranks goes on exactly with a copy, at two ranks."""
    ranks = [begin(rank=rank, world_size=3) for rank in range(3)]
    for _ in range(steps):
        taken = [seen([next(epoch)]) for epoch in ranks]
    state = ranks[0].state()
    assert all(epoch.state() == state for epoch in ranks)
    assert all(taken)
    for rank in range(2):
        expected = begin(rank=rank, world_size=2).resume(state)
        got = other(rank=rank, world_size=2).resume(state)
        assert got.state()["position"] == state["position"]
        assert seen(got) == seen(expected)


@pytest.mark.parametrize("order", ORDERS)
def test_an_epoch_goes_on_with_a_copy(
    original: dlfs.Dataset, copied: dlfs.Dataset, order: str
) -> None:
    assert copied.digests == original.digests
    assert copied.uuid != original.uuid
    options = ORDERS[order]
    go_on(
        lambda **ranks: original.batches(BATCH, seed=2, epoch=1, **options, **ranks),
        lambda **ranks: copied.batches(BATCH, seed=2, epoch=1, **options, **ranks),
    )


@pytest.mark.parametrize("shuffle", ["global", "chunk", None])
@pytest.mark.parametrize("view", VIEWS)
def test_an_epoch_of_a_view_goes_on_with_a_copy(
    original: dlfs.Dataset, copied: dlfs.Dataset, view: str, shuffle: Any
) -> None:
    first, second = VIEWS[view](original), VIEWS[view](copied)
    options = {"seed": 1, "shuffle": shuffle}
    go_on(
        lambda **ranks: first.batches(BATCH, **options, **ranks),
        lambda **ranks: second.batches(BATCH, **options, **ranks),
    )
    go_on(
        lambda **ranks: dlfs.length_batches(first, 10 * CHUNK, **options, **ranks),
        lambda **ranks: dlfs.length_batches(second, 10 * CHUNK, **options, **ranks),
        steps=1,
    )
    kind = {"dtype": np.uint16, **options}
    epochs = [
        dlfs.token_batches(each, 500, **kind, rank=0, world_size=1) for each in (first, second)
    ]
    tokens = [next(epochs[0]).tokens.tolist() for _ in range(4)]
    epochs[1].resume(epochs[0].state())
    assert len(tokens) == 4
    assert [b.tokens.tolist() for b in epochs[1]] == [b.tokens.tolist() for b in epochs[0]]


def test_a_copy_in_other_chunks_goes_on_in_the_order_of_indices(
    original: dlfs.Dataset, tmp_path: Path
) -> None:
    uri = make_volume(tmp_path / "other", "a.img", chunk_bytes=2 * CHUNK)
    with dlfs.open(uri) as volume:
        info = dlfs.copy_dataset(original, volume)
        assert info.content_digest == original.digests.content
        with volume["d"] as copied:
            go_on(
                lambda **ranks: original.batches(BATCH, **ranks),
                lambda **ranks: copied.batches(BATCH, **ranks),
            )
            order = [dataset.directory.order().tolist() for dataset in (original, copied)]
            assert order[0] == order[1]
            for shuffle in ("chunk", None):
                state = original.batches(BATCH, shuffle=shuffle, rank=0, world_size=1).state()
                expected = (
                    "a copy of dataset 'd' with the same samples in another storage order or in "
                    f"other chunks, and shuffle {shuffle!r} follows these: expected packing digest "
                    f"{copied.digests.packing}, got {original.digests.packing}"
                )
                with pytest.raises(UsageError, match=expected):
                    copied.batches(BATCH, rank=0, world_size=1).resume(state)


def changed(name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return samples that differ from the first ones in one respect, and options of the writer."""
    samples = dict(samples_of(0))
    path = f"{ROUNDS}/050"
    data = samples[path]
    if name == "a byte":
        samples[path] = data[:-1] + bytes([data[-1] ^ 1])
    elif name == "a path":
        samples[f"{path}x"] = samples.pop(path)
    elif name == "a length":
        samples[path] = data + b"\0"
    elif name == "two swapped samples":
        samples[path], samples[f"{ROUNDS}/051"] = samples[f"{ROUNDS}/051"], data
    elif name == "a sample less":
        del samples[path]
    return samples, {"seed": 4 if name == "the order" else 3}


CHANGES = (
    "nothing", "a byte", "a path", "a length", "two swapped samples", "a sample less", "the order",
    "a label", "a directory",
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_that_differs_is_refused(tmp_path: Path, change: str) -> None:
    with dlfs.open(make_volume(tmp_path / "one", "a.img")) as volume:
        for name, made in (("d", "nothing"), ("e", change)):
            samples, options = changed(made)
            with volume.writer(name, **options) as writer:
                for path, data in samples.items():
                    label = "other" if made == "a label" and path.endswith("/007") else path[0]
                    writer.add(path, data, attributes={"class": label})
                if made == "a directory":
                    writer.add_directory("empty")
        with volume["d"] as first, volume["e"] as second:
            for shuffle in ("global", "chunk", None):
                state = first.batches(BATCH, shuffle=shuffle, rank=0, world_size=1).state()
                epoch = second.batches(BATCH, rank=0, world_size=1)
                if change == "nothing" or (change == "the order" and shuffle == "global"):
                    epoch.resume(state)
                    continue
                with pytest.raises(UsageError) as caught:
                    epoch.resume(state)
                if change == "the order":
                    assert "in another storage order or in other chunks" in str(caught.value)
                else:
                    for dataset in (first, second):
                        named = (
                            f"dataset '{dataset.name}' version 1 (content digest "
                            f"{dataset.digests.content})"
                        )
                        assert named in str(caught.value)


def import_folder(volume: dlfs.Volume, folder: Path, name: str, **options: Any) -> None:
    with closing(open_source(str(folder))) as source:
        source.buffer_bytes = 20_000
        import_dataset(volume, source, name, **options)


def test_the_digests_do_not_depend_on_how_a_dataset_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    samples = {f"{number % 7}/{number:04}": bytes([number % 256]) * 900 for number in range(200)}
    folder = tmp_path / "files"
    for path, data in samples.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    found: dict[str, Digests] = {}
    with dlfs.open(make_volume(tmp_path / "one", "a.img")) as volume:

        def note(name: str) -> None:
            with volume[name] as dataset:
                found[name] = dataset.digests

        def stop(progress: Any) -> None:
            if progress.samples_done >= 120:
                raise KeyboardInterrupt

        for name, options in (
            ("whole", {"step_bytes": None}), ("steps", {"step_bytes": 40_000}),
            ("resumed", {"step_bytes": 40_000}),
        ):  # fmt: skip
            if name == "resumed":
                with pytest.raises(KeyboardInterrupt):
                    import_folder(volume, folder, name, progress=stop, **options)
                assert volume.unfinished()
            import_folder(volume, folder, name, **options)
            note(name)
        with volume.writer("written") as writer:
            for path, data in reversed(samples.items()):
                writer.add(path, data)
        note("written")
        paths = sorted(samples)
        for first in range(0, len(paths), 50):
            with volume.append("appended") if first else volume.writer("appended") as writer:
                for path in paths[first : first + 50]:
                    writer.add(path, samples[path])
        note("appended")
        volume.rename("appended", "renamed")
        note("renamed")
    assert len({each.content for each in found.values()}) == 1
    assert found["resumed"] == found["steps"]
    assert found["renamed"] == found["appended"]


@pytest.mark.parametrize("counts", [(0, 30), (0, 0, 30), (30, 0, 400), (7,), (0,)], ids=str)
def test_equal_columns_have_equal_digests(tmp_path: Path, counts: tuple[int, ...]) -> None:
    """Columns of few and of many strings, in versions with and without samples."""
    with dlfs.open(make_volume(tmp_path / "one", "a.img")) as volume:

        def add(writer: dlfs.DatasetWriter, round_: int) -> None:
            for number in range(counts[round_]):
                texts = {"one": "always", "few": "x" * (number % 3), "many": f"{number:09}"}
                writer.add(f"{round_}/{number:04}", bytes(number), attributes=texts)

        for round_ in range(len(counts)):
            with volume.append("d") if round_ else volume.writer("d") as writer:
                add(writer, round_)
        with volume.writer("at once") as writer:
            for round_ in range(len(counts)):
                add(writer, round_)
        with volume["d"] as dataset:
            dlfs.copy_dataset(dataset, volume, "copy")
        found = [volume.versions(name)[-1] for name in ("d", "at once", "copy")]
    assert len({info.content_digest for info in found}) == 1
    assert found[0].packing_digest == found[2].packing_digest


def test_verify_compares_the_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Digests("11" * 16, "22" * 16)
    monkeypatch.setattr(sealing, "make_digests", lambda *_: wrong)
    with dlfs.open(make_volume(tmp_path / "one", "a.img")) as volume:
        with volume.writer("d") as writer:
            add(writer, samples_of(0))
        found = [finding.message for finding in volume.verify()]
    assert len(found) == 2
    assert f"expected the content digest {wrong.content}, got " in found[0]
    assert f"expected the packing digest {wrong.packing}, got " in found[1]


def test_samples_behind_the_first_block_count(tmp_path: Path) -> None:
    """Digests are made in blocks of samples."""
    count = BLOCK_SAMPLES + 5
    paths = [b"%06d" % number for number in range(count)]
    data = np.arange(count, dtype=np.uint32).view(np.uint8)
    found = set()
    with dlfs.open(make_volume(tmp_path / "one", "a.img", size_bytes=64 * MIB)) as volume:
        for change in range(3):
            data[-4 if change == 1 else 0] ^= change > 0
            with volume.writer("d") as writer:
                starts = np.arange(count, dtype=np.int64) * 4
                writer.add_batch(paths, data, starts, np.full(count, 4))
            found.add(volume.versions("d")[-1].content_digest)
        assert list(volume.verify()) == []
    assert len(found) == 3
