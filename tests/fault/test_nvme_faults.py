"""Faults of a target, and how the initiator handles each of them.

With every fault, an operation either succeeds, after a retry if one helps, or ends with one typed
error that names the target, within its time limit. It never returns a wrong byte and never hangs
(pytest's timeout would fail the test), and no descriptor or thread is left. Each fault happens
once, where the initiator must recover by itself. It also happens for ever, where the initiator must
give up, and must work again once the target is without faults.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from dlfs.block import BlockDevice, Kind, aligned_buffer, open_device
from dlfs.errors import DeviceError, DlfsError
from tests.fault.nvme_world import (
    ATTENTIVE,
    BLOCK,
    CONTENT,
    DIGESTS,
    HASTY,
    PATIENT,
    check_nothing_left,
    check_typed,
    device_of,
    make_target,
    read_checked,
    resources,
    script_of,
    write_checked,
)
from tests.support.nvme import (
    Event,
    Fault,
    FaultScript,
    Fragments,
    ScriptedTarget,
    Settings,
    Transport,
)
from tests.support.nvme.faults import (
    Change,
    ChangeHeader,
    Complete,
    Cut,
    Delay,
    Drip,
    Finish,
    Garbage,
    Insert,
    Omit,
    Patch,
    Plus,
    Recut,
    Repeat,
    Silence,
    SplitR2T,
    SpoilDataDigest,
    SpoilHeaderDigest,
)
from tests.support.nvme.pdu import (
    R2T,
    C2HData,
    C2HTermReq,
    CapsuleCmd,
    CapsuleResp,
    ICReq,
    ICResp,
)
from tests.support.nvme.script import Action, Gather

pytestmark = pytest.mark.timeout(60)

UNKNOWN = 0xFFF7
STRAY_COMPLETION = CapsuleResp(bytes(12) + UNKNOWN.to_bytes(2, "little") + bytes(2))


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = resources()
    yield
    check_nothing_left(before)


@dataclass(frozen=True)
class Case:
    """A fault, and the result of an operation that meets it once.

    Attributes:
        do: the fault.
        ends: ``well``: the operation succeeds; ``badly``: it fails; ``either``.
        digests: digests with which it is a fault: 1 header, 2 data.
    """

    do: Action
    ends: str = "well"
    digests: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Timeouts of the device."""
        return ATTENTIVE if isinstance(self.do, Omit | Silence | Delay) else PATIENT


# ---- reads ---------------------------------------------------------------------------------------

