"""Checkpoints of torch.distributed.checkpoint on a volume: saved, shared, removed, killed."""

from __future__ import annotations

import json
import pickle
import random
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import open_device
from dlfs.connection.connection import LocalConnection, OpenOptions
from dlfs.store.members import split_uris
from dlfs.volume.volume import Volume
from tests.support.devices import RecordingDevice, StoppingDevice, StopPoint, WriteLog

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from dlfs.adapters.torch.checkpoint import StorageReader, StorageWriter, pieces  # noqa: E402
from dlfs.adapters.torch.checkpoint import reader as reading  # noqa: E402
from dlfs.adapters.torch.checkpoint import writer as writing  # noqa: E402
from dlfs.adapters.torch.checkpoint.staging import Stager  # noqa: E402
from tests.unit.adapters.torch import saving_ranks  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.fixture
def volume(tmp_path: Path) -> str:
    path = str(tmp_path / "volume.img")
    dlfs.format_volume(path, size_bytes=32 * MIB, chunk_bytes=64 * KIB)
    return path


def state(step: int) -> dict[str, Any]:
    """Return a state with tensors of several kinds, two large ones of which one never changes."""
    return {
        "model": {
            "large": torch.arange(500_000, dtype=torch.float32) + step,
            "frozen": torch.arange(400_000, dtype=torch.float32),
            "bias": torch.full((3, 5), step, dtype=torch.bfloat16),
            "complex": torch.complex(torch.ones(3) * step, torch.zeros(3)),
            "transposed": (torch.arange(12).reshape(3, 4) + step).t(),
            "scalar": torch.tensor(step),
            "empty": torch.empty(0, 3),
            "mask": torch.arange(9) < step,
        },
        "lr": [0.1, {"decay": step}],
        "step": step,
    }


def save(writer: StorageWriter, step: int, content: dict[str, Any] | None = None) -> None:
    dcp.save(content or state(step), checkpoint_id=str(step), storage_writer=writer)


def check(reader: StorageReader, step: int, checkpoint_id: str | None = None) -> None:
    found = state(-1)
    dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader)
    expected = state(step)
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name
        assert found["model"][name].dtype == tensor.dtype
    assert (found["lr"], found["step"]) == (expected["lr"], step)


def names(volume: str) -> list[str]:
    with dlfs.open(volume) as opened:
        return [f"{info.name}@{info.version}" for info in opened.datasets()]


def test_what_was_saved_is_loaded(volume: str) -> None:
    writer, reader = StorageWriter(volume), StorageReader(volume)
    save(writer, 1)
    save(writer, 2)
    check(reader, 2)
    check(reader, 1, "1")
    assert [one.step for one in reader.checkpoints()] == ["1", "2"]
    found = {"model": {"large": torch.empty(500_000, dtype=torch.float64)}}
    dcp.load(found, checkpoint_id="1", storage_reader=reader)
    assert torch.equal(found["model"]["large"], state(1)["model"]["large"].double())


def test_an_unchanged_state_costs_almost_nothing(volume: str) -> None:
    writer, reader = StorageWriter(volume), StorageReader(volume)
    content = state(1)
    save(writer, 1, content)
    with dlfs.open(volume) as opened:
        before = opened.free_bytes
    content["step"] = 1
    save(writer, 2, content)
    with dlfs.open(volume) as opened:
        assert before - opened.free_bytes <= 3 * 64 * KIB  # metadata, its directory, the catalog
    one, two = reader.checkpoints()
    assert (two.written_bytes, two.sources) == (0, one.sources)
    assert two.sample_bytes == one.sample_bytes == one.written_bytes
    check(reader, 1, "2")
    save(writer, 3, content)  # compared by its digests now
    assert reader.checkpoints()[2].written_bytes == 0
    assert reader.checkpoints()[2].sources == one.sources


