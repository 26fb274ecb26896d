"""A volume over two kernel targets works like one on files and survives their restarts.

The members are namespaces of two targets, each in its own guest. The volume has the demo's digits,
which are read through the API and the mount. It also has larger samples, which exceed the small
sample memory, so that an epoch reads from the targets until its end.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.block import open_device
from dlfs.ingest.importer import import_dataset, open_source
from dlfs.reader.reader import ReaderOptions
from examples.demo.digits import write_digits
from tests.fault.nvme_world import check_nothing_left, resources
from tests.fuse.mounting import mounted
from tests.nvmet.conftest import TwoTargets
from tests.nvmet.guest import START_SECONDS_MAX
from tests.nvmet.volumes import (
    LARGE,
    MEMBERS,
    MEMORY_BYTES,
    add_large,
    assert_whole,
    read_epoch,
)
from tests.support.waiting import retried, wait_for

pytestmark = pytest.mark.qemu

PLAIN: dict[str, int] = {}
DIGESTS = {"hdgst": 1, "ddgst": 1}
RESTART_MS = 1000 * START_SECONDS_MAX
RESTARTS = int(os.environ.get("DLFS_GUEST_RESTARTS", "1"))


@dataclass
class Disaggregated:
    """A volume, its targets, and the imported dataset of digits."""

    targets: TwoTargets
    digits: dict[bytes, bytes]

    def uri(self, **options: object) -> str:
        """Return the URI with member 0 on target 0 and member 1 on target 1."""
        pairs = zip(self.targets, MEMBERS, strict=True)
        return ",".join(target.uri(nqn, **options) for target, nqn in pairs)

    def uri_of_paths(self) -> str:
        """Return the URI in which each member has the other target as a second path."""
        other = [f"127.0.0.1:{target.port}" for target in reversed(self.targets)]
        trios = zip(self.targets, MEMBERS, other, strict=True)
        return ",".join(target.uri(nqn, path=path) for target, nqn, path in trios)


@pytest.fixture(scope="module")
def volume(two_targets: TwoTargets, tmp_path_factory: pytest.TempPathFactory) -> Disaggregated:
    source = tmp_path_factory.mktemp("digits")
    write_digits(source)
    digits = {
        os.fsencode(path.relative_to(source)): path.read_bytes() for path in source.rglob("*.png")
    }
    made = Disaggregated(two_targets, digits)
    dlfs.format_volume(made.uri())
    with dlfs.open(made.uri()) as opened:
        folder = open_source(source)
        import_dataset(opened, folder, "digits", seed=5)
        folder.close()
        add_large(opened)
    return made


@pytest.mark.parametrize("options", [PLAIN, DIGESTS], ids=["plain", "digests"])
def test_all_is_well_and_every_sample_comes_in_global_order(
    volume: Disaggregated, options: dict[str, int]
) -> None:
    with dlfs.open(volume.uri(**options)) as opened:
        assert len(opened.members) == 2
        assert list(opened.verify()) == []
        with opened.dataset("digits") as digits:
            assert_whole(read_epoch(digits, seed=11), volume.digits)
        with opened.dataset("large") as large:
            assert_whole(read_epoch(large, seed=12), LARGE)


@pytest.mark.fuse
def test_the_mount_gives_every_sample(volume: Disaggregated, tmp_path: Path) -> None:
    with mounted(volume.uri(), tmp_path / "mnt", tmp_path / "log") as mount:
        paths = sorted(volume.digits)
        random.Random(13).shuffle(paths)
        for path in paths:
            assert (mount / "digits" / os.fsdecode(path)).read_bytes() == volume.digits[path]
        listed = {
            os.fsencode(p.relative_to(mount / "digits")) for p in (mount / "digits").rglob("*.png")
        }
        assert listed == volume.digits.keys()


# ---- restarts and silence ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(RESTARTS))
def test_a_target_that_restarts_in_mid_epoch_costs_no_sample(
    volume: Disaggregated, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = functools.partial(ReaderOptions, timeout_ms=RESTART_MS)
    monkeypatch.setattr(
        "dlfs.connection.connection.ReaderOptions", patient
    )  # a guest may start slowly
    draw = random.Random(seed)
    victim = draw.choice(volume.targets)
    moment = draw.randrange(1, len(LARGE) // 16 // 2)
    print(f"seed {seed}: target {volume.targets.index(victim)} at batch {moment}")

    def disturbed(batches: Iterator[dict[bytes, bytes]]) -> Iterator[dict[bytes, bytes]]:
        for number, batch in enumerate(batches):
            if number == moment:
                victim.kill()
                victim.guest.start()
            yield batch

    before = resources()
    with (
        dlfs.open(volume.uri(reconnect_ms=RESTART_MS), memory_bytes=MEMORY_BYTES) as opened,
        opened.dataset("large") as large,
    ):
        assert_whole(disturbed(read_epoch(large, seed)), LARGE)
    victim.guest.wait_until_ready()
    check_nothing_left(before)


def test_a_second_path_is_used_when_the_first_is_lost(volume: Disaggregated) -> None:
    lost = volume.targets[0]
    with (
        dlfs.open(volume.uri_of_paths(), memory_bytes=MEMORY_BYTES) as opened,
        opened.dataset("large") as large,
    ):
        batches = read_epoch(large, seed=15)
        first = [next(batches)]
        lost.kill()
        try:
            assert_whole(itertools.chain(first, batches), LARGE)
        finally:
            lost.start()


def test_silence_ends_in_an_error_that_names_the_target(volume: Disaggregated) -> None:
    silent = volume.targets[1]
    options = {"timeout_ms": 4000, "connect_ms": 4000, "reconnect_ms": 4000}
    with (
        dlfs.open(volume.uri(**options), memory_bytes=MEMORY_BYTES) as opened,
        opened.dataset("large") as large,
    ):
        batches = read_epoch(large, seed=14)
        next(batches)
        silent.guest.pause()
        try:
            with pytest.raises(dlfs.DeviceError, match=f"127.0.0.1:{silent.port}") as caught:
                collections.deque(batches, maxlen=0)
            assert caught.value.retryable
        finally:
            silent.guest.resume()
        wait_for(lambda: can_read(large), "the target to be found again")
        assert_whole(read_epoch(large, seed=14), LARGE)


def can_read(dataset: dlfs.Dataset) -> bool:
    """Return True if all devices answer: a lost one is tried again after a while."""
    try:
        with dataset.read(range(len(dataset) // 2)):
            return True
    except (dlfs.DeviceLostError, dlfs.DeviceTimeoutError):
        return False


def test_a_restart_during_an_import_leaves_all_of_it_or_nothing(volume: Disaggregated) -> None:
    victim = volume.targets[0]
    failure: dlfs.DeviceError | None = None
    with dlfs.open(volume.uri(reconnect_ms=14_000)) as opened:
        try:
            with opened.writer("interrupted", stage_bytes=MIB) as writer:
                for number, (path, data) in enumerate(LARGE.items()):
                    if number == len(LARGE) // 2:
                        victim.kill()
                        victim.guest.start()
                    writer.add(path, data)
        except dlfs.DeviceError as error:
            failure = error
        victim.guest.wait_until_ready()
        # A busy guest is ready before it answers in time.
        retried(opened.refresh, dlfs.DeviceLostError)
        assert ("interrupted" in opened) == (failure is None)
        if failure is not None:
            assert f"127.0.0.1:{victim.port}" in str(failure)
        assert list(opened.verify()) == []


def test_a_flush_does_not_cover_writes_before_a_restart(
    volume: Disaggregated,
) -> None:
    """The kernel's target says that it has a volatile cache."""
    victim = volume.targets[0]
    with open_device(victim.uri(MEMBERS[0], reconnect_ms=RESTART_MS), writable=True) as device:
        block = device.read(0, 4096)
        device.write(0, block)
        victim.kill()
        victim.guest.start()
        with pytest.raises(dlfs.DeviceError, match=f"flush .*127.0.0.1:{victim.port}"):
            device.flush()
        device.write(0, block)
        device.flush()