READS = {
    # completions
    "completion twice": Case(Repeat(CapsuleResp)),
    "no completion": Case(Omit(CapsuleResp)),
    "no answer": Case(Omit()),
    "silence": Case(Silence()),
    "completion of nothing": Case(Insert(STRAY_COMPLETION)),
    "completion of nothing first": Case(Insert(STRAY_COMPLETION, before=True)),
    "wrong CID in the completion": Case(Complete(cid=UNKNOWN)),
    "another command's CID in the completion": Case(Complete(cid=Plus(1))),
    "completion without data": Case(Finish()),
    "wrong SQHD": Case(Complete(head=0xFFFF), "either"),
    "phase bit": Case(Complete(phase=1), "either"),
    "status garbage": Case(Complete(status=0x7FFF, phase=1), "badly"),
    "media error": Case(Complete(status=0x4281), "badly"),
    "media error before any data": Case(Complete(status=0x4281, with_data=False), "badly"),
    "invalid field": Case(Complete(status=0x4002), "badly"),
    "out of range": Case(Complete(status=0x4080), "badly"),
    "passing error": Case(Complete(status=0x022)),
    "passing error that shall not be retried": Case(Complete(status=0x4022), "badly"),
    "namespace not ready": Case(Complete(status=0x082, with_data=False)),
    "path error": Case(Finish(status=0x302)),
    # data
    "unknown CCCID": Case(Change(C2HData, {"cccid": UNKNOWN})),
    "another command's CCCID": Case(Change(C2HData, {"cccid": Plus(1)})),
    "data of nothing": Case(Insert(C2HData(UNKNOWN, 0, 0, bytes(512)), before=True)),
    "data without end": Case(Change(C2HData, {"last": False})),
    "data at a wrong offset": Case(Change(C2HData, {"offset": Plus(512, 32)})),
    "data at a huge offset": Case(Change(C2HData, {"offset": 0xFFFFF000})),
    "DATAL too small": Case(Change(C2HData, {"length": 4092})),
    "DATAL too large": Case(Change(C2HData, {"length": 1 << 20})),
    "DATAL huge": Case(Change(C2HData, {"length": 0xFFFFFFFF})),
    "DATAL 0": Case(Change(C2HData, {"data": b"", "length": 0})),
    "data in halves": Case(Recut("halves")),
    "data reversed": Case(Recut("reversed")),
    "data overlapping": Case(Recut("overlapping")),
    "data twice": Case(Recut("twice")),
    "data with a gap": Case(Recut("gap")),
    "data short": Case(Recut("short")),
    "data in excess": Case(Recut("excess")),
    "data beyond the end": Case(Recut("beyond")),
    "no LAST": Case(Recut("no last")),
    "LAST early": Case(Recut("early last")),
    "SUCCESS early": Case(Recut("success early")),
    "SUCCESS without LAST": Case(Change(C2HData, {"success": True, "last": False})),
    "SUCCESS and a completion": Case(Change(C2HData, {"success": True})),
    # headers
    "oversized PLEN": Case(ChangeHeader(C2HData, {"length_bytes": 0x80000000})),
    "PLEN too small": Case(ChangeHeader(C2HData, {"length_bytes": 8})),
    "PLEN 0": Case(ChangeHeader(CapsuleResp, {"length_bytes": 0})),
    "PLEN one more": Case(ChangeHeader(C2HData, {"length_bytes": Plus(1, 32)})),
    "PLEN of a completion": Case(ChangeHeader(CapsuleResp, {"length_bytes": 4096})),
    "wrong HLEN": Case(ChangeHeader(C2HData, {"header_bytes": 72})),
    "HLEN 0": Case(ChangeHeader(CapsuleResp, {"header_bytes": 0})),
    "PDO in the header": Case(ChangeHeader(C2HData, {"data_offset": 8})),
    "PDO 0": Case(ChangeHeader(C2HData, {"data_offset": 0})),
    "PDO beyond": Case(ChangeHeader(C2HData, {"data_offset": 252})),
    "PDO odd": Case(ChangeHeader(C2HData, {"data_offset": Plus(1, 8)})),
    "unknown type": Case(ChangeHeader(C2HData, {"pdu_type": 0x0A})),
    "type 0xFF": Case(ChangeHeader(CapsuleResp, {"pdu_type": 0xFF})),
    "reserved flags": Case(ChangeHeader(CapsuleResp, {"flags": Plus(0xF0, 8)})),
    "another flag": Case(ChangeHeader(C2HData, {"flags": Plus(1, 8)})),
    "a host's PDU": Case(Insert(CapsuleCmd(bytes(64)), before=True)),
    "a host's ICReq": Case(Insert(ICReq(), before=True)),
    "ICResp again": Case(Insert(ICResp(0, 0, 0, 1 << 17), before=True)),
    "R2T for a read": Case(Insert(R2T(UNKNOWN, 1, 0, 4096), before=True)),
    "garbage": Case(Garbage(64)),
    "much garbage": Case(Garbage(1 << 18)),
    "C2HTermReq": Case(Insert(C2HTermReq(2, 0, bytes(24)), before=True)),
    "C2HTermReq and silence": Case(Insert(C2HTermReq(0xFFFF, 0xFFFFFFFF, bytes(128)))),
    # digests
    "wrong header digest of data": Case(SpoilHeaderDigest(C2HData), digests=1),
    "wrong header digest of the completion": Case(SpoilHeaderDigest(CapsuleResp), digests=1),
    "wrong data digest": Case(SpoilDataDigest(), digests=2),
    "a bit flipped in the data": Case(SpoilDataDigest(data=True), digests=2),
    # the connection
    "closed without an answer": Case(Cut()),
    "reset without an answer": Case(Cut(reset=True)),
    **{f"closed after byte {n}": Case(Cut(n)) for n in (1, 8, 23, 24, 29, 1000, -1, -24, -25)},
    **{f"reset after byte {n}": Case(Cut(n, reset=True)) for n in (1, 8, 24, 100, 4000, -1)},
    # time and order
    "slow drip": Case(Drip(Fragments([64], pause_ms=0.5))),
    "a late answer": Case(Delay(0.05)),
    "a very late answer": Case(Delay(1.0)),
    "answers together": Case(Gather(4, "same")),
    "answers reversed": Case(Gather(4, "reversed")),
    "answers in any order": Case(Gather(8, "random")),
}


