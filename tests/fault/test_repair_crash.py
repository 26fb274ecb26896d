"""A crash at any write of a repair loses nothing, and the repair can be repeated.

The media are rebuilt as a power cut after any write or flush may leave them. The remaining members
then open, with or without the new device, and the same repair restores the volume.
"""

import os
import random
import uuid

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import MemoryDevice, open_device
from tests.support.devices import RecordingDevice, WriteLog
from tests.support.volumes import read_dataset, write_dataset

MEMBER_BYTES = 1 * MIB + 256 * KIB
LOST = 1
SEED = 20190923
AT_EACH = "DLFS_CRASH_AT_EACH_WRITE" in os.environ
"""True if each write is both lost and torn; otherwise the two take turns."""
SAMPLES = {f"a/{i}".encode(): bytes([i + 1]) * (700 + 90 * i) for i in range(8)}
SAMPLES[b"large"] = random.Random(1).randbytes(9000)


def read_all(uris):
    return read_dataset(uris, "data")


class Lab:
    """A volume of three members, one of them lost, and a new device."""

    def __init__(self):
        self.names = [f"repair-{uuid.uuid4().hex}" for _ in range(4)]
        *uris, self.new = [f"mem:{name}?size={MEMBER_BYTES}" for name in self.names]
        dlfs.format_volume(uris, chunk_bytes=4 * KIB, block_bytes=512, replicas=2)
        write_dataset(uris, "data", SAMPLES)
        self.left = uris[:LOST] + uris[LOST + 1 :]
        self.whole = [*uris[:LOST], self.new, *uris[LOST + 1 :]]
        self.log = WriteLog()
        self.recorded = []

    def repair(self, opener=open_device):
        return dlfs.repair(self.left, replacements={LOST: self.new}, opener=opener)

    def record(self):
        """Repair the volume and record every write."""

        def opener(uri, *, writable):
            self.recorded.append(uri)
            return RecordingDevice(open_device(uri, writable=writable), self.log)

        self.repair(opener)

    def restore(self, images):
        for uri, image in zip(self.recorded, images, strict=True):
            with open_device(uri, writable=True) as device:
                device.write(0, image)

    def check(self):
        """Check that every sample can be read and that the repair can be repeated."""
        assert read_all(self.left) == SAMPLES
        assert read_all([*self.left, self.new]) == SAMPLES
        report = self.repair()
        assert report.damaged == ()
        with dlfs.open(self.whole) as volume:
            assert list(volume.verify()) == []
            with volume.writer("more") as writer:
                writer.add("x", b"x" * 5000)
        for number in range(3):
            assert read_all(self.whole[:number] + self.whole[number + 1 :]) == SAMPLES

    def forget(self):
        for name in self.names:
            MemoryDevice.forget(name)


@pytest.fixture
def lab():
    made = Lab()
    yield made
    made.forget()


def test_a_crash_at_any_write(lab):
    lab.record()
    assert lab.recorded == [*lab.left, lab.new]
    for count in range(len(lab.log.events) + 1):
        lab.restore(lab.log.images(count))
        lab.check()


def test_a_power_cut_loses_tears_and_reorders_unflushed_writes(lab):
    lab.record()
    for count in range(len(lab.log.events) + 1):
        chance = random.Random(SEED + count)
        ways = [lab.log.reordered_images, lab.log.torn_images]
        for cut in ways if AT_EACH else ways[count % 2 :][:1]:
            lab.restore(cut(count, chance))
            lab.check()


def test_a_crash_while_samples_are_repaired(lab):
    """Samples are damaged in either replica; the repair never overwrites the last intact one."""
    lab.record()
    chance = random.Random(SEED)
    damage_each(lab, chance)
    damaged = [image_of(uri) for uri in lab.whole]
    log = WriteLog()
    recorded = []

    def opener(uri, *, writable):
        recorded.append(uri)
        return RecordingDevice(open_device(uri, writable=writable), log)

    assert dlfs.repair(lab.whole, opener=opener).written_bytes > 0
    assert log.images(0) == damaged
    assert recorded == lab.whole
    for count in range(len(log.events) + 1):
        for images in (log.images(count), log.reordered_images(count, chance)):
            for uri, image in zip(lab.whole, images, strict=True):
                with open_device(uri, writable=True) as device:
                    device.write(0, image)
            assert read_all(lab.whole) == SAMPLES
            assert dlfs.repair(lab.whole).damaged == ()
            with dlfs.open(lab.whole) as volume:
                assert list(volume.verify()) == []


def image_of(uri):
    with open_device(uri) as device:
        return device.read(0, device.size_bytes)


def damage_each(lab, chance):
    """Flip a byte of every small sample, in one replica."""
    with dlfs.open(lab.whole) as volume, volume["data"] as dataset:
        places = [dataset.stat(i) for i in range(len(dataset)) if dataset.lengths([i])[0] < 4096]
    for number, place in enumerate(places):
        if number % 2:
            continue
        with open_device(place.member, writable=True) as device:
            start = (place.offset_bytes + place.length_bytes // 2) // 512 * 512
            block = bytearray(device.read(start, 512))
            block[chance.randrange(512)] ^= 1
            device.write(start, bytes(block))