def test_unchanged_tensors_are_written_once_more_and_then_shared(volume: str) -> None:
    """Less than half of a dataset does not keep it: the rest of it becomes free."""
    writer, reader = StorageWriter(volume, keep=1), StorageReader(volume)
    written = []
    for step in range(1, 5):
        save(writer, step)
        check(reader, step)
        written.append(reader.checkpoints()[0].written_bytes)
    assert written[0] == written[1] > 3_600_000
    assert written[2] == written[3] < 2_100_000
    assert names(volume) == ["checkpoint:2:shards@2", "checkpoint:4@1", "checkpoint:4:shards@1"]


def test_pieces_of_a_tensor_are_shared(volume: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100_000)
    writer, reader = StorageWriter(volume), StorageReader(volume)
    tensor = torch.arange(250_000, dtype=torch.int32)
    save(writer, 1, {"t": tensor})
    tensor[130_000] = -1
    save(writer, 2, {"t": tensor})
    assert [one.written_bytes for one in reader.checkpoints()] == [1_000_000, 100_000]
    found = {"t": torch.empty_like(tensor)}
    dcp.load(found, storage_reader=reader)
    assert torch.equal(found["t"], tensor)


def test_keep_removes_old_checkpoints_but_no_shards_in_use(volume: str) -> None:
    writer, reader = StorageWriter(volume, keep=2), StorageReader(volume)
    content = {"frozen": torch.arange(100_000), "step": torch.tensor(0)}
    for step in range(5):
        content["step"].fill_(step)
        save(writer, step, content)
    assert [one.step for one in reader.checkpoints()] == ["3", "4"]
    assert "checkpoint:0:shards@1" in names(volume)  # has the frozen tensor
    assert "checkpoint:2:shards@1" not in names(volume)
    other = StorageWriter(volume, "other")
    save(other, 9, content)
    assert [one.step for one in reader.checkpoints()] == ["3", "4"]


def test_a_checkpoint_is_replaced_under_its_id(volume: str) -> None:
    writer, reader = StorageWriter(volume, keep=3), StorageReader(volume)
    save(writer, 1)
    dcp.save(state(5), checkpoint_id="1", storage_writer=writer)
    check(reader, 5, "1")
    assert [name for name in names(volume) if "shards" not in name] == ["checkpoint:1@2"]
    assert len(reader.checkpoints()) == 1


def test_a_damaged_piece_is_noticed(volume: str) -> None:
    tensor = torch.arange(300_000)
    save(StorageWriter(volume), 1, {"t": tensor})
    needle = tensor[1000:1016].numpy().tobytes()
    with open(volume, "r+b") as file:
        at = file.read().index(needle)
        file.seek(at)
        file.write(b"\1")
    found = {"t": torch.empty_like(tensor)}
    with pytest.raises(CheckpointException, match="checksum"):
        dcp.load(found, storage_reader=StorageReader(volume))
    save(StorageWriter(volume), 2, {"t": tensor})  # is not shared with the damaged one
    dcp.load(found, storage_reader=StorageReader(volume))
    assert torch.equal(found["t"], tensor)


def test_a_full_volume_is_one_clear_error(volume: str) -> None:
    writer, reader = StorageWriter(volume), StorageReader(volume)
    save(writer, 1)
    with pytest.raises(CheckpointException, match=r"checkpoint:2:shards.* free: allocate"):
        save(writer, 2, {"t": torch.arange(9_000_000.0)})
    check(reader, 1)
    save(writer, 2)
    check(reader, 2)


def test_mistakes_are_named(volume: str) -> None:
    with pytest.raises(CheckpointException, match="expected a checkpoint_id"):
        dcp.save({"a": torch.ones(2)}, storage_writer=StorageWriter(volume))
    with pytest.raises(dlfs.UsageError, match="without ':'"):
        StorageWriter(volume, "a:b")
    with pytest.raises(dlfs.UsageError, match="keep"):
        StorageWriter(volume, keep=0)
    with pytest.raises(dlfs.UsageError, match="read-only"):
        StorageWriter("unix:/run/dlfs.sock")
    with pytest.raises(CheckpointException, match="no complete one; complete are: none"):
        dcp.load({"a": torch.ones(2)}, storage_reader=StorageReader(volume))
    assert not StorageWriter.validate_checkpoint_id("a/b")
    assert StorageReader.validate_checkpoint_id("step-100")
    with (
        dlfs.open(volume) as opened,
        opened.writer("checkpoint:7") as other,
    ):
        other.add("a", b"no checkpoint")
    with pytest.raises(dlfs.FormatError, match="checkpoint:7"):
        StorageReader(volume).checkpoints()


