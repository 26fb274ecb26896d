"""Batches on a GPU, over a stand-in for the driver: locks, pins, events, and what is left alone."""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest

import dlfs
from dlfs._native.handle import Handle
from dlfs._native.library import library
from dlfs._native.sample_memory import SampleMemory
from dlfs.base.units import MIB
from dlfs.errors import ChecksumError, UsageError
from tests.service.serving import Service
from tests.support.forked import run_forked
from tests.unit.adapters.torch.conftest import COUNT, SHAPE, array
from tests.unit.adapters.torch.orders import order, reference, take_all

torch = pytest.importorskip("torch")

from dlfs.adapters.torch import ColumnLabels, Jagged, Loader, SampleViews, device  # noqa: E402
from dlfs.adapters.torch.device import COPIES_MAX, gather_bytes  # noqa: E402
from dlfs.adapters.torch.memory import PinnedMemory  # noqa: E402
from dlfs.adapters.torch.page_locks import Copies, PageLock  # noqa: E402
from tests.unit.adapters.torch.stand_in import Runtime, StandIn  # noqa: E402

pytestmark = pytest.mark.torch

REGISTER, UNREGISTER = "register", "unregister"


@pytest.fixture
def gpu(monkeypatch):
    """The stand-in, which loaders use for ``device="cuda"``."""
    made = StandIn(monkeypatch)
    monkeypatch.setattr(device, "Cuda", lambda _device: made)
    made.gathered = 0

    def gather(*arguments):
        made.gathered += 1
        return gather_bytes(*arguments)

    monkeypatch.setattr(device, "gather_bytes", gather)
    return made


def pass_all():
    for event in Runtime.events:
        event.passed = True


def load(dataset, size=16, **options):
    return Loader(dataset, size, device="cuda", pin_memory=True, **options)


def kinds(gpu):
    return [call[0] for call in gpu.runtime.calls]


# ---- the bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0, 1 << 30])  # each sample by a copy of its own, or gathered
def test_samples_come_from_the_locked_arena(samples, gpu, monkeypatch, least):
    monkeypatch.setattr(device, "COPY_BYTES_MIN", least)
    batches = list(load(samples, seed=4))
    assert order(batches) == reference(samples, seed=4)
    for batch in batches:
        assert isinstance(batch.samples, SampleViews)
        for index, sample in zip(batch.indices.tolist(), batch.samples, strict=True):
            assert sample.numpy().tobytes() == samples[index]
    assert gpu.gathered == (len(batches) if least else 0)
    assert not gpu.staged  # the processor copied none


def test_small_samples_are_copied_one_by_one_where_programs_cannot_gather(samples, gpu):
    gpu.blind = True
    with pytest.warns(UserWarning, match="cannot read page-locked memory: the pointer is"):
        batches = list(load(samples))
    for batch in batches:
        for index, sample in zip(batch.indices.tolist(), batch.samples, strict=True):
            assert sample.numpy().tobytes() == samples[index]
    assert not gpu.gathered
    assert not gpu.staged


@pytest.mark.parametrize("form", [{"dtype": "float32", "shape": SHAPE}, {"arrays": True}])
def test_arrays_are_stacked_on_the_gpu(arrays, gpu, form):
    loader = load(arrays, labels=ColumnLabels(arrays, "number"), **form)
    for batch in loader:
        expected = np.stack([array(index) for index in batch.indices.tolist()])
        assert (batch.samples.numpy() == expected).all()
        assert (batch.labels == batch.indices % 5).all()
    assert gpu.gathered
    assert not gpu.staged


def test_jagged_samples(samples, gpu):
    for batch in load(samples, collate="jagged"):
        assert isinstance(batch.samples, Jagged)
        for index, sample in zip(batch.indices.tolist(), batch.samples, strict=True):
            assert sample.numpy().tobytes() == samples[index]
    assert not gpu.staged


def test_fields_come_from_the_locked_arena(tmp_path, gpu):
    path = str(tmp_path / "fields.img")
    dlfs.format_volume(path, size_bytes=32 * MIB)
    types = {"image": "<f4[40,50]", "file": "bytes", "label": "<i8[]", "text": "text"}
    with dlfs.open(path) as volume, volume.writer("scenes", fields=types) as writer:
        for number in range(30):
            image = np.full((40, 50), number, np.float32)
            sample = {"image": image, "file": bytes(number), "label": number, "text": f"{number}"}
            writer.add(b"%02d" % number, sample)
    with dlfs.open(path, memory_bytes=4 * MIB) as volume, volume["scenes"] as scenes:
        for batch in load(scenes, 8):
            assert batch["image"].shape == (len(batch), 40, 50)
            assert (batch["image"] == batch.indices[:, None, None]).all()
            assert [len(one) for one in batch["file"]] == batch.indices.tolist()
            assert batch["label"].tolist() == batch.indices.tolist()
            assert batch["text"] == [str(index) for index in batch.indices.tolist()]
    assert gpu.gathered
    assert not gpu.staged


