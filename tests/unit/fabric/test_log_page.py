"""The discovery log page: valid ones, changing ones, and arbitrary bytes."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs.block.nvme import NvmeCommand, NvmeResult
from dlfs.errors import DeviceError, FormatError, LimitError
from dlfs.fabric.log_page import (
    ATTEMPTS,
    RECORDS_MAX,
    DiscoveryRecord,
    RecordKind,
    decode_header,
    decode_record,
    read_log,
)
from tests.support.nvme import DiscoveryRecord as ListedRecord
from tests.support.nvme.identify import discovery_page

NQN = "nqn.2024-01.org.example:disk"


class LogRunner:
    """Answers Get Log Page from bytes, which may change between two commands."""

    def __init__(self, page: Callable[[int], bytes]) -> None:
        self._page = page
        self.commands: list[NvmeCommand] = []

    def run_admin(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        assert (command.opcode, command.cdw10 & 0xFFFF, to_device) == (2, 0x70, False)
        assert data is not None
        assert len(data) == ((command.cdw10 >> 16) + 1) * 4 <= 4096
        page = self._page(len(self.commands))
        self.commands.append(command)
        end = command.cdw12 + len(data)
        if end > len(page):
            return NvmeResult(0x0002, 0)  # a field of the command is not valid
        data[:] = page[command.cdw12 : end]
        return NvmeResult(0, 0)

    run_io = run_admin


def listed_records(count: int) -> list[ListedRecord]:
    return [ListedRecord(f"{NQN}{i}", f"10.0.0.{i % 250 + 1}", 4420 + i, i) for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 4, 5, RECORDS_MAX])
def test_reads_what_there_is_and_no_byte_more(count: int) -> None:
    runner = LogRunner(lambda _: discovery_page(listed_records(count), 7))
    found = read_log(runner, "here")
    assert [(r.subsystem_nqn, r.address, int(r.service_id), r.port_id) for r in found] == [
        (r.nqn, r.address, r.port, r.port_id) for r in listed_records(count)
    ]
    assert {(r.kind, r.transport) for r in found} <= {(RecordKind.SUBSYSTEM, "tcp")}
    assert len(runner.commands) == 2 + -(-count // 4)


def test_decodes_every_field() -> None:
    assert decode_record(
        ListedRecord(NQN, "fd00::1", 8009, 5, referral=True).encode()
    ) == DiscoveryRecord(
        kind=RecordKind.REFERRAL,
        transport="tcp",
        address_family="ipv6",
        address="fd00::1",
        service_id="8009",
        subsystem_nqn=NQN,
        port_id=5,
        secure_channel=False,
    )
    page = bytearray(ListedRecord(NQN, "10.0.0.1", 4420).encode())
    page[0:4] = 77, 0, 9, 0b101
    page[512:520] = b"\x1b[2J\xff a\0"
    found = decode_record(bytes(page))
    assert (found.transport, found.address_family, found.kind) == ("77", "0", RecordKind.UNKNOWN)
    assert found.secure_channel
    assert found.address == "\\x1b[2J\\xff a"


@pytest.mark.parametrize(("before", "after"), [(3, 5), (9, 3), (9, 0), (0, 4)])
def test_a_log_that_changes_is_read_again(before: int, after: int) -> None:
    """Also if the target refuses to read beyond the end of a log that became shorter."""

    def page(commands: int) -> bytes:
        return (
            discovery_page(listed_records(before), 1)
            if commands < 1
            else discovery_page(listed_records(after), 2)
        )

    assert len(read_log(LogRunner(page), "here")) == after


def test_a_refusal_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"1024 bytes of the log page at byte 0.*status 0x2"):
        read_log(LogRunner(lambda _: b""), "here")
    with pytest.raises(DeviceError, match=r"2048 bytes of the log page at byte 5120.*status 0x2"):
        read_log(LogRunner(lambda _: discovery_page(listed_records(6), 1)[:-1]), "here")


def test_a_log_that_keeps_changing_is_given_up() -> None:
    runner = LogRunner(lambda commands: discovery_page(listed_records(1), commands))
    with pytest.raises(DeviceError, match=f"{ATTEMPTS} changes"):
        read_log(runner, "here")
    assert len(runner.commands) == 1 + 2 * ATTEMPTS


def test_unknown_values_are_refused() -> None:
    head = struct.pack("<QQH", 1, RECORDS_MAX + 1, 0).ljust(1024, b"\0")
    with pytest.raises(LimitError, match="at most 1024 records, got 1025"):
        decode_header(head, "here")
    with pytest.raises(FormatError, match="format 0, got 1"):
        decode_header(struct.pack("<QQH", 1, 0, 1).ljust(1024, b"\0"), "here")


@given(st.binary(min_size=1024, max_size=1024))
def test_any_bytes_are_a_printable_record(data: bytes) -> None:
    found = decode_record(data)
    for text in (found.address, found.service_id, found.subsystem_nqn, found.transport):
        assert text.isascii()
        assert text.isprintable() or not text
        assert len(text) <= 4 * 256


@given(st.binary(max_size=9 * 1024), st.integers(0, 8))
def test_any_page_is_read_or_refused(data: bytes, count: int) -> None:
    page = bytearray(data.ljust(1024, b"\0"))
    if len(data) % 2:
        page[8:18] = count.to_bytes(8, "little") + b"\0\0"
    runner = LogRunner(lambda _: bytes(page))
    with contextlib.suppress(DeviceError, FormatError, LimitError):
        found = read_log(runner, "here")
        assert len(found) == int.from_bytes(page[8:16], "little")