def test_a_locked_volume_is_waited_for(volume: str) -> None:
    with dlfs.open(volume) as opened, opened.writer("import") as other:
        other.add("a", b"a")
        with pytest.raises(CheckpointException, match="import"):
            save(StorageWriter(volume, lock_timeout_s=0.05), 1)
    save(StorageWriter(volume), 1)


# ---- async ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_staging", [False, True])
def test_an_async_save_has_the_state_of_its_call(volume: str, *, async_staging: bool) -> None:
    writer, reader = StorageWriter(volume, async_staging=async_staging), StorageReader(volume)
    content = state(0)
    for step in range(1, 4):
        for name, tensor in state(step)["model"].items():
            content["model"][name].copy_(tensor)
        content.update(lr=state(step)["lr"], step=step)
        saved = dcp.async_save(content, checkpoint_id=str(step), storage_writer=writer)
        if async_staging:
            saved.staging_completion.result()
            saved = saved.upload_completion
        content["model"]["large"].zero_()
        content["step"] = -5
        saved.result()
        check(reader, step)
    copy = pickle.loads(pickle.dumps(writer))  # as for a process that saves
    staged = copy.stage(content)
    assert (staged.result() if async_staging else staged)["step"] == -5
    writer.close()
    copy.close()


def test_a_copy_that_fails_later_fails_the_save(volume: str) -> None:
    writer = StorageWriter(volume, async_staging=True)
    saved = dcp.async_save({"lock": threading.Lock()}, checkpoint_id="1", storage_writer=writer)
    with pytest.raises(TypeError, match="pickle"):
        saved.upload_completion.result(60)
    dcp.async_save(state(1), checkpoint_id="1", storage_writer=writer).upload_completion.result()
    check(StorageReader(volume), 1)
    writer.close()


def test_a_copy_that_is_in_use_is_left_alone() -> None:
    stager = Stager()
    shared = torch.arange(10)
    content = {"a": shared, "b": [shared[2:5], {"c": torch.ones(3, 2).t()}], "n": 1}
    first = stager.copy(content)
    shared.add_(100)
    second = stager.copy(content)
    assert first["a"].tolist() == list(range(10))
    assert second["b"][0].tolist() == [102, 103, 104]
    assert torch.equal(second["b"][1]["c"], torch.ones(2, 3))
    address = second["a"].data_ptr()
    del second
    third = stager.copy(content)
    assert third["a"].data_ptr() == address  # the memory is used again
    assert third["b"][0].data_ptr() == address + 2 * 8
    stager.clear()
    del third
    assert stager._free == []  # no memory stays when the last copy is gone


def test_saves_do_not_overlap(volume: str) -> None:
    writer = StorageWriter(volume)
    with dlfs.open(volume) as opened, opened.writer("import") as other:
        saved = dcp.async_save(state(1), checkpoint_id="1", storage_writer=writer)
        while not writer._saving:
            assert not saved.done()
        with pytest.raises(dlfs.UsageError, match="still being saved"):
            save(writer, 2)
        other.add("a", b"a")
    saved.result()
    copy = pickle.loads(pickle.dumps(writer))  # as for a process that saves
    save(copy, 2)
    assert [one.step for one in StorageReader(volume).checkpoints()] == ["1", "2"]


class HeldWriter(StorageWriter):
    """A writer whose saves stop at one of torch's calls until they may go on."""

    def __init__(self, volume: str, call: str) -> None:
        super().__init__(volume)
        self.held, self.go = threading.Event(), threading.Event()

        def wait_then(*args: Any, **options: Any) -> Any:
            self.held.set()
            assert self.go.wait(60)
            return original(*args, **options)

        original = getattr(self, call)
        setattr(self, call, wait_then)


