"""A crash at any write of an import or a removal leaves the old or the new generation complete.

There are two kinds of crash. A power cut is simulated: the media is rebuilt from a record of every
write and flush. A process crash is real: a process is killed at write k, for every k. With
replicas, each member alone gives a complete generation too.
"""

import hashlib
import os
import random
import signal
import uuid

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import MemoryDevice, open_device
from dlfs.connection.connection import LocalConnection, OpenOptions
from dlfs.dataset import committed_steps
from dlfs.store.members import split_uris
from dlfs.volume.volume import Volume
from tests.support.devices import RecordingDevice, StoppingDevice, StopPoint, WriteEvent, WriteLog
from tests.support.forked import run_forked
from tests.support.parts import Worker, check_no_leak, open_parts
from tests.support.volumes import new_volume, read_datasets, write_dataset

MEMBER_BYTES = 1 * MIB + 256 * KIB
MEMBERS = 2
SEED = 20190923
STRIDE = 1 if os.environ.get("DLFS_CRASH_AT_EACH_WRITE") else 2
"""Distance of the writes at which a recovery is tried; of a plain crash all writes are."""
CUTS = int(os.environ.get("DLFS_POWER_CUTS", "2"))
"""Power cuts tried after each event, with different writes lost, torn and reordered."""

FIRST = {f"a/{i}".encode(): bytes([i + 1]) * (700 + 90 * i) for i in range(8)}
SECOND = {b"b": random.Random(1).randbytes(9000), b"c/d": random.Random(2).randbytes(5000)}


class GrantingDevice(RecordingDevice):
    """A device in memory to which workers may write; they end with the coordinator here."""

    def check_can_grant(self):
        pass

    def begin_granted(self, slot):
        pass

    def extend_grant(self, until_s, *, incarnation):
        pass

    def granted_writers_gone(self, slot=None):
        return True


class Media:
    """A volume in memory that records its writes and can restore an earlier state."""

    def __init__(self, replicas, member_bytes=MEMBER_BYTES):
        self.replicas = replicas
        self.names = [f"crash-{uuid.uuid4().hex}" for _ in range(MEMBERS)]
        self.uris = [f"mem:{name}?size={member_bytes}" for name in self.names]
        dlfs.format_volume(self.uris, chunk_bytes=4 * KIB, block_bytes=512, replicas=replicas)
        self.log = None

    def run(self, change):
        """Run a change and record its writes."""
        self.log = WriteLog()

        with self.opened() as volume:
            change(volume)

    def opened(self):
        """Open the volume, and record writes to it."""

        def opener(uri, *, writable):
            device = open_device(uri, writable=writable)
            return GrantingDevice(device, self.log) if writable else device

        return Volume(LocalConnection(split_uris(self.uris), OpenOptions(opener=opener)))

    def contents(self):
        with dlfs.open(self.uris) as volume:
            return read_datasets(volume)

    def images(self):
        images = []
        for uri in self.uris:
            with open_device(uri) as device:
                images.append(device.read(0, device.size_bytes))
        return images

    def restore(self, images):
        for uri, image in zip(self.uris, images, strict=True):
            with open_device(uri, writable=True) as device:
                device.write(0, image)

    def forget(self):
        for name in self.names:
            MemoryDevice.forget(name)


@pytest.fixture(params=[1, 2], ids=["plain", "replicas"])
def media(request):
    made = Media(request.param)
    yield made
    made.forget()


@pytest.fixture(params=[1, 2], ids=["plain", "replicas"])
def large_media(request):
    made = Media(request.param, 4 * MIB)
    yield made
    made.forget()


def import_first(volume):
    write_dataset(volume, "first", FIRST)


def prepare_nothing(volume):
    pass


def prepare_two(volume):
    write_dataset(volume, "first", FIRST)
    write_dataset(volume, "other", SECOND)


def remove_first(volume):
    volume.remove("first")


def append(volume, samples):
    appended = {b"appended/" + path: data for path, data in samples.items()}
    write_dataset(volume, "first", appended, append=True)


def prepare_shared(volume):
    prepare_two(volume)
    append(volume, {b"one": bytes(6000)})
    append(volume, {b"two": bytes(3000)})
    volume.remove("first", 1)
    volume.remove("other")


def append_second(volume):
    append(volume, {**SECOND, b"more": bytes(6000)})


def import_in_steps(volume, **layout):
    """Import in steps of a few samples; go on with what is there."""
    origin, names = {"source": "a test", "fingerprint": "1"}, list(FIRST)
    layout = layout or {"layout": "path"}
    with volume.step_writer("first", origin, step_bytes=3000, **layout) as writer:
        for name in names[writer.source_count :] if not writer.is_read else ():
            data = FIRST[name]
            length = np.array([len(data)])
            writer.add_batch([name], data, np.zeros(1, np.int64), length)