def test_results_of_a_transform_are_moved(arrays, gpu):
    loader = load(arrays, dtype="float32", shape=SHAPE, transform=lambda sample: sample + 1)
    for batch in loader:
        expected = np.stack([array(index) + 1 for index in batch.indices.tolist()])
        assert (batch.samples.numpy() == expected).all()
    assert not kinds(gpu)  # nothing was read from the arena by the GPU


def test_a_view_is_copied_by_the_processor(samples, gpu):
    for batch in load(dlfs.select(samples, range(50))):
        for index, sample in zip(batch.indices.tolist(), batch.samples, strict=True):
            assert sample.numpy().tobytes() == samples[index]
    assert gpu.staged
    assert not kinds(gpu)


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("equal", [True, False])
def test_ranges_are_gathered_at_any_alignment(unit, equal):
    random = np.random.default_rng(unit)
    source = torch.from_numpy(random.integers(0, 256, 4099, dtype=np.uint8))
    starts = random.integers(0, 200, 20) * unit
    lengths = np.full(20, 24) if equal else random.integers(0, 9, 20) * unit
    found = gather_bytes(source, starts, lengths, lambda tensor: tensor)
    expected = [source.numpy()[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    assert found.numpy().tobytes() == np.concatenate(expected).tobytes()


# ---- locks ---------------------------------------------------------------------------------------


def test_the_arena_is_locked_once_and_unlocked_before_it_is_unmapped(opened, gpu):
    dataset = opened("bytes", memory_bytes=2 * MIB)
    first, second = load(dataset), load(dataset)
    for loader in (first, second, first):
        list(loader)
    (call,) = gpu.runtime.calls
    assert call[0] == REGISTER
    assert call[2] >= 2 * MIB
    assert call[3] == 3  # portable, mapped
    pass_all()
    first.close()
    assert kinds(gpu) == [REGISTER]  # the other loader uses it
    dataset.close()
    assert kinds(gpu) == [REGISTER, UNREGISTER]
    second.close()
    assert kinds(gpu) == [REGISTER, UNREGISTER]


def empty_owner():
    return Handle(library().dlfs_arena_view_unmap)


def test_readers_that_share_an_arena_share_the_lock(gpu):
    memory = (ctypes.c_uint8 * 4096)()
    address = ctypes.addressof(memory)
    first, second = (SampleMemory(empty_owner(), address, 4096, writable=True) for _ in range(2))
    copies = Copies(gpu)
    locks = [PageLock(one, gpu, copies) for one in (first, second)]
    first.close()
    assert kinds(gpu) == [REGISTER]
    second.close()
    assert kinds(gpu) == [REGISTER, UNREGISTER]
    assert all(lock.closed for lock in locks)


def test_closing_a_dataset_waits_for_the_copies(opened, gpu):
    dataset = opened("bytes")
    batches = iter(load(dataset))
    next(batches)
    assert not any(event.passed for event in Runtime.events)
    dataset.close()  # the stand-in checks that all events have passed
    assert kinds(gpu) == [REGISTER, UNREGISTER]


def test_a_loader_that_is_forgotten_unlocks(samples, gpu):
    loader = load(samples)
    list(loader)
    del loader
    gc.collect()
    assert kinds(gpu) == [REGISTER, UNREGISTER]


def test_a_closed_loader_locks_again(samples, gpu):
    loader = load(samples)
    list(loader)
    loader.close()
    list(loader)
    assert kinds(gpu) == [REGISTER, UNREGISTER, REGISTER]


def test_without_pin_memory_nothing_is_locked(samples, gpu):
    list(Loader(samples, 16, device="cuda"))
    assert not kinds(gpu)
    assert gpu.staged == sum(map(len, samples.read(range(COUNT))))


def test_a_refused_lock_is_told_once_and_batches_are_copied(samples, gpu):
    gpu.runtime.code = 2
    loader = load(samples)
    with pytest.warns(UserWarning, match=r"not page-locked: cudaHostRegister of .*: out of mem"):
        batches = list(loader)
    list(loader)
    assert kinds(gpu) == [REGISTER]
    assert gpu.runtime.errors == 0  # or PyTorch would raise it for its next operation
    for index, sample in zip(batches[0].indices.tolist(), batches[0].samples, strict=True):
        assert sample.numpy().tobytes() == samples[index]


def test_a_forked_child_leaves_the_locks_alone(samples, gpu):
    loader = load(samples)
    list(loader)

    def close_all(loaders):
        loaders[0].close()
        samples.close()
        loaders.clear()
        gc.collect()
        assert kinds(gpu) == [REGISTER]

    assert run_forked(close_all, [loader, load(samples)]) == 0
    loader.close()
    assert kinds(gpu) == [REGISTER, UNREGISTER]


# ---- pins and events -----------------------------------------------------------------------------


def test_pins_last_until_the_copy_has_passed(opened, gpu, monkeypatch):
    pinned = []
    begin = device.Copies.begin

    def watch(copies, batch):
        pinned.append((copies, len(copies)))
        return begin(copies, batch)

    monkeypatch.setattr(device.Copies, "begin", watch)
    loader = load(opened("bytes"))
    batches = iter(loader)
    next(batches)
    copies = pinned[0][0]
    assert len(copies) == len(pinned) == device.COPIES_AHEAD + 1
    pass_all()
    next(batches)
    assert len(copies) == 1  # that of the batch ahead, whose copy has just begun


def test_copies_under_way_are_bounded(samples, gpu):
    for number, _ in enumerate(load(samples, 8)):
        under_way = [event for event in Runtime.events if not event.passed]
        assert len(under_way) <= 2 * COPIES_MAX  # one of the samples, one of the whole batch
        assert number < 2 or any(event.waits for event in Runtime.events)


def test_the_stream_of_the_training_waits_for_each_batch(samples, gpu):
    batches = list(load(samples))
    assert len(gpu.runtime.training.awaited) == len(batches)
    assert gpu.recorded
    assert set(gpu.recorded) == {gpu.runtime.training}
    assert not gpu.runtime.streams


def test_an_error_comes_behind_the_batches_before_it(opened, gpu, monkeypatch):
    dataset = opened("bytes")
    read = Loader._read_one

    def fail(self, *args):
        if args[-1] == 3:
            raise ChecksumError("planted")
        return read(self, *args)

    monkeypatch.setattr(Loader, "_read_one", fail)
    loader = load(dataset)
    given = []
    with pytest.raises(ChecksumError, match="planted"):
        take_all(loader, given)
    assert len(given) == 3
    assert loader.position == 3 * 16
    assert kinds(gpu)[-1] == UNREGISTER


def test_a_reader_that_is_closed_meanwhile(opened, gpu):
    dataset = opened("bytes")
    batches = iter(load(dataset))
    next(batches)
    closing = threading.Thread(target=dataset.close)
    closing.start()
    closing.join()
    assert kinds(gpu) == [REGISTER, UNREGISTER]


# ---- page-locked memory of this machine ----------------------------------------------------------


@pytest.mark.parametrize("form", [{}, {"collate": "jagged"}, {"dtype": "uint8", "shape": None}])
def test_without_a_gpu_named_batches_are_copied_once(arrays, gpu, monkeypatch, form):
    locked = []

    def stage(_self, size_bytes):
        locked.append(torch.empty(size_bytes, dtype=torch.uint8))
        return locked[-1]

    def is_locked(tensor):
        return tensor.untyped_storage().data_ptr() in {one.data_ptr() for one in locked}

    monkeypatch.setattr(PinnedMemory, "_staging", stage)
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_locked)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: one if is_locked(one) else one + 0)
    loader = Loader(arrays, 16, pin_memory=True, **form)
    batches = list(loader)
    assert len(locked) == len(batches)
    for batch in batches:
        samples = list(batch.samples)
        assert all(map(is_locked, samples))
        for index, sample in zip(batch.indices.tolist(), samples, strict=True):
            assert sample.numpy().tobytes() == arrays[index]
    assert not kinds(gpu)