@pytest.mark.parametrize("call", ["prepare_local_plan", "finish"])
def test_the_second_of_two_overlapping_saves_is_refused(volume: str, call: str) -> None:
    writer = HeldWriter(volume, call)
    first = dcp.async_save(state(1), checkpoint_id="1", storage_writer=writer)
    assert writer.held.wait(60)
    second = dcp.async_save(state(2), checkpoint_id="2", storage_writer=writer)
    with pytest.raises(dlfs.UsageError, match=r"'2' .* checkpoint '1' is still being saved"):
        second.result()
    writer.go.set()
    first.result()
    dcp.async_save(state(3), checkpoint_id="3", storage_writer=writer).result()
    assert [one.step for one in StorageReader(volume).checkpoints()] == ["1", "3"]


@pytest.mark.parametrize("call", ["prepare_local_plan", "finish"])
def test_a_save_begins_after_one_that_failed(
    volume: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise dlfs.SpaceError("on purpose")

    writer = StorageWriter(volume)
    for way in (dcp.save, lambda *args, **ids: dcp.async_save(*args, **ids).result()):
        with monkeypatch.context() as patch:
            patch.setattr(writer, call, fail)
            with pytest.raises(CheckpointException, match="on purpose"):
                way(state(1), checkpoint_id="1", storage_writer=writer)
        dcp.async_save(state(2), checkpoint_id="2", storage_writer=writer).result()
    assert [one.step for one in StorageReader(volume).checkpoints()] == ["2"]


# ---- killed --------------------------------------------------------------------------------------


class RecordedWriter(StorageWriter):
    """Saves through devices that a test wraps."""

    wrap: Callable[[Any], Any]

    def _open(self) -> Volume:
        def opener(uri: str, *, writable: bool) -> Any:
            device = open_device(uri, writable=writable)
            return self.wrap(device) if writable else device

        return Volume(LocalConnection(split_uris(self.volume), OpenOptions(opener=opener)))


def small_state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(4000) + step, "frozen": torch.arange(5000), "step": step}


def small_check(uri: str, steps: set[int]) -> int:
    """Load the newest checkpoint, which is that of one of the steps."""
    found = small_state(-1)
    dcp.load(found, storage_reader=StorageReader(uri))
    assert found["step"] in steps
    assert torch.equal(found["w"], small_state(found["step"])["w"])
    assert torch.equal(found["frozen"], torch.arange(5000))
    return int(found["step"])


@pytest.fixture
def memory_volume() -> str:
    uri = f"mem:checkpoint-{uuid.uuid4().hex}?size={2 * MIB}"
    dlfs.format_volume(uri, chunk_bytes=4 * KIB, block_bytes=512)
    return uri


def test_a_save_that_is_killed_at_any_write_leaves_the_last_checkpoint(memory_volume: str) -> None:
    uri = memory_volume
    writer = RecordedWriter(uri, keep=1)
    writer.wrap = lambda device: device
    save(writer, 1, small_state(1))
    log = WriteLog()

    def record(device: Any) -> RecordingDevice:
        recording = RecordingDevice(device, log)
        recording.number = 0  # each lock opens the device again
        return recording

    writer.wrap = record
    save(writer, 2, small_state(2))
    seen = []
    for count in range(len(log.events) + 1):
        for images in (log.images(count), log.reordered_images(count, random.Random(count))):
            with open_device(uri, writable=True) as device:
                device.write(0, images[0])
            seen.append(small_check(uri, {1, 2}))
        if count % 5 == 0:
            save(StorageWriter(uri, keep=1), 3, small_state(3))
            assert small_check(uri, {3}) == 3
            assert len(names(uri)) <= 3  # the killed save left nothing for long
    assert seen[0] == 1
    assert seen[-1] == 2


def test_a_failing_device_leaves_the_last_checkpoint(memory_volume: str) -> None:
    writer = RecordedWriter(memory_volume, keep=1)
    writer.wrap = lambda device: device
    save(writer, 1, small_state(1))
    steps = {1}
    for stop in range(2, 20, 4):
        point = StopPoint(stop)
        writer.wrap = lambda device, point=point: StoppingDevice(device, point)
        with pytest.raises(CheckpointException):
            save(writer, stop, small_state(stop))
        steps = {small_check(memory_volume, {*steps, stop})}  # a removal may fail after the commit