def import_in_two_passes(volume):
    """Import in steps, and pack the samples a second time; go on with what is there."""
    import_in_steps(volume, layout="shuffled", stage_bytes=1500)


CASES = {
    "an import": (prepare_nothing, import_first),
    "an import in steps": (prepare_nothing, import_in_steps),
    "an import in two passes": (prepare_nothing, import_in_two_passes),
    "a removal": (prepare_two, remove_first),
    "an append over freed space": (prepare_shared, append_second),
}


def check_state(media, old, new, older=None):
    """Check that the volume opens with the old or the new contents, complete, and is writable.

    A lagging member alone may give the contents before the old ones.
    """
    with dlfs.open(media.uris) as volume:
        got = read_datasets(volume)
        assert got in (old, new)
        assert [f for f in volume.verify() if f.kind != "superblock"] == []
    for uri in media.uris if media.replicas > 1 else ():
        with dlfs.open(uri) as volume:
            assert read_datasets(volume) in (old, new, older)
    return got == new


class States:
    """Checks each state of the media once: many power cuts leave the same bytes."""

    def __init__(self, media, old, new, older=None):
        self.media, self.contents = media, (old, new, older)
        self.known = {}

    def check(self, images):
        """Restore images; return True if they have the new contents."""
        self.media.restore(images)
        digest = b"".join(hashlib.blake2b(image).digest() for image in images)
        if digest not in self.known:
            self.known[digest] = check_state(self.media, *self.contents)
        return self.known[digest]


def check_recovery(media, got_new, old, new):
    """Check that a writer after the crash loses nothing either."""
    with dlfs.open(media.uris) as volume:
        write_dataset(volume, "after", {b"x": b"after the crash" * 300})
        expected = {**(new if got_new else old), ("after", 1): {b"x": b"after the crash" * 300}}
        assert read_datasets(volume) == expected
        assert list(volume.verify()) == []


@pytest.mark.parametrize("case", CASES, ids=lambda name: name.replace(" ", "-"))
def test_a_crash_at_any_write(media, case):
    prepare, change = CASES[case]
    media.run(prepare)
    old = media.contents()
    media.run(change)
    new = media.contents()
    events = len(media.log.events)
    assert old != new
    seen_new = []
    for count in range(events + 1):
        media.restore(media.log.images(count))
        seen_new.append(check_state(media, old, new))
        if count % 3 == 0:
            check_recovery(media, seen_new[-1], old, new)
    assert seen_new == sorted(seen_new)  # once durable, the new contents stay
    assert not seen_new[0]
    assert seen_new[-1]


@pytest.mark.parametrize("case", CASES, ids=lambda name: name.replace(" ", "-"))
def test_a_power_cut_loses_tears_and_reorders_unflushed_writes(media, case):
    prepare, change = CASES[case]
    media.run(prepare)
    old = media.contents()
    media.run(change)
    new = media.contents()
    states = States(media, old, new)
    for count in range(len(media.log.events) + 1):
        chance = random.Random(SEED + count)
        for _ in range(CUTS):
            states.check(media.log.reordered_images(count, chance))
        got_new = states.check(media.log.torn_images(count, chance))
        if count % 3 == 1:
            check_recovery(media, got_new, old, new)


WORKER_COUNTS = 5, 0, 3, 7
"""Number of samples of each part of an import by workers."""


def import_by_workers(volume):
    """Import by two workers; go on with what is there, in another order."""
    options = {"step_bytes": 6000, "stage_bytes": 2500, "part_count": len(WORKER_COUNTS)}
    with open_parts(volume, "first", workers=2, **options) as parts:
        parts.commit(reserve=3 * parts.unit)
        workers = [Worker(volume, parts, name, slot) for slot, name in enumerate("ab")]
        for number, part in enumerate((2, 0, 3, 1)):
            if not parts.is_read and not parts.progress(part).is_complete:
                worker = workers[number % 2].write(part, WORKER_COUNTS)
                for report in worker.reports():
                    parts.commit([report], reserve=parts.unit)
        for worker in workers:
            worker.end()
        parts.seal()


@pytest.mark.parametrize("change", [import_in_steps, import_in_two_passes])
def test_an_import_in_steps_goes_on_after_a_crash_at_any_write(media, change, monkeypatch):
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    check_going_on(media, change, 1)


def test_an_import_by_workers_goes_on_after_a_crash_at_any_write(large_media, monkeypatch):
    monkeypatch.setattr(committed_steps, "PAUSE_S", 0.0)
    check_going_on(large_media, import_by_workers, 3 * STRIDE - 2)


