"""Renaming and pruning datasets, and the space that they take."""

from __future__ import annotations

import pickle
import uuid
from dataclasses import replace

import pytest

import dlfs
from dlfs.format.catalog import Catalog
from dlfs.format.constants import DATASET_VERSION_MAX
from dlfs.format.geometry import ChunkRun
from dlfs.store.renaming import rename_records
from dlfs.store.usage import measure_usage
from tests.support.volumes import write_dataset

SAMPLES = {b"d%d/s%03d" % (i % 3, i): bytes([i]) * (i * 37) for i in range(100)}
FIRST = sorted(SAMPLES)[0]


@pytest.fixture
def volume(tmp_path):
    """A volume of two members with a dataset ``ds``."""
    uris = [str(tmp_path / "a.img"), str(tmp_path / "b.img")]
    dlfs.format_volume(uris, size_bytes=4 << 20, chunk_bytes=16 << 10)
    with dlfs.open(uris) as opened:
        write(opened, "ds")
        yield opened


def write(volume, name, samples=SAMPLES):
    write_dataset(volume, name, samples)


def names(volume):
    return [f"{info.name}@{info.version}" for info in volume.datasets()]


# ---- renaming ------------------------------------------------------------------------------------


def test_a_renamed_dataset_is_the_same_dataset(volume):
    write(volume, "ds", {b"a": b"second"})
    before = volume.versions("ds")
    generation = volume.generation
    renamed = volume.rename("ds", "other")
    assert volume.generation == generation + 1
    assert names(volume) == ["other@1", "other@2"]
    assert [info.uuid for info in renamed] == [info.uuid for info in before]
    assert volume["other@1"].get(FIRST) == SAMPLES[FIRST]
    assert "ds" not in volume
    assert not list(volume.verify())


def test_programs_that_have_a_renamed_dataset_open_read_on(volume):
    with volume["ds"] as dataset, volume["ds"] as another:
        closed = pickle.dumps(another)
        epoch = iter(dataset.batches(10))
        next(epoch).release()
        state = dataset.batches(10, seed=3).state()
        volume.rename("ds", "other")
        write(volume, "ds", {b"a": b"a new one of the old name"})
        assert sum(len(batch) for batch in epoch) == len(SAMPLES) - 10
        with pickle.loads(closed) as loaded:
            assert loaded.get(FIRST) == SAMPLES[FIRST]
    with volume["other"] as dataset:
        dataset.batches(10, seed=3).resume(state)


def test_one_version_becomes_a_dataset_of_its_own(volume):
    write(volume, "ds", {b"a": b"second"})
    assert [info.version for info in volume.rename("ds@2", "best")] == [2]
    assert names(volume) == ["best@2", "ds@1"]
    write(volume, "ds", {b"a": b"third"})
    assert names(volume) == ["best@2", "ds@1", "ds@3"]


def test_a_version_of_a_name_never_means_other_samples(volume):
    volume.rename("ds", "other")
    write(volume, "ds")
    assert names(volume) == ["ds@2", "other@1"]
    volume.remove("ds")
    assert [info.version for info in volume.rename("other", "ds")] == [3]
    volume.rename("ds", "other")
    assert names(volume) == ["other@3"]


def test_names_that_a_dataset_cannot_get(volume):
    write(volume, "taken")
    before = names(volume), volume.generation
    with pytest.raises(dlfs.ExistsError, match="'ds' to 'taken': expected a name that no dataset"):
        volume.rename("ds", "taken")
    with pytest.raises(dlfs.ExistsError):
        volume.rename("ds", "ds")
    for name in ("a@1", "-x", "", "a/b"):
        with pytest.raises(dlfs.UsageError):
            volume.rename("ds", name)
    for name in ("nothing", "ds@7"):
        with pytest.raises(dlfs.NotFoundError):
            volume.rename(name, "fine")
    volume.refresh()
    assert (names(volume), volume.generation) == before


def test_versions_do_not_exceed_the_format(volume):
    session = volume.session
    record = replace(session.catalog.datasets[0], version=DATASET_VERSION_MAX)
    catalog = Catalog.of(1, volume.uuid, (record,), ())
    full = replace(session.superblock, removed=(DATASET_VERSION_MAX,) * 512)
    with pytest.raises(dlfs.LimitError, match="versions"):
        rename_records(catalog, full, [record], b"x")


# ---- pruning -------------------------------------------------------------------------------------


def test_pruning_keeps_the_newest_versions(volume):
    for number in range(4):
        write(volume, "ds", {b"a": b"%d" % number})
    write(volume, "other")
    generation = volume.generation
    assert [info.version for info in volume.prune("ds", keep=2)] == [1, 2, 3]
    assert names(volume) == ["ds@4", "ds@5", "other@1"]
    assert volume.generation == generation + 1
    assert volume.prune("ds", keep=2) == []
    assert volume.generation == generation + 1
    assert not list(volume.verify())


def test_other_versions_than_expected_are_not_pruned(volume):
    write(volume, "ds", {b"a": b"2"})
    shown = [info.uuid for info in volume.versions("ds")[:-1]]
    write(volume, "ds", {b"a": b"3"})
    with pytest.raises(dlfs.StaleError, match="these now: 1, 2; nothing was removed"):
        volume.prune("ds", keep=1, expected=shown)
    with pytest.raises(dlfs.StaleError, match="these now: none"):
        volume.prune("ds", keep=3, expected=shown)
    assert [info.version for info in volume.versions("ds")] == [1, 2, 3]
    assert [info.uuid for info in volume.prune("ds", keep=2, expected=shown)] == shown