WITH_COMPLETIONS = Transport(success_flag=False)
SANITIZED = "DLFS_LIBRARY" in os.environ
"""True in a run by ``test_nvme_sanitized.py``, whose reads have digests; others have none."""

READ_CASES = [
    pytest.param(case, digests, id=f"{name}{', digests' if digests else ''}")
    for name, case in READS.items()
    for digests in [SANITIZED or case.digests > 0]
]


@pytest.mark.parametrize(("case", "digests"), READ_CASES)
def test_a_read_survives(case: Case, digests: bool) -> None:
    times = 8 if isinstance(case.do, Gather) else 1
    script = script_of(Fault(Event.READ, case.do, nth=5, times=times), seed=5)
    options = case.options | (DIGESTS if digests else {})
    target = make_target(script, transport=WITH_COMPLETIONS)
    with target, device_of(target, **options) as device:
        failed = read_checked(device, target)
        assert script.played == times
        assert {"well": failed == 0, "badly": failed == 1, "either": True}[case.ends], script
        assert read_checked(device, target) == 0
        assert target.violations == []


@pytest.mark.parametrize("name", [name for name in READS if name.startswith("data ")])
def test_a_read_without_a_completion_survives(name: str) -> None:
    """Repeat ``test_a_read_survives`` with SUCCESS flags.

    Data under another command's CCCID and with SUCCESS is that command's right answer, as far as
    any host can tell; checksums of samples are there for such targets.
    """
    script = script_of(Fault(Event.READ, READS[name].do, nth=5), seed=5)
    with make_target(script) as target, device_of(target, **PATIENT) as device:
        assert read_checked(device, target) == 0
        assert script.played == 1


LASTING = (
    "no completion",
    "no answer",
    "silence",
    "completion without data",
    "status garbage",
    "passing error",
    "path error",
    "unknown CCCID",
    "another command's CCCID",
    "data without end",
    "data reversed",
    "data short",
    "oversized PLEN",
    "wrong HLEN",
    "garbage",
    "C2HTermReq",
    "wrong header digest of data",
    "wrong data digest",
    "closed without an answer",
    "reset after byte 100",
    "a very late answer",
)


@pytest.mark.parametrize("name", LASTING)
def test_a_read_gives_up(name: str) -> None:
    """Every read meets the fault: each ends in an error, and the device recovers later."""
    script = script_of(Fault(Event.READ, READS[name].do, times=None), seed=6)
    target = make_target(transport=WITH_COMPLETIONS)
    with target, device_of(target, **HASTY, **DIGESTS) as device:
        target.play(script)
        assert read_checked(device, target, 3) == 3
        target.play(None)
        until_right(target, lambda: read_checked(device, target, 8))
        assert target.violations == []


def until_right(target: ScriptedTarget, attempt: Callable[[], int]) -> None:
    """Retry until nothing fails: a lost device reconnects after a while."""
    while True:
        try:
            if attempt() == 0:
                return
        except DlfsError as error:
            check_typed(error, target)


