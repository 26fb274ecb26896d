"""Tests how a notebook shows volumes, datasets, writers, batches and epochs, open or closed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import dlfs
from tests.support.files import write_at
from tests.support.volumes import new_volume, write_dataset


@pytest.fixture
def volume(tmp_path: Path):
    with dlfs.open(new_volume(tmp_path / "v.img", size_bytes=16 << 20, label="images")) as opened:
        write_dataset(opened, "digits", {f"{number}": b"x" * 1024 for number in range(10)})
        yield opened


def test_volumes(volume):
    assert repr(volume) == f"<Volume 'images' on {volume.uri}>"
    assert repr(pickle.loads(pickle.dumps(volume))) == repr(volume)
    volume.close()
    assert repr(volume) == f"<Volume on {volume.uri}, closed>"


def test_datasets(volume):
    dataset = volume["digits"]
    where = f"'digits' version 1 on {volume.uri}"
    assert repr(dataset) == f"<Dataset {where}: 10 samples, 10.0 KiB>"
    assert repr(pickle.loads(pickle.dumps(dataset))) == f"<Dataset {where}>"  # not open yet
    dataset.close()
    assert repr(dataset) == f"<Dataset {where}, closed>"


def test_writers(volume):
    writer = volume.writer("digits")
    assert repr(writer) == "<DatasetWriter of dataset 'digits' version 2: 0 samples, 0 B, open>"
    writer.add("a", b"x" * 2048)
    assert repr(writer) == "<DatasetWriter of dataset 'digits' version 2: 1 sample, 2.0 KiB, open>"
    writer.abort()
    assert repr(writer).endswith("aborted>")


def test_batches(volume):
    with volume["digits"] as dataset:
        batch = dataset.read([1, 2, 3])
        assert repr(batch) == "<Batch of dataset 'digits': 3 samples, 3.0 KiB>"
        batch.release()
        assert repr(batch) == "<Batch of dataset 'digits': 3 samples, 3.0 KiB, released>"
        assert repr(dataset.read([])) == "<Batch of dataset 'digits': 0 samples, 0 B>"


def test_batches_with_failures(volume):
    with volume["digits"] as dataset:
        place = dataset.stat(4)
        write_at(place.member, place.offset_bytes, b"y")
        batch = dataset.read([3, 4], on_error="skip")
        assert repr(batch) == "<Batch of dataset 'digits': 1 sample, 1.0 KiB, 1 failed>"


def test_epochs(volume):
    with volume["digits"] as dataset:
        epoch = dataset.batches(2, epoch=3, seed=7, rank=1, world_size=2)
        assert repr(epoch) == (
            "<Epoch 3 of dataset 'digits': 3 batches of 2 to come, position 0 of 10, rank 1 of 2, "
            "shuffle 'global', seed 7>"
        )
        next(epoch).release()
        assert "2 batches of 2 to come, position 4 of 10" in repr(epoch)
        epoch.close()
        assert repr(epoch).endswith("seed 7, closed>")
        chosen = dataset.batches(2, where=[1, 5, 7], shuffle=None, workers=2, worker=1)
        assert repr(chosen) == (
            "<Epoch 0 of dataset 'digits': 1 batch of 2 to come, position 0 of 3, rank 0 of 1, "
            "worker 1 of 2, shuffle None, seed 0>"
        )
    assert "3 batches of 2 to come" not in repr(chosen)  # the dataset is closed, and no matter