# ---- states, workers, arguments ------------------------------------------------------------------


def test_the_state_is_that_of_the_batches_given(samples, gpu):
    loader = load(samples, seed=3)
    taken = []
    for batch in loader:
        taken.append(batch)
        if len(taken) == 4:
            break
    other = load(samples, seed=3)
    other.load_state_dict(loader.state_dict())
    assert order([*taken, *other]) == reference(samples, seed=3)


def test_other_devices_are_refused(samples):
    with pytest.raises(UsageError, match="expected a device such as 'cuda'"):
        Loader(samples, 4, device="gpu0")
    with pytest.raises(UsageError, match="of type cuda or cpu, got 'meta'"):
        Loader(samples, 4, device="meta")
    assert next(iter(Loader(samples, 4, device="cpu"))).indices.device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_an_error_says_so(samples):
    with pytest.raises(UsageError, match="make batches on cuda: expected a GPU, PyTorch finds"):
        next(iter(Loader(samples, 4, device="cuda")))


# ---- through a service ---------------------------------------------------------------------------


@pytest.fixture
def served(torch_volume, tmp_path):
    """The dataset ``bytes`` through a service, whose memory is mapped read-only."""
    service = Service([str(torch_volume)], tmp_path / "s.sock", "--cache", "4MiB")
    try:
        service.wait_ready()
        with dlfs.connect(service.uri) as volume, volume["bytes"] as dataset:
            yield dataset
    finally:
        service.close()


def test_the_memory_of_a_service_is_locked_read_only(served, gpu):
    loader = load(served)
    for batch in loader:
        for index, sample in zip(batch.indices.tolist(), batch.samples, strict=True):
            assert sample.numpy().tobytes() == served[index]
    (call,) = gpu.runtime.calls
    assert call[3] == 3 | 8
    assert not gpu.staged
    served.close()
    assert kinds(gpu) == [REGISTER, UNREGISTER]


def test_a_driver_that_locks_no_read_only_memory(served, gpu):
    gpu.runtime.code = 801
    with pytest.warns(UserWarning, match="not page-locked"):
        batches = list(load(served))
    assert sorted(order(batches)) == list(range(COUNT))
    assert gpu.staged