# ---- ranks ---------------------------------------------------------------------------------------


def test_four_ranks_save_and_other_numbers_load(volume: str) -> None:
    assert saving_ranks.run(4, saving_ranks.save, volume, 1) == [None] * 4
    assert len([name for name in names(volume) if "shards" in name]) == 4
    assert saving_ranks.run(2, saving_ranks.load, volume, 1) == [None] * 2
    assert saving_ranks.run(1, saving_ranks.load, volume, 1) == [None]


def test_a_killed_rank_leaves_the_last_checkpoint(volume: str) -> None:
    assert saving_ranks.run(1, saving_ranks.save, volume, 1) == [None]
    for rank, when in ((0, "after"), (1, "before")):
        codes = saving_ranks.run(2, saving_ranks.save_and_die, volume, 2, rank, when)
        assert set(codes) == {-signal.SIGKILL, None}
        assert saving_ranks.run(1, saving_ranks.load, volume, 1) == [None]
    assert saving_ranks.run(2, saving_ranks.save, volume, 2) == [None] * 2
    assert saving_ranks.run(1, saving_ranks.load, volume, 2) == [None]
    used = {source for one in StorageReader(volume).checkpoints() for source in one.sources}
    with dlfs.open(volume) as opened:
        assert {info.uuid for info in opened.datasets() if "shards" in info.name} == used


# ---- damage --------------------------------------------------------------------------------------


def damage(monkeypatch: pytest.MonkeyPatch, name: str, sample: str | None = None) -> None:
    """Make a dataset, or one sample of it, one that cannot be read."""
    dataset, get = Volume.dataset, dlfs.Dataset.get

    def open_dataset(self: Any, wanted: str, *arguments: Any, **options: Any) -> Any:
        if sample is None and wanted.partition("@")[0] == name:
            raise dlfs.ChecksumError(f"checksum of {name}")
        return dataset(self, wanted, *arguments, **options)

    def get_sample(self: Any, key: Any) -> Any:
        if key == sample and self.name == name:
            raise dlfs.ChecksumError(f"checksum of {key} of {name}")
        return get(self, key)

    monkeypatch.setattr(Volume, "dataset", open_dataset)
    monkeypatch.setattr(dlfs.Dataset, "get", get_sample)


def test_a_checkpoint_may_have_the_id_shards(volume: str) -> None:
    writer, reader = StorageWriter(volume, keep=2), StorageReader(volume)
    dcp.save(state(1), checkpoint_id="shards", storage_writer=writer)
    check(reader, 1, "shards")
    save(writer, 2)
    check(reader, 1, "shards")
    check(reader, 2, "2")


