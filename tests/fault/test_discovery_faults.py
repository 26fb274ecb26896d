"""Discovery against faulty controllers ends with a list or a typed error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlfs.block import NvmeTcpDiscoverUri, parse_uri
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    LimitError,
    NotFoundError,
)
from dlfs.fabric.discovery import Discovery, discover
from tests.fault.nvme_world import DIGESTS, HASTY, check_nothing_left, resources, script_of
from tests.support.nvme import DEFAULT_NQN, Event, Fault, ScriptedTarget
from tests.support.nvme.faults import (
    Change,
    Complete,
    Cut,
    Finish,
    Garbage,
    Insert,
    Omit,
    Patch,
    Plus,
    Recut,
    Silence,
    SpoilDataDigest,
)
from tests.support.nvme.pdu import C2HData, C2HTermReq

pytestmark = pytest.mark.timeout(60)

ONES = b"\xff"
LOG_FAULTS = {
    "no answer": Fault(Event.LOG_PAGE, Omit(), times=None),
    "silence": Fault(Event.LOG_PAGE, Silence(), times=None),
    "closed": Fault(Event.LOG_PAGE, Cut(), times=None),
    "reset in the data": Fault(Event.LOG_PAGE, Cut(500, reset=True), times=None),
    "garbage": Fault(Event.LOG_PAGE, Garbage(300), times=None),
    "C2HTermReq": Fault(Event.LOG_PAGE, Insert(C2HTermReq(1), before=True), times=None),
    "refused": Fault(Event.LOG_PAGE, Complete(status=0x4109), times=None),
    "no data": Fault(Event.LOG_PAGE, Finish(), times=None),
    "short data": Fault(Event.LOG_PAGE, Recut("short"), times=None),
    "excess data": Fault(Event.LOG_PAGE, Recut("excess"), times=None),
    "wrong CCCID": Fault(Event.LOG_PAGE, Change(C2HData, {"cccid": Plus(7)}), times=None),
    "wrong digest": Fault(Event.LOG_PAGE, SpoilDataDigest(), times=None),
    "endless": Fault(Event.LOG_PAGE, Patch(8, ONES * 8), times=None),
    "too many records": Fault(
        Event.LOG_PAGE, Patch(8, (1 << 20).to_bytes(8, "little")), times=None
    ),
    "unknown format": Fault(Event.LOG_PAGE, Patch(16, ONES * 2), times=None),
    "another generation": Fault(Event.LOG_PAGE, Patch(0, ONES * 8), times=None, chance=0.5),
    "ones": Fault(Event.LOG_PAGE, Patch(0, ONES * 16), times=None),
    "once closed": Fault(Event.LOG_PAGE, Cut()),
    "connect refused": Fault(Event.CONNECT_ADMIN, Complete(status=0x4184), times=None),
    "fatal status": Fault(Event.PROPERTY_GET, Complete(value=3), times=None, match={"cdw11": 0x1C}),
    "subsystems without Identify": Fault(Event.IDENTIFY, Finish(status=0x4002), times=None),
}


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = resources()
    yield
    check_nothing_left(before)


def discovered(target: ScriptedTarget) -> Discovery:
    options = "&".join(f"{name}={value}" for name, value in {**HASTY, **DIGESTS}.items())
    asked = parse_uri(f"nvme-tcp+discover://127.0.0.1:{target.port}?{options}")
    assert isinstance(asked, NvmeTcpDiscoverUri)
    return discover(asked)


def check_said(error: DlfsError, target: ScriptedTarget) -> None:
    assert isinstance(error, DeviceError | FormatError | LimitError | NotFoundError), repr(error)
    assert f"127.0.0.1:{target.port}" in str(error)


@pytest.mark.parametrize("name", LOG_FAULTS)
def test_discovery_succeeds_or_reports_an_error(name: str) -> None:
    script = script_of(LOG_FAULTS[name], seed=12)
    with ScriptedTarget(script=script) as target:
        while not script.played:  # a slow machine may exceed the timeout first
            try:
                found = discovered(target)
                assert len(found.subsystems) <= 1
            except DlfsError as error:
                check_said(error, target)
        target.play(None)
        until_found(target)
        assert target.violations == []


def test_a_command_that_is_never_answered_is_not_retried_for_ever() -> None:
    """Each attempt reaches a target that connects and never answers: the time limit ends it."""
    script = script_of(Fault(Event.LOG_PAGE, Omit(), times=None), seed=13)
    with ScriptedTarget(script=script) as target:
        with pytest.raises(DeviceError) as caught:
            discovered(target)
        check_said(caught.value, target)
        # The timeouts that fit in timeout_ms + connect_ms + reconnect_ms, plus the last one.
        assert script.played <= 6


def until_found(target: ScriptedTarget) -> None:
    """Retry until a target without faults is discovered, since the machine may be slow."""
    while True:
        try:
            found = discovered(target).subsystems
        except DlfsError as error:
            check_said(error, target)
            continue
        if [each.nqn for each in found] == [DEFAULT_NQN] and found[0].namespaces:
            return