@pytest.mark.parametrize("success_flag", [False, True])
def test_a_wrong_data_digest_costs_its_command_alone(success_flag: bool) -> None:
    """One answer in seven is corrupted: each such command is sent again, on the same connection."""
    garbled = Fault(Event.READ, SpoilDataDigest(data=True), times=None, chance=1 / 7)
    script = script_of(garbled, seed=7)
    target = make_target(script, transport=Transport(success_flag=success_flag))
    with target, device_of(target, **PATIENT, **DIGESTS) as device:
        assert read_checked(device, target, 200) == 0
        status = device.status()  # type: ignore[attr-defined]
        assert script.played > 10
        assert status.digest_errors == status.retries == script.played
        assert status.reconnects == 0
        assert target.violations == []


def test_a_wrong_header_digest_costs_its_queue_pair_alone() -> None:
    script = script_of(Fault(Event.READ, SpoilHeaderDigest(C2HData), nth=9), seed=8)
    with make_target(script) as target, device_of(target, **PATIENT, **DIGESTS) as device:
        assert read_checked(device, target, 60) == 0
        status = device.status()  # type: ignore[attr-defined]
        assert script.played == status.digest_errors == 1
        assert status.reconnects == 0
        assert target.violations == []


@pytest.mark.parametrize("digests", [False, True])
def test_answers_may_be_split_at_every_byte(digests: bool) -> None:
    """An answer of one block arrives in two fragments, for every position of the split."""
    script = FaultScript()
    options = PATIENT | (DIGESTS if digests else {})
    with make_target(script) as target, device_of(target, **options) as device:
        length = 24 + 512 + 24 + 12 * digests
        for cut in range(1, length):
            script.fragments = Fragments([cut], pause_ms=0.2, pieces_max=1)
            assert device.read(cut * 512, 512) == CONTENT[cut * 512 : cut * 512 + 512]
        assert device.status().reconnects == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("sizes", [[1], [2, 3], [7], [24, 1], [1, 4095], [100_000]])
def test_everything_may_arrive_in_fragments(sizes: list[int]) -> None:
    script = FaultScript(fragments=Fragments(sizes))
    options = PATIENT | DIGESTS | {"connect_ms": 10000}
    with make_target(script) as target, device_of(target, **options) as device:
        assert read_checked(device, target, 4) == 0
        assert write_checked(device, target) == 0
        assert device.status().reconnects == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random(seed: int) -> None:
    """Transient faults of all kinds happen at random reads."""
    chance = random.Random(seed)
    passing = [case.do for case in READS.values() if case.ends == "well"]
    quick = [do for do in passing if not isinstance(do, Gather | Silence | Delay | Omit)]
    faults = [Fault(Event.READ, do, times=None, chance=0.01) for do in chance.sample(quick, 6)]
    script = script_of(*faults, seed=seed)
    target = make_target(script, transport=WITH_COMPLETIONS)
    with target, device_of(target, **PATIENT, **DIGESTS) as device:
        for _ in range(5):
            assert read_checked(device, target, 32) == 0, script
        assert target.violations == []


def flush_in_the_end(device: BlockDevice, target: ScriptedTarget) -> None:
    """Flush; retry once, since a flush after a reconnect fails: earlier writes may be lost."""
    try:
        device.flush()
    except DeviceError as error:
        check_typed(error, target)
        assert device.status().reconnects  # type: ignore[attr-defined]
        device.flush()


# ---- writes --------------------------------------------------------------------------------------