def test_many_small_tensors_are_loaded_in_groups(
    volume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(StorageWriter(volume), 1)
    sizes, run = [], reading._run

    def note(opened: Any, pool: Any, loads: Any) -> None:
        sizes.append(len(loads))
        run(opened, pool, loads)

    monkeypatch.setattr(reading, "LOADS_MAX", 3)
    monkeypatch.setattr(reading, "_run", note)
    check(StorageReader(volume), 1)
    assert max(sizes) == 3


@pytest.mark.parametrize(
    ("name", "sample"),
    [("checkpoint:2", "metadata"), ("checkpoint:1:shards", None), ("checkpoint:2:shards", None)],
)
def test_damage_to_the_last_checkpoint_fails_no_save(
    volume: str, monkeypatch: pytest.MonkeyPatch, name: str, sample: str | None
) -> None:
    writer, reader = StorageWriter(volume), StorageReader(volume)
    save(writer, 1)
    save(writer, 2)
    with monkeypatch.context() as context:
        damage(context, name, sample)
        save(writer, 3)
    check(reader, 3)


def test_damage_to_one_checkpoint_leaves_the_others(
    volume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = StorageWriter(volume, keep=2), StorageReader(volume)
    save(writer, 1)
    save(writer, 2)
    shards = {name for name in names(volume) if "shards" in name}
    with monkeypatch.context() as context:
        damage(context, "checkpoint:2", "references")
        check(reader, 1)
        check(reader, 1, "1")
        with pytest.raises(CheckpointException, match="checksum of references"):
            check(reader, 2, "2")
        save(writer, 3)
        save(writer, 4)
        check(StorageReader(volume), 4)
        assert shards <= set(names(volume))
    check(reader, 2, "2")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged of checkpoints; torch logs its own steps."""
    return [one.getMessage() for one in caplog.records if one.name == "dlfs.checkpoint"]


def write_old_format(volume: str, dataset: str) -> None:
    """Write the dataset of a checkpoint in format 1: a pickle, and references of names."""
    with dlfs.open(volume) as opened, opened.writer(dataset, layout="path") as writer:
        record = {"checkpoint_format": 1, "sequence": 1, "sources": [f"{dataset}:shards@1"]}
        writer.add("metadata", pickle.dumps({}))
        writer.add("references", json.dumps(record).encode())


def write_newer_format(volume: str, dataset: str) -> None:
    """Write the dataset of a checkpoint of which the next release may have another format."""
    record = {"sequence": 1, "sample_bytes": 0, "written_bytes": 0, "sources": {}}
    with dlfs.open(volume) as opened, opened.writer(dataset, layout="path") as writer:
        writer.add("metadata", b"?")
        writer.add("references", json.dumps({"checkpoint_format": 3, **record}).encode())


@pytest.mark.parametrize(
    ("write", "dataset"),
    [
        (write_old_format, "checkpoint:0"),
        (write_newer_format, "checkpoint:0"),
        (write_newer_format, "other:0"),  # of another run, whose shards may have been renamed
    ],
)
def test_a_checkpoint_of_another_release_stops_no_save(
    volume: str, caplog: pytest.LogCaptureFixture, write: Callable[[str, str], None], dataset: str
) -> None:
    write(volume, dataset)
    writer, reader = StorageWriter(volume, keep=1), StorageReader(volume)
    for step in (1, 2):
        save(writer, step)
        check(reader, step)
    assert "checkpoint:1:shards@1" in names(volume)
    said = [text for text in warnings_of(caplog) if f"dlfs rm {volume} {dataset}@1" in text]
    assert "format 2" in said[0]
    with dlfs.open(volume) as opened:
        opened.remove(dataset)
    caplog.clear()
    save(writer, 3)
    assert not {"checkpoint:1:shards@1", "checkpoint:2:shards@1"} & set(names(volume))
    assert warnings_of(caplog) == []


def test_an_object_that_cannot_be_loaded_is_warned_of_at_the_save(
    volume: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = StorageWriter(volume)
    content = {"step": 1, "where": Path("/"), "names": ["a", {"b": 2.5}]}
    dcp.save(content, checkpoint_id=1, storage_writer=writer)
    (warning,) = warnings_of(caplog)
    assert "'where' is saved, but can be loaded only by StorageReader(..., weights_only" in warning
    assert "PosixPath" in warning
    dcp.save(content, checkpoint_id=2, storage_writer=writer)
    assert warnings_of(caplog) == [warning]
    with pytest.raises(CheckpointException, match="plain values only"):
        dcp.load(dict(content), storage_reader=StorageReader(volume))


def test_a_save_that_another_overtook_is_not_committed(
    volume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = StorageWriter(volume)
    save(writer, 1)
    begin = writer.write_data

    def overtake(plan: Any, planner: Any) -> Any:
        done = begin(plan, planner)
        writer.reset("3")
        return done

    with monkeypatch.context() as context:
        context.setattr(writer, "write_data", overtake)
        with pytest.raises(CheckpointException, match="checkpoint '3' began before its end"):
            save(writer, 2)
        context.undo()
        context.setattr(writing, "commit", lambda *_, **__: writer.reset("5"))
        with pytest.raises(CheckpointException, match="still being saved"):
            save(writer, 4)
    save(writer, 6)
    assert [one.step for one in StorageReader(volume).checkpoints()] == ["1", "6"]
