"""Checkpoints whose datasets were copied, imported, renamed or removed, and hostile ones.

A load gives the tensors that were saved together, or fails. It never gives those of another save,
and runs nothing that the volume names.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.ingest.copying import copy_dataset

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from dlfs.adapters.torch.checkpoint import StorageReader, StorageWriter  # noqa: E402
from dlfs.adapters.torch.checkpoint import metadata as stored  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def make_volume(path: Path) -> str:
    dlfs.format_volume(str(path), size_bytes=16 * MIB, chunk_bytes=64 * KIB)
    return str(path)


@pytest.fixture
def volume(tmp_path: Path) -> str:
    return make_volume(tmp_path / "volume.img")


@pytest.fixture
def other(tmp_path: Path) -> str:
    return make_volume(tmp_path / "other.img")


def save(volume: str, step: int, value: float, **options: Any) -> None:
    content = {"w": torch.full((3000,), value), "lr": value}
    dcp.save(content, checkpoint_id=step, storage_writer=StorageWriter(volume, "run", **options))


def load(volume: str, step: int | None = None, name: str = "run") -> float:
    found = {"w": torch.zeros(3000), "lr": 0.0}
    dcp.load(found, checkpoint_id=step, storage_reader=StorageReader(volume, name))
    assert torch.equal(found["w"], torch.full((3000,), found["lr"]))
    return float(found["lr"])


def import_all(source: str, target: str, *names: str) -> None:
    """Write the samples of datasets to a volume, as an export and an import do."""
    with dlfs.open(source) as opened, dlfs.open(target) as to:
        for name in names:
            with opened[name] as dataset, to.writer(name, layout="path") as writer:
                for path in dataset.paths():
                    writer.add(path, dataset.get(path))
                writer.seal()


def replace(volume: str, name: str, **samples: bytes) -> None:
    """Write a new version of a dataset, in which some samples are others."""
    with dlfs.open(volume) as opened:
        with opened[name] as dataset:
            content = {path.decode(): dataset.get(path) for path in dataset.paths()}
        with opened.writer(name, layout="path") as writer:
            for path, data in sorted({**content, **samples}.items()):
                writer.add(path, data)
            writer.seal()


# ---- copies, renames, removals -------------------------------------------------------------------


def test_metadata_never_finds_the_tensors_of_another_save(volume: str, other: str) -> None:
    save(volume, 1, 1.0)
    save(other, 1, 2.0)
    import_all(volume, other, "run:1")
    with pytest.raises(CheckpointException, match=r"expected the dataset of its tensors with"):
        load(other)
    save(other, 2, 3.0)  # goes on, and shares nothing with a dataset that is not there
    assert load(other, 2) == 3.0
    import_all(volume, other, "run:1:shards", "run:1")  # the names and versions may fit by chance
    with pytest.raises(CheckpointException, match="copied or imported"):
        load(other, 1)


def test_a_copy_of_a_checkpoint_is_refused(volume: str, other: str) -> None:
    save(volume, 1, 1.0)
    save(other, 1, 2.0)
    with dlfs.open(volume) as opened, dlfs.open(other) as target, opened["run:1"] as dataset:
        with pytest.raises(dlfs.UsageError, match=r"tensors are in 'run:1:shards@1', which a copy"):
            copy_dataset(dataset, target)
        assert [info.version for info in target.versions("run:1")] == [1]
        copy_dataset(dataset, opened, "kept:1")  # the tensors are there
    assert load(volume, name="kept") == 1.0
    assert load(other) == 2.0


def test_renamed_shards_are_found_and_stay(volume: str) -> None:
    save(volume, 1, 1.0)
    save(volume, 2, 2.0)
    with dlfs.open(volume) as opened:
        opened.rename("run:1:shards", "moved:1:shards")
        opened.rename("run:2", "kept:2")
    assert (load(volume, 1), load(volume, 2, "kept")) == (1.0, 2.0)
    save(volume, 3, 3.0, keep=1)
    content = {"w": torch.zeros(3000), "lr": 9.0}
    dcp.save(content, checkpoint_id=9, storage_writer=StorageWriter(volume, "moved", keep=1))
    assert load(volume, 2, "kept") == 2.0
    assert load(volume, 3) == 3.0
    with dlfs.open(volume) as opened:
        assert "run:2:shards" in opened


def test_an_appended_or_older_version_reads_its_own_tensors(volume: str) -> None:
    save(volume, 1, 1.0)
    with dlfs.open(volume) as opened, opened.append("run:1:shards") as writer:
        writer.add("more", b"another sample")
        writer.seal()
    assert load(volume) == 1.0
    with dlfs.open(volume) as opened:
        opened.prune("run:1:shards", keep=1)
    with pytest.raises(CheckpointException, match="it was removed"):
        load(volume, 1)
    save(volume, 2, 1.0)  # shares nothing with what was removed
    assert load(volume) == 1.0


def test_a_piece_is_compared_with_the_stored_checksum(volume: str) -> None:
    save(volume, 1, 1.0)
    with dlfs.open(volume) as opened, opened["run:1"] as dataset:
        content = stored.decode(dataset.get("metadata"), "run:1")
    for index, pieces in content.storage_data.items():
        content.storage_data[index] = tuple(p._replace(crc32c=p.crc32c ^ 1) for p in pieces)
    replace(volume, "run:1", metadata=stored.encode(content))
    with pytest.raises(CheckpointException, match=r"expected the checkpoint's piece of .* CRC32C"):
        load(volume)


# ---- hostile volumes -----------------------------------------------------------------------------


class Command:
    """Its pickle makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_save_and_a_load_run_no_code_of_the_volume(volume: str, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    save(volume, 1, 1.0)
    replace(volume, "run:1", metadata=pickle.dumps(Command(trap)))
    with pytest.raises(CheckpointException, match="expected format 2, got other bytes"):
        load(volume)
    save(volume, 2, 2.0)
    assert load(volume) == 2.0
    replace(volume, "run:1", references=pickle.dumps(Command(trap)))
    with pytest.raises(CheckpointException, match="expected a record of format 2"):
        load(volume, 1)
    save(volume, 3, 2.0)
    assert not trap.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_an_object_that_names_code_is_loaded_on_demand_only(
    volume: str, tmp_path: Path, *, zipped: bool
) -> None:
    trap = tmp_path / "trap"
    data = io.BytesIO()
    torch.save(Command(trap), data, _use_new_zipfile_serialization=zipped)

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return io.BytesIO(data.getvalue())

    writer = StorageWriter(volume, "run")
    dcp.save({"x": 1}, checkpoint_id=1, storage_writer=writer, planner=Planner())
    found = {"x": 0}
    with pytest.raises(CheckpointException, match=r"'x'.*plain values only.*weights_only=False"):
        dcp.load(found, storage_reader=StorageReader(volume, "run"))
    assert (found["x"], trap.exists()) == (0, False)
    reader = StorageReader(volume, "run", weights_only=False)
    dcp.load(found, storage_reader=reader)  # the planner of the caller unpickles, as it would
    assert trap.exists()


def test_lengths_beyond_the_volume_are_refused_before_memory_is_allocated(volume: str) -> None:
    save(volume, 1, 1.0)
    with dlfs.open(volume) as opened, opened["run:1"] as dataset:
        content = stored.decode(dataset.get("metadata"), "run:1")
    index = MetadataIndex("lr")
    for source in (content.storage_data[index][0].source, uuid4()):
        piece = content.storage_data[index][0]._replace(source=source, length_bytes=1 << 40)
        content.storage_data[index] = (piece,) * 8
        replace(volume, "run:1", metadata=stored.encode(content))
        with pytest.raises(CheckpointException, match=r"expected (at most|the dataset of its)"):
            load(volume)


def contradict(content: Metadata, case: str) -> None:
    described = content.state_dict_metadata["w"]
    if case == "shape":
        described.size = torch.Size([3001])
        described.chunks[0].sizes = torch.Size([3001])
    elif case == "outside":
        described.chunks[0].offsets = torch.Size([1])
    elif case == "dimensions":
        described.chunks[0].offsets = torch.Size([0, 0])
    elif case == "type":
        properties = TensorProperties(torch.float64, requires_grad=False)
        described.properties = properties
    elif case == "path":
        content.planner_data["lr"] = ("lr", 1 << 40)
    else:
        content.storage_data.pop(MetadataIndex("lr"))


@pytest.mark.parametrize("case", ["shape", "outside", "dimensions", "type", "path", "object"])
def test_metadata_that_contradicts_itself_is_refused(volume: str, case: str) -> None:
    save(volume, 1, 1.0)
    with dlfs.open(volume) as opened, opened["run:1"] as dataset:
        content = stored.decode(dataset.get("metadata"), "run:1")
    contradict(content, case)
    with pytest.raises(dlfs.FormatError, match="expected"):
        stored.decode(stored.encode(content), "run:1")


def test_damaged_metadata_is_a_format_error(volume: str) -> None:
    save(volume, 1, 1.0)
    with dlfs.open(volume) as opened, opened["run:1"] as dataset:
        whole = dataset.get("metadata")
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    refused = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 3))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        cut = chance.choice((len(data), len(data), chance.randrange(len(data))))
        try:
            stored.decode(bytes(data[:cut]), "run:1")
        except dlfs.FormatError:
            refused += 1
    assert refused > 100


def test_what_a_planner_added_beyond_torchs_own_is_refused(volume: str) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, content = super().create_global_plan(all_plans)
            content.planner_data = {"rank": object()}
            return plans, content

    writer = StorageWriter(volume)
    with warnings.catch_warnings(), pytest.raises(CheckpointException, match="planner_data"):
        dcp.save({"x": 1}, checkpoint_id=1, storage_writer=writer, planner=Planner())