def test_what_cannot_be_pruned(volume):
    for keep in (0, -1, 1.5, True):
        with pytest.raises(dlfs.UsageError, match="expected keep as an integer >= 1"):
            volume.prune("ds", keep=keep)
    with pytest.raises(dlfs.UsageError, match="without a version"):
        volume.prune("ds@1", keep=1)
    with pytest.raises(dlfs.NotFoundError):
        volume.prune("nothing", keep=1)


# ---- space ---------------------------------------------------------------------------------------


def test_usage_adds_up(volume):
    write(volume, "ds", {b"a": b"second"})
    write(volume, "other", {})
    usage = volume.usage()
    assert [(one.name, one.version) for one in usage.versions] == [
        ("ds", 1),
        ("ds", 2),
        ("other", 1),
    ]
    assert usage.sample_bytes == sum(map(len, SAMPLES.values())) + len(b"second")
    assert usage.sample_count == len(SAMPLES) + 1
    assert usage.stored_bytes == sum(one.stored_bytes for one in usage.versions)
    assert usage.stored_bytes + usage.catalog_bytes + usage.free_bytes == usage.capacity_bytes
    assert all(one.freed_bytes == one.stored_bytes for one in usage.versions)
    assert volume.usage("ds").stored_bytes == sum(one.stored_bytes for one in usage.versions[:2])
    assert volume.usage("ds@2").versions == usage.versions[1:2]
    with pytest.raises(dlfs.NotFoundError):
        volume.usage("nothing")


def test_usage_counts_every_copy(tmp_path):
    uris = [str(tmp_path / "c.img"), str(tmp_path / "d.img")]
    dlfs.format_volume(uris, size_bytes=4 << 20, replicas=2)
    with dlfs.open(uris) as volume:
        write(volume, "ds")
        usage = volume.usage()
        assert (usage.replicas, usage.media_bytes) == (2, 2 * usage.stored_bytes)
        assert usage.versions[0].media_bytes == 2 * usage.versions[0].stored_bytes


def test_shared_chunks_count_once(volume):
    session = volume.session
    record = session.catalog.datasets[0]
    size = session.superblock.geometry.chunk_bytes
    first = replace(record, data_runs=(ChunkRun(0, 4), ChunkRun(10, 2)), directory_runs=())
    second = replace(
        first, version=2, uuid=uuid.uuid4(), data_runs=(ChunkRun(0, 4), ChunkRun(11, 3))
    )
    catalog = Catalog.of(1, volume.uuid, (first, second), ())
    usage = measure_usage(session.superblock, catalog.datasets)
    assert usage.stored_bytes == 8 * size
    assert [one.stored_bytes for one in usage.versions] == [6 * size, 7 * size]
    assert [one.freed_bytes for one in usage.versions] == [1 * size, 2 * size]


def test_versions_that_were_appended_to_share_chunks(volume):
    with volume.append("ds") as writer:
        writer.add("more", b"more")
    first, second = volume.usage().versions
    both = volume.usage()
    assert both.stored_bytes < first.stored_bytes + second.stored_bytes
    assert both.stored_bytes + both.catalog_bytes + both.free_bytes == both.capacity_bytes
    volume.rename("ds@2", "grown")
    free = volume.free_bytes
    volume.remove("ds")
    assert volume.free_bytes == free + first.freed_bytes
    assert volume.usage().versions[0].freed_bytes == second.stored_bytes
    assert volume["grown"].get(FIRST) == SAMPLES[FIRST]
    with volume["grown"] as grown:
        assert volume.prune("grown", keep=1) == []
        assert len(grown) == len(SAMPLES) + 1
    assert not list(volume.verify())


# ---- other writers -------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["remove", "rename"])
@pytest.mark.parametrize(
    "change",
    [
        lambda volume: volume.remove("ds"),
        lambda volume: volume.remove("ds@1"),
        lambda volume: volume.rename("ds", "new"),
        lambda volume: volume.rename("ds@1", "new"),
        lambda volume: volume.prune("ds", keep=1),
        lambda volume: volume.append("ds").seal(),
    ],
    ids=["rm", "rm version", "mv", "mv version", "prune", "append"],
)
def test_a_change_of_what_another_writer_took_commits_nothing(volume, monkeypatch, change, other):
    """The other writer comes between the look at the volume and its lock."""
    lock = volume._transaction

    def after_the_other(holder):
        monkeypatch.setattr(volume, "_transaction", lock)
        with dlfs.open(volume.uri.split(",")) as another:
            another.remove("ds") if other == "remove" else another.rename("ds", "elsewhere")
        return lock(holder)

    write(volume, "kept", {b"a": b"a"})
    generation = volume.generation
    monkeypatch.setattr(volume, "_transaction", after_the_other)
    with pytest.raises(dlfs.NotFoundError, match="'ds'"):
        change(volume)
    volume.refresh()
    assert volume.generation == generation + 1
    assert names(volume) == (["kept@1"] if other == "remove" else ["elsewhere@1", "kept@1"])
