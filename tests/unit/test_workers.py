"""Datasets in forked and spawned processes, and epochs that are left behind."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from tests.support.datasets import random_samples
from tests.support.descriptors import open_names
from tests.support.forked import call_forked
from tests.support.volumes import new_volume, write_dataset

COUNT = 400


@pytest.fixture(scope="module")
def volume_path(tmp_path_factory) -> Path:
    path = new_volume(tmp_path_factory.mktemp("workers") / "volume.img", size_bytes=16 * MIB)
    write_dataset(path, "numbers", random_samples(COUNT))
    return path


def digest(dataset: dlfs.Dataset, indices) -> list[str]:
    return [hashlib.sha256(view).hexdigest() for view in dataset.read(indices)]


def work(dataset: dlfs.Dataset, indices, queue) -> None:
    queue.put((digest(dataset, indices), digest(dataset, list(reversed(indices)))))


@pytest.mark.parametrize(
    ("method", "used"), [("fork", False), ("fork", True), ("spawn", True), ("forkserver", False)]
)
def test_a_dataset_works_in_another_process(volume_path, method, used):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    with dlfs.open(str(volume_path)) as volume, volume["numbers"] as dataset:
        expected = digest(dataset, range(COUNT)) if used else None
        parts = [list(range(start, COUNT, 3)) for start in range(3)]
        processes = [context.Process(target=work, args=(dataset, part, queue)) for part in parts]
        for process in processes:
            process.start()
        got = [queue.get() for _ in processes]
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
        expected = expected or digest(dataset, range(COUNT))
        assert sorted(one for part, _ in got for one in part) == sorted(expected)
        assert all(part == back[::-1] for part, back in got)
        assert digest(dataset, range(COUNT)) == expected  # the parent's own goes on


def test_an_epoch_goes_on_in_a_forked_child(volume_path):
    with dlfs.open(str(volume_path)) as volume, volume["numbers"] as dataset:
        whole = [i for batch in dataset.batches(16, seed=3) for i in batch.indices.tolist()]
        epoch = dataset.batches(16, seed=3)
        first = next(epoch)

        def go_on() -> list[int]:
            rest = [i for batch in epoch for i in batch.indices.tolist()]
            assert bytes(first[0]) == dataset[int(first.indices[0])]
            return rest

        rest = call_forked(go_on)
        assert first.indices.tolist() + rest == whole
        assert [i for batch in epoch for i in batch.indices.tolist()] == whole[16:]


def descriptors(path: Path) -> int:
    """Return the number of descriptors that this process has of a file."""
    return open_names().count(os.path.realpath(path))


def test_a_dataset_closed_under_its_epoch_closes_its_devices_with_it(volume_path):
    before = descriptors(volume_path)
    with dlfs.open(str(volume_path)) as volume:
        dataset = volume["numbers"]
        epoch = dataset.batches(7)
        batch = next(epoch)
        expected = [dataset[index] for index in batch.indices.tolist()]
        dataset.close()
        assert batch.to_list() == expected
        with pytest.raises(dlfs.ClosedError, match="use dataset 'numbers': it is closed"):
            next(epoch)
        dataset.close()
    assert descriptors(volume_path) == before


def test_an_error_in_an_epoch_is_what_leaving_the_dataset_raises(volume_path):
    before = descriptors(volume_path)

    def fail() -> None:
        with dlfs.open(str(volume_path)) as volume, volume["numbers"] as dataset:
            epoch = dataset.batches(7)
            for _ in epoch:
                raise KeyError("the training step's own")

    with pytest.raises(KeyError):
        fail()
    assert descriptors(volume_path) == before


LEFT = """
import sys
import dlfs

def leave(closed):
    volume = dlfs.open(sys.argv[1])
    dataset = volume["numbers"]
    if sys.argv[2] == "torch":
        from dlfs.adapters.torch import Loader
        batches = iter(Loader(dataset, 7, transform=bytes))
    else:
        batches = iter(dataset.batches(7))
    batch = next(batches)
    if closed:
        dataset.close()
        volume.close()
    return batches, batch, dataset

sys.dlfs = leave(closed=True), leave(closed=False)  # outlives all modules
"""


@pytest.mark.parametrize("kind", ["plain", pytest.param("torch", marks=pytest.mark.torch)])
def test_an_epoch_that_is_left_ends_with_the_interpreter_in_silence(volume_path, kind):
    if kind == "torch":
        pytest.importorskip("torch")
    ran = subprocess.run(
        [sys.executable, "-c", LEFT, volume_path, kind], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
