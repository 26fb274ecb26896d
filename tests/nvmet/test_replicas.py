"""A volume with two replicas of every sample on two kernel targets; either target may be lost."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable

import pytest

import dlfs
from tests.fuse.mounting import run_cli
from tests.nvmet.conftest import TwoTargets
from tests.nvmet.target import KernelTarget
from tests.nvmet.volumes import COPIES, LARGE, MEMORY_BYTES, add_large, assert_whole, read_epoch
from tests.support.volumes import new_volume

pytestmark = pytest.mark.qemu

TIMES = {"timeout_ms": 5000, "connect_ms": 3000, "reconnect_ms": 3000}
PATIENT = {"timeout_ms": 6000, "connect_ms": 5000, "reconnect_ms": 14_000}
"""While nothing is to be lost: an emulated target writes slowly on a busy machine."""


def uri_of(targets: TwoTargets, times: dict[str, int] = TIMES) -> str:
    """Return the URI with copy 0 on target 0 and copy 1 on target 1."""
    pairs = zip(targets, COPIES, strict=True)
    return ",".join(target.uri(nqn, **times) for target, nqn in pairs)


@pytest.fixture(scope="module")
def uri(two_targets: TwoTargets) -> str:
    with dlfs.open(new_volume(uri_of(two_targets, PATIENT), replicas=2)) as volume:
        add_large(volume)
    return uri_of(two_targets)


def reported_states(uri: str) -> list[str]:
    """Return the states of the members that ``dlfs info`` prints."""
    done = run_cli("info", "--json", uri, alone=True)  # which knows of no silent target yet
    assert done.returncode == 0, done.stderr
    return [member["state"] for member in json.loads(done.stdout)["members"]]


def kill(target: KernelTarget) -> Callable[[], None]:
    target.kill()
    return target.start


def silence(target: KernelTarget) -> Callable[[], None]:
    target.guest.pause()
    return target.guest.resume


@pytest.mark.parametrize(("number", "lose"), [(0, kill), (1, silence)], ids=["killed", "silent"])
def test_a_target_that_is_lost_in_mid_epoch_costs_no_sample(
    two_targets: TwoTargets,
    uri: str,
    number: int,
    lose: Callable[[KernelTarget], Callable[[], None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "dlfs")
    expected = ["current", "current"]
    assert reported_states(uri) == expected
    with dlfs.open(uri, memory_bytes=MEMORY_BYTES) as volume, volume.dataset("large") as large:
        batches = read_epoch(large, seed=number)
        first = next(batches)
        bring_back = lose(two_targets[number])
        try:
            assert_whole(itertools.chain([first], batches), LARGE)
            expected[number] = "degraded"
            assert [member.state for member in volume.members] == expected
            expected[number] = "missing"
            assert reported_states(uri) == expected
        finally:
            bring_back()
    assert len(caplog.messages) == 1
    assert f"127.0.0.1:{two_targets[number].port}" in caplog.messages[0]
    assert reported_states(uri) == ["current", "current"]


def test_a_repaired_volume_no_longer_needs_the_other_target(
    two_targets: TwoTargets, uri: str
) -> None:
    remaining, replaced = two_targets
    replaced.wipe(COPIES[1])
    assert reported_states(uri) == ["current", "degraded"]
    remaining_uri, uri_new = uri_of(two_targets, PATIENT).split(",")
    report = dlfs.repair(remaining_uri, replacements={1: uri_new})
    assert (report.replaced, report.damaged) == ((1,), ())
    remaining.kill()
    try:
        with dlfs.open(uri) as volume, volume.dataset("large") as large:
            assert_whole(read_epoch(large, seed=2), LARGE)
    finally:
        remaining.start()
    with dlfs.open(uri) as volume:
        assert [member.state for member in volume.members] == ["current", "current"]
        assert list(volume.verify()) == []