ON_R2T = {
    "R2T beyond the end": Case(Change(R2T, {"length": Plus(512, 32)})),
    "R2T at a wrong offset": Case(Change(R2T, {"offset": Plus(512, 32)})),
    "R2T far away": Case(Change(R2T, {"offset": 0xFFFFFE00})),
    "R2T huge": Case(Change(R2T, {"length": 0xFFFFFFFF})),
    "R2T for nothing": Case(Change(R2T, {"length": 0})),
    "R2T of an unknown command": Case(Change(R2T, {"cccid": UNKNOWN})),
    "R2T of another command": Case(Change(R2T, {"cccid": Plus(1)})),
    "R2T twice": Case(Repeat(R2T)),
    "R2Ts beyond MAXR2T": Case(SplitR2T(3)),
    "no R2T": Case(Omit(), "badly"),
    "success without the data": Case(Finish()),
    "failure without the data": Case(Finish(status=0x4280), "badly"),
    "passing failure without the data": Case(Finish(status=0x022)),
    "data for a write": Case(Insert(C2HData(0, 0, 0, bytes(512)), before=True)),
    "wrong header digest of the R2T": Case(SpoilHeaderDigest(R2T), digests=1),
    "PLEN of the R2T": Case(ChangeHeader(R2T, {"length_bytes": 28})),
    "close at the R2T": Case(Cut()),
    "reset at the R2T": Case(Cut(reset=True)),
    "half an R2T": Case(Cut(12)),
}
ON_WRITE_DATA = {
    "close at the data": Case(Cut()),
    "reset at the data": Case(Cut(reset=True)),
    "C2HTermReq at the data": Case(Insert(C2HTermReq(4))),
    "silence at the data": Case(Silence(), "badly"),
}
ON_WRITE = {
    "write completed twice": Case(Repeat(CapsuleResp)),
    "write never completed": Case(Omit(), "badly"),
    "write completed as another": Case(Complete(cid=UNKNOWN)),
    "write fault": Case(Complete(status=0x4280), "badly"),
    "write protected": Case(Complete(status=0x4020), "badly"),
    "passing write error": Case(Complete(status=0x022)),
    "reset after the write": Case(Cut(reset=True)),
    "close in the completion": Case(Cut(20)),
    "R2T after the write": Case(Insert(R2T(UNKNOWN, 0, 0, 512))),
}
WRITES = [
    *((Event.R2T, name, case) for name, case in ON_R2T.items()),
    *((Event.WRITE_DATA, name, case) for name, case in ON_WRITE_DATA.items()),
    *((Event.WRITE, name, case) for name, case in ON_WRITE.items()),
]


@pytest.mark.parametrize(
    ("event", "case"), [pytest.param(event, case, id=name) for event, name, case in WRITES]
)
def test_a_write_survives(event: Event, case: Case) -> None:
    script = script_of(Fault(event, case.do, nth=4), seed=7)
    with make_target(script) as target, device_of(target, **case.options, **DIGESTS) as device:
        failed = write_checked(device, target, length_bytes=16 * 1024)
        assert script.played == 1
        # A write that met silence may still be executed: it must end, with all concurrent writes.
        assert {"well": failed == 0, "badly": failed >= 1, "either": True}[case.ends], script
        assert write_checked(device, target, seed=2) == 0
        flush_in_the_end(device, target)


@pytest.mark.parametrize(
    ("event", "do"),
    [
        (Event.WRITE, Omit()),
        (Event.WRITE, Cut(reset=True)),
        (Event.WRITE, Complete(cid=UNKNOWN)),
        (Event.R2T, SplitR2T(4)),
        (Event.R2T, Omit()),
        (Event.FLUSH, Omit()),
        (Event.FLUSH, Cut()),
        (Event.FLUSH, Complete(status=0x4006)),
        (Event.FLUSH, Garbage(40)),
    ],
)
def test_a_writer_gives_up(event: Event, do: Action) -> None:
    script = script_of(Fault(event, do, times=None), seed=8)
    with make_target() as target, device_of(target, **HASTY) as device:
        target.play(script)

        def write() -> None:
            device.write(0, bytes(16 * 1024))

        operation = device.flush if event == Event.FLUSH else write
        with pytest.raises(DlfsError) as caught:
            operation()
        check_typed(caught.value, target)
        target.play(None)

        until_right(target, lambda: write_checked(device, target, seed=3))


# ---- opening -------------------------------------------------------------------------------------

