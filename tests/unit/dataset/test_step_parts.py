"""A writer in steps ends steps and windows of the shuffle where parts of the source end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.connection.unfinished import PartProgress, load_steps
from dlfs.dataset import committed_steps
from dlfs.dataset.step_writer import StepWriter
from dlfs.errors import UsageError
from dlfs.format.bad_records import BadReport
from dlfs.format.journal import Cursor
from tests.support.volumes import new_volume, read_dataset

ORIGIN = {"source": "a test", "fingerprint": "1"}
SAMPLES = {0: 50, 1: 0, 2: 20, 3: 33}
"""Number of samples of each part."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)


@pytest.fixture
def volume(tmp_path: Path) -> dlfs.Volume:
    return dlfs.open(new_volume(tmp_path / "x.img", size_bytes=16 * MIB, chunk_bytes=16 * KIB))


def opened(volume: dlfs.Volume, **options: Any) -> StepWriter:
    options = {"step_bytes": 120_000, "seed": 3, "stage_bytes": 30_000, "one_pass": True} | options
    return volume.step_writer("x", ORIGIN, **options)


def samples_of(part: int) -> dict[bytes, bytes]:
    return {b"%d/%d" % (part, i): bytes([i, part]) * 2000 for i in range(SAMPLES[part])}


def add(writer: StepWriter, samples: dict[bytes, bytes], **options: Any) -> None:
    lengths = np.array([len(data) for data in samples.values()], np.int64)
    offsets = np.cumsum(lengths) - lengths
    writer.add_batch(list(samples), b"".join(samples.values()), offsets, lengths, **options)


def progress(volume: dlfs.Volume) -> dict[int, PartProgress]:
    volume.refresh()
    generation = volume._local("read").generation
    (record,) = generation.catalog.unfinished
    return load_steps(generation, record).find_parts()


def test_each_part_has_steps_and_windows_of_its_own(volume: dlfs.Volume) -> None:
    with opened(volume) as writer:
        add(writer, samples_of(0), cursor={"at": 50})
        writer.end_part()
        writer.end_part()  # of part 1, which has no samples
        add(writer, samples_of(2), ends_part=True)
        found = progress(volume)
        assert {part: one.is_complete for part, one in found.items()} == {0: True, 1: True}
        assert [one.step_count for one in found.values()] == [2, 1]
        assert (found[0].source_count, found[0].window_count) == (50, 8)
        assert found[0].cursor is not None
        assert (found[0].cursor.value, found[0].cursor.count) == ({"at": 50}, 50)
        assert found[1] == PartProgress(1, 0, 0, Cursor({"at": 50}, 0), True)
        add(writer, samples_of(3))
        assert (writer.part, writer.source_count) == (3, 103)
    volume.refresh()
    every = {path: data for part in SAMPLES for path, data in samples_of(part).items()}
    assert read_dataset(volume, "x") == every


def test_a_part_is_packed_without_regard_to_the_parts_before(volume: dlfs.Volume) -> None:
    orders = []
    for before in (10, 40):
        with opened(volume) as writer:
            add(writer, dict(list(samples_of(0).items())[:before]), ends_part=True)
            add(writer, samples_of(3))
        volume.refresh()
        with volume["x"] as dataset:
            directory = dataset.session.directory
            ours = [i for i, path in enumerate(directory.names()) if path.startswith(b"3/")]
            addresses = directory.addresses()[ours].astype(np.int64)
            orders.append((addresses - addresses.min()).tolist())
    assert orders[0] == orders[1] != sorted(orders[0])


def test_it_goes_on_in_the_part_in_which_it_was_killed(volume: dlfs.Volume) -> None:
    writer = opened(volume)
    add(writer, samples_of(0), ends_part=True)
    add(writer, samples_of(3), cursor={"at": 33})
    writer.abort()
    writer = opened(volume)
    assert (writer.part, writer.source_count, writer.cursor) == (1, 80, None)
    writer.abort()


def test_a_full_step_at_the_end_of_a_part_ends_it(volume: dlfs.Volume) -> None:
    with opened(volume, step_bytes=200_000) as writer:
        add(writer, samples_of(0), ends_part=True)
        assert progress(volume)[0].is_complete
        assert (writer.part, progress(volume)[0].step_count) == (1, 1)
        add(writer, samples_of(2))


def test_a_source_with_less_than_a_step_makes_none(volume: dlfs.Volume) -> None:
    with opened(volume) as writer:
        add(writer, samples_of(2), ends_part=True)
        assert volume.unfinished() == []
    volume.refresh()
    assert read_dataset(volume, "x") == samples_of(2)


def test_parts_end_in_blocks_of_which_samples_are_left_out(volume: dlfs.Volume) -> None:
    with opened(volume) as writer:
        for part in (0, 2):
            samples = samples_of(part)
            lengths = np.array([len(data) for data in samples.values()], np.int64)
            offsets = np.cumsum(lengths) - lengths
            data = b"".join(samples.values())
            writer.add_part(list(samples), data, offsets, lengths, attributes={})
            writer.end_block(len(samples) + 1, None, BadReport(part + 1), ends_part=True)
        found = progress(volume)
        assert (found[0].source_count, found[0].is_complete) == (51, True)


def test_parts_out_of_order_are_refused(volume: dlfs.Volume) -> None:
    writer = opened(volume)
    add(writer, samples_of(0), ends_part=True)
    writer.part = 4  # as a worker would, which imports another part
    add(writer, samples_of(3))
    writer.end_step()
    writer.abort()
    with pytest.raises(UsageError, match=r"part 5 of the source and not all of part 1.*--workers"):
        opened(volume)