def check_going_on(media, change, stride):
    """Check that an import ends as without a crash at one of some writes."""
    media.run(change)
    new, chance = media.contents(), random.Random(SEED)
    places = addresses(media)
    kept = set()
    log = media.log
    for count in range(0, len(log.events) + 1, stride):
        media.restore(log.reordered_images(count, chance))
        media.log = WriteLog()
        with media.opened() as volume:
            if "first" not in volume:
                kept |= {(info.sample_count, info.packed_again) for info in volume.unfinished()}
                change(volume)
            assert read_datasets(volume) == new
            assert addresses(media) == places
            assert volume.unfinished() == []
            check_no_leak(volume)
            assert [f for f in volume.verify() if f.kind != "superblock"] == []
    assert len(kept) > 2


def addresses(media):
    with dlfs.open(media.uris) as volume, volume["first"] as dataset:
        return dataset.session.directory.addresses().tolist()


def test_a_removed_version_is_not_reused_after_a_crash(media):
    media.run(prepare_two)
    media.run(remove_first)
    for count in range(len(media.log.events) + 1):
        media.restore(media.log.reordered_images(count, random.Random(SEED + count)))
        with dlfs.open(media.uris) as volume:
            write_dataset(volume, "first", SECOND)
            assert volume["first"].version == 2  # the first version may be there or not


def test_a_crash_after_a_crash(media):
    """Check crashes of the writer that recovers the volume, at any write."""
    media.run(import_first)
    old = media.contents()
    media.run(lambda volume: write_dataset(volume, "second", SECOND))
    new = media.contents()
    chance = random.Random(SEED)
    events = media.log.events
    # Only the superblocks' phase differs from a plain import: some copies are new already.
    tail = [i for i, event in enumerate(events) if isinstance(event, WriteEvent)][
        -4 * MEMBERS :: STRIDE
    ]
    for first in tail:
        crashed = media.log.reordered_images(first + 1, chance)
        media.restore(crashed)
        before = new if check_state(media, old, new) else old
        recovery = Media.__new__(Media)
        recovery.names, recovery.uris = media.names, media.uris
        recovery.replicas = media.replicas
        recovery.run(lambda volume: write_dataset(volume, "third", {b"x": bytes(5000)}))
        after = recovery.contents()
        states = States(media, before, after, older=old)
        for second in range(len(recovery.log.events) + 1):
            states.check(recovery.log.reordered_images(second, chance))


@pytest.mark.parametrize("stop", range(0, 40, 3))
def test_a_failing_device_leaves_the_volume_as_it_was(media, stop):
    media.run(import_first)
    old = media.contents()
    point = StopPoint(stop)

    def opener(uri, *, writable):
        device = open_device(uri, writable=writable)
        return StoppingDevice(device, point) if writable else device

    with Volume(LocalConnection(split_uris(media.uris), OpenOptions(opener=opener))) as volume:
        try:
            write_dataset(volume, "second", SECOND)
            failed = False
        except dlfs.DeviceError:
            failed = True
    new = {**old, ("second", 1): SECOND}
    got_new = check_state(media, old, new)
    assert failed or got_new
    check_recovery(media, got_new, old, new)


# ---- a process that is killed --------------------------------------------------------------------


def remove_and_import(uris, kills):
    """Remove and import; the calling process is killed at its write number ``kills``."""
    point = StopPoint(kills, action="kill", torn_blocks=1)

    def opener(uri, *, writable):
        device = open_device(uri, writable=writable)
        return StoppingDevice(device, point) if writable else device

    volume = Volume(LocalConnection(tuple(uris), OpenOptions(opener=opener)))
    volume.remove("first")
    write_dataset(volume, "second", KILLED_MODEL)
    volume.close()


KILLED_MODEL = {f"s/{i}".encode(): bytes([i]) * (i * 211) for i in range(20)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_killed_at_any_write(tmp_path):
    """Send SIGKILL at write k of a removal and an import, for every k until the process ends."""
    paths = [tmp_path / "a", tmp_path / "b"]
    uris = new_volume([str(path) for path in paths], size_bytes=MEMBER_BYTES, chunk_bytes=4 * KIB)
    with dlfs.open(uris) as volume:
        write_dataset(volume, "first", FIRST)
    states = [{("first", 1): FIRST}, {}, {("second", 1): KILLED_MODEL}]
    before = [path.read_bytes() for path in paths]
    seen = []
    for kills in range(200):
        for path, content in zip(paths, before, strict=True):
            path.write_bytes(content)
        code = run_forked(remove_and_import, uris, kills)
        with dlfs.open(uris) as volume:
            got = read_datasets(volume)
            assert got in states
            seen.append(states.index(got))
            assert [f for f in volume.verify() if f.kind != "superblock"] == []
            write_dataset(volume, "after", SECOND)
            assert read_datasets(volume) == {**got, ("after", 1): SECOND}
            assert list(volume.verify()) == []
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2}