IC_RESPONSES = {
    "PFV 1": Change(ICResp, {"pfv": 1}),
    "CPDA 32": Change(ICResp, {"alignment": 32}),
    "CPDA 255": Change(ICResp, {"alignment": 255}),
    "digests flipped": Change(ICResp, {"digests": Plus(3, 2)}),
    "digests beyond": Change(ICResp, {"digests": 0xFF}),
    "MAXH2CDATA 0": Change(ICResp, {"limit": 0}),
    "MAXH2CDATA odd": Change(ICResp, {"limit": 4099}),
    "PLEN of ICResp": ChangeHeader(ICResp, {"length_bytes": 1 << 31}),
    "HLEN of ICResp": ChangeHeader(ICResp, {"header_bytes": 24}),
    "type of ICResp": ChangeHeader(ICResp, {"pdu_type": 5}),
    "flags of ICResp": ChangeHeader(ICResp, {"flags": 3}),
    "ICResp twice": Repeat(ICResp),
    "C2HTermReq": Insert(C2HTermReq(6), before=True),
    "a completion instead": Insert(STRAY_COMPLETION, before=True),
}
STEPS = [
    Event.INITIALIZE,
    Event.CONNECT_ADMIN,
    Event.PROPERTY_GET,
    Event.PROPERTY_SET,
    Event.IDENTIFY,
    Event.FEATURES,
    Event.CONNECT_IO,
]
ON_STEPS = {
    "nothing": Omit(),
    "silence": Silence(),
    "closed": Cut(),
    "reset": Cut(10, reset=True),
    "half": Cut(12),
    "garbage": Garbage(200),
    "C2HTermReq": Insert(C2HTermReq(2), before=True),
    "busy": Complete(status=0x181),
    "refused": Complete(status=0x4182),
    "internal error": Finish(status=0x4006),
}
CAP, CSTS = {"cdw11": 0x00}, {"cdw11": 0x1C}
CONTROLLER, SPACE = {"cdw10": 1}, {"cdw10": 0}


def word(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


ABSURDITIES = {
    "CNTLID 0xFFFF": Fault(Event.CONNECT_ADMIN, Complete(value=0xFFFF), times=None),
    "authentication asked for": Fault(Event.CONNECT_ADMIN, Complete(value=0x20001), times=None),
    "unknown host": Fault(Event.CONNECT_ADMIN, Complete(status=0x4184), times=None),
    "MQES 0": Fault(Event.PROPERTY_GET, Complete(value=0), times=None, match=CAP),
    "CAP all ones": Fault(Event.PROPERTY_GET, Complete(value=(1 << 64) - 1), times=None, match=CAP),
    "never ready": Fault(Event.PROPERTY_GET, Complete(value=0), times=None, match=CSTS),
    "fatal status": Fault(Event.PROPERTY_GET, Complete(value=3), times=None, match=CSTS),
    "CSTS all ones": Fault(Event.PROPERTY_GET, Complete(value=0xFFFFFFFF), times=None, match=CSTS),
    "MDTS 255": Fault(Event.IDENTIFY, Patch(77, b"\xff"), times=None, match=CONTROLLER),
    "IOCCSZ 0": Fault(Event.IDENTIFY, Patch(1792, word(0, 4)), times=None, match=CONTROLLER),
    "IOCCSZ huge": Fault(
        Event.IDENTIFY, Patch(1792, word(0xFFFFFFFF, 4)), times=None, match=CONTROLLER
    ),
    "IORCSZ 0": Fault(Event.IDENTIFY, Patch(1796, word(0, 4)), times=None, match=CONTROLLER),
    "ICDOFF huge": Fault(Event.IDENTIFY, Patch(1800, b"\xff\xff"), times=None, match=CONTROLLER),
    "MAXCMD 0": Fault(Event.IDENTIFY, Patch(514, word(0, 2)), times=None, match=CONTROLLER),
    "MAXCMD 1": Fault(Event.IDENTIFY, Patch(514, word(1, 2)), times=None, match=CONTROLLER),
    "MAXCMD huge": Fault(Event.IDENTIFY, Patch(514, b"\xff\xff"), times=None, match=CONTROLLER),
    "SGLS 0": Fault(Event.IDENTIFY, Patch(536, word(0, 4)), times=None, match=CONTROLLER),
    "controller of ones": Fault(
        Event.IDENTIFY, Patch(0, b"\xff" * 4096), times=None, match=CONTROLLER
    ),
    "controller of zeros": Fault(
        Event.IDENTIFY, Patch(0, bytes(4096)), times=None, match=CONTROLLER
    ),
    "NSZE 0": Fault(Event.IDENTIFY, Patch(0, bytes(8)), times=None, match=SPACE),
    "NSZE huge": Fault(Event.IDENTIFY, Patch(0, b"\xff" * 8), times=None, match=SPACE),
    "NSZE overflows": Fault(Event.IDENTIFY, Patch(0, word(1 << 55, 8)), times=None, match=SPACE),
    "LBADS 0": Fault(Event.IDENTIFY, Patch(130, b"\0"), times=None, match=SPACE),
    "LBADS 8": Fault(Event.IDENTIFY, Patch(130, b"\x08"), times=None, match=SPACE),
    "LBADS 31": Fault(Event.IDENTIFY, Patch(130, b"\x1f"), times=None, match=SPACE),
    "LBADS 255": Fault(Event.IDENTIFY, Patch(130, b"\xff"), times=None, match=SPACE),
    "metadata": Fault(Event.IDENTIFY, Patch(128, word(8, 2)), times=None, match=SPACE),
    "unknown format": Fault(Event.IDENTIFY, Patch(26, b"\x0f"), times=None, match=SPACE),
    "namespace of zeros": Fault(Event.IDENTIFY, Patch(0, bytes(4096)), times=None, match=SPACE),
    "namespace of ones": Fault(Event.IDENTIFY, Patch(0, b"\xff" * 4096), times=None, match=SPACE),
    "short Identify": Fault(Event.IDENTIFY, Recut("short"), times=None),
    "descriptors of ones": Fault(
        Event.IDENTIFY, Patch(0, b"\xff" * 4096), times=None, match={"cdw10": 3}
    ),
    "no descriptors": Fault(Event.IDENTIFY, Finish(status=0x4002), times=None, match={"cdw10": 3}),
}

OPENINGS = [
    *((name, Fault(Event.INITIALIZE, do)) for name, do in IC_RESPONSES.items()),
    *(
        (f"accepted and {name}", Fault(Event.ACCEPT, do))
        for name, do in list(ON_STEPS.items())[1:6]
    ),
    *(
        (f"{event.value}: {name}", Fault(event, do))
        for event in STEPS
        for name, do in ON_STEPS.items()
        if not (event == Event.INITIALIZE and isinstance(do, Complete | Finish))
    ),
    *ABSURDITIES.items(),
]


@pytest.mark.parametrize("fault", [pytest.param(fault, id=name) for name, fault in OPENINGS])
def test_opening_succeeds_or_reports_an_error(fault: Fault) -> None:
    """After the fault, a target without faults is opened at once."""
    script = script_of(fault, seed=9)
    with make_target(script) as target:
        while not script.played:  # a slow machine may exceed the timeout first
            try:
                with open_device(target.uri(**HASTY, **DIGESTS), writable=True) as device:
                    if device.size_bytes == len(CONTENT):
                        read_checked(device, target, 4)
            except DlfsError as error:
                check_typed(error, target)
        target.play(None)
        with device_of(target, **PATIENT) as device:
            assert read_checked(device, target, 4) == 0


@pytest.mark.parametrize("event", STEPS)
@pytest.mark.parametrize("do", [Omit(), Cut(), Garbage(300)], ids=repr)
def test_reconnecting_survives_faults_of_its_attempts(event: Event, do: Action) -> None:
    """The device loses its target, and its first attempts to reconnect fail too."""
    with make_target() as target, device_of(target, **ATTENTIVE | {"connect_ms": 200}) as device:
        assert read_checked(device, target, 4) == 0
        script = script_of(Fault(event, do, times=2), seed=10)
        target.play(script)
        target.drop_connections()
        assert read_checked(device, target, 4) == 0
        assert script.played == 2


def test_a_queue_is_refused_by_a_target_that_forgot_the_controller() -> None:
    """The target was restarted unnoticed, so the initiator requests a queue of a new controller."""
    with make_target() as target, device_of(target, **PATIENT) as device:
        refused = Fault(Event.CONNECT_IO, Complete(status=0x4182))
        script = script_of(refused, Fault(Event.PROPERTY_GET, Cut(reset=True), match=CSTS))
        target.play(script)
        assert read_checked(device, target, 4) == 0
        assert script.played == 2


def test_few_queues_are_reported_and_used() -> None:
    with (
        make_target(settings=Settings(io_queues=1)) as target,
        device_of(target, **PATIENT) as device,
        device.queue_pair(4) as queue,
    ):
        buffer = aligned_buffer(BLOCK, BLOCK)
        assert queue.submit(Kind.READ, buffer, 0, 1)
        assert queue.poll(-1) == [(1, BLOCK)]
        with pytest.raises(DlfsError, match=f"127.0.0.1:{target.port}"):
            device.queue_pair(4)


# ---- being idle ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "do", [Omit(), Cut(), Cut(reset=True), Complete(status=0x4006), Garbage(30)], ids=repr
)
def test_the_device_recovers_from_faults_of_keep_alives(do: Action) -> None:
    script = script_of(Fault(Event.KEEP_ALIVE, do), seed=11)
    options = PATIENT | {"keepalive_ms": 400, "timeout_ms": 200}
    with make_target(script) as target, device_of(target, **options) as device:
        assert read_checked(device, target, 4) == 0
        assert script.wait(timeout_s=30)
        assert read_checked(device, target) == 0


def test_a_silent_target_ends_in_a_timeout_and_comes_back() -> None:
    with make_target() as target, device_of(target, **HASTY) as device:
        target.pause()
        assert read_checked(device, target, 3) == 3
        target.resume()
        until_right(target, lambda: read_checked(device, target, 4))


def test_a_killed_target_is_lost_and_comes_back() -> None:
    with make_target() as target, device_of(target, **HASTY) as device:
        target.kill()
        assert read_checked(device, target, 3) == 3
        with pytest.raises(DlfsError) as caught:
            open_device(target.uri(**HASTY))
        check_typed(caught.value, target)
        target.restart()
        until_right(target, lambda: read_checked(device, target, 4))


# ---- what an honest target may do, too -----------------------------------------------------------

HONEST = {
    "small data PDUs": Transport(c2h_bytes=512),
    "small R2Ts": Transport(r2t_bytes=4096),
    "small H2CData": Transport(h2c_bytes_max=4096),
    "alignment": Transport(host_alignment=31),
    "no SUCCESS": Transport(success_flag=False),
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("digests", [False, True])
def test_any_target_within_the_specification_works(name: str, digests: bool) -> None:
    options = PATIENT | (DIGESTS if digests else {})
    target = make_target(transport=HONEST[name])
    with target, device_of(target, **options) as device:
        assert read_checked(device, target) == 0
        assert write_checked(device, target) == 0
        assert target.violations == []


@pytest.mark.parametrize(
    "settings",
    [
        Settings(mdts=1),
        Settings(mdts=0),
        Settings(in_capsule_bytes=0),
        Settings(in_capsule_bytes=65536),
        Settings(queue_entries=2),
        Settings(max_commands=1),
        Settings(max_commands=3, queue_entries=1024),
    ],
    ids=repr,
)
def test_limits_of_the_target_are_obeyed(settings: Settings) -> None:
    target = make_target(settings=settings, block_bytes=4096)
    with target, device_of(target, **PATIENT) as device:
        assert device.read(0, len(CONTENT)) == CONTENT
        device.write(0, CONTENT[::-1])
        assert target.namespace.contents == CONTENT[::-1]
        assert target.violations == []
