"""Reservation commands byte for byte, reports, and a host's use of them on a model of a target.

The same checks of a host run on SPDK's target in ``tests/spdk/test_reservations.py``.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs.block.nvme import NvmeCommand, NvmeResult
from dlfs.block.reservation import (
    KEY_TAG,
    REPORT_BYTES,
    Reservation,
    ReservationReport,
    acquire,
    get_host_identifier,
    identify_controller,
    identify_namespace,
    register,
    release,
    report,
    reservation_key,
    unregister,
)
from dlfs.errors import DeviceError, LimitError
from tests.support.nvme.reservation import Reservations
from tests.support.reservations import (
    FOREIGN_KEY,
    IMPORT_CHECKS,
    ReservedNamespace,
    check_acquire_and_release,
    check_foreign_registration,
    check_foreign_reservation,
    check_preemption,
    check_release_after_power_loss,
)

KEY = 0x1122334455667788
HOST = bytes(range(16))
OTHER_HOST = bytes(range(16, 32))


# ---- encoding ------------------------------------------------------------------------------------


def test_register() -> None:
    command, data = register(5, KEY)
    assert command == NvmeCommand(0x0D, 5, cdw10=0x00000008)  # RREGA 0, IEKEY, CPTPL 0
    assert data == bytes(8) + bytes.fromhex("8877665544332211")
    command, data = unregister(5, KEY)
    assert command == NvmeCommand(0x0D, 5, cdw10=0x00000001)
    assert data == bytes.fromhex("8877665544332211") + bytes(8)


def test_acquire() -> None:
    command, data = acquire(5, KEY)
    assert command == NvmeCommand(0x11, 5, cdw10=0x00000100)  # RTYPE 1, RACQA 0
    assert data == bytes.fromhex("8877665544332211") + bytes(8)
    command, data = acquire(5, KEY, preempted_key=0xABCD)
    assert command == NvmeCommand(0x11, 5, cdw10=0x00000102)
    assert data == bytes.fromhex("8877665544332211cdab000000000000")
    command, data = acquire(5, KEY, preempted_key=0xABCD, kind=3)
    assert command == NvmeCommand(0x11, 5, cdw10=0x00000302)


def test_release_and_report() -> None:
    command, data = release(5, KEY)
    assert command == NvmeCommand(0x15, 5, cdw10=0x00000100)
    assert data == bytes.fromhex("8877665544332211")
    assert release(5, KEY, kind=3)[0] == NvmeCommand(0x15, 5, cdw10=0x00000300)
    assert report(5) == NvmeCommand(0x0E, 5, cdw10=1023, cdw11=1)  # 4096 bytes, extended


def test_commands_that_probe_for_reservations() -> None:
    assert identify_controller() == NvmeCommand(0x06, 0, cdw10=1)
    assert identify_namespace(5) == NvmeCommand(0x06, 5)
    assert get_host_identifier() == NvmeCommand(0x0A, 0, cdw10=0x81, cdw11=1)


def encode_report(
    kind: int, registrants: list[tuple[int, int, bytes]], *, count: int | None = None
) -> bytes:
    header = struct.pack("<IBHHB", 9, kind, len(registrants) if count is None else count, 0, 0)
    entries = [
        struct.pack("<HB5xQ16s32x", number, status, key, host)
        for number, (status, key, host) in enumerate(registrants, 1)
    ]
    return header.ljust(64, b"\0") + b"".join(entries)


def test_a_report_names_the_holder() -> None:
    found = ReservationReport.decode(encode_report(1, [(0, 7, HOST), (1, KEY, OTHER_HOST)]))
    assert (found.generation, found.kind, len(found.registrants)) == (9, 1, 2)
    assert found.holder is not None
    assert (found.holder.controller, found.holder.key) == (2, KEY)
    assert str(found.holder) == (
        "the host with identifier 101112131415161718191a1b1c1d1e1f (key 0x1122334455667788)"
    )
    assert ReservationReport.decode(encode_report(0, [(0, 7, HOST)])).holder is None


@given(st.binary(max_size=300))
def test_malformed_reports_are_truncated(data: bytes) -> None:
    assert len(ReservationReport.decode(data).registrants) <= len(data) // 64


def test_a_report_of_more_than_was_read() -> None:
    cut = ReservationReport.decode(encode_report(1, [(0, 7, HOST)], count=1000))
    assert len(cut.registrants) == 1


# ---- a host's use of them ------------------------------------------------------------------------


class Controller:
    """A controller of one host, to a namespace with reservations."""

    def __init__(self, reservations: Reservations, host: bytes) -> None:
        self.reservations, self.host = reservations, host
        self.oncs, self.rescap, self.status = 1 << 5, 1 << 1 | 1 << 3, 0

    def run_admin(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        assert data is not None
        assert not to_device
        if command.opcode == 0x06 and command.cdw10 == 1:
            data[520:522] = self.oncs.to_bytes(2, "little")
        elif command.opcode == 0x06:
            data[31] = self.rescap
        else:
            assert command == get_host_identifier()
            data[:16] = self.host
        return NvmeResult(self.status, 0)

    def run_io(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        assert data is not None
        if self.status:
            return NvmeResult(self.status, 0)
        if command.opcode == 0x0E:
            assert command == report(5, len(data))
            data[:] = self.reservations.report({})[: len(data)].ljust(len(data), b"\0")
            return NvmeResult(0, 0)
        assert to_device
        run = {
            0x0D: self.reservations.register,
            0x11: self.reservations.acquire,
            0x15: self.reservations.release,
        }[command.opcode]
        return NvmeResult(run(self.host, command.cdw10, bytes(data)), 0)


def namespace(reservations: Reservations | None = None) -> ReservedNamespace:
    reservations = Reservations() if reservations is None else reservations
    host, other = Controller(reservations, HOST), Controller(reservations, OTHER_HOST)
    return ReservedNamespace(5, host, other, HOST, OTHER_HOST)


def test_a_key_identifies_dlfs_and_its_host() -> None:
    assert reservation_key(HOST) == reservation_key(HOST)
    assert reservation_key(HOST) != reservation_key(OTHER_HOST)
    assert reservation_key(HOST) >> 32 == KEY_TAG >> 32 == 0x444C4653


@pytest.mark.parametrize(
    ("oncs", "rescap", "host"), [(0xDF, 2, HOST), (32, 0xFD, HOST), (32, 2, bytes(16))]
)
def test_a_target_without_reservations(oncs: int, rescap: int, host: bytes) -> None:
    controller = Controller(Reservations(), host)
    controller.oncs, controller.rescap = oncs, rescap
    assert Reservation.probe(controller, 5, "nvme:") is None


def test_a_reservation_is_acquired_and_released() -> None:
    check_acquire_and_release(namespace())


def test_a_release_after_a_power_loss_of_the_target() -> None:
    reservations = Reservations()
    check_release_after_power_loss(namespace(reservations), reservations.lose_power)


@pytest.mark.parametrize("expired", [True, False], ids=["of a dead writer", "a fence"])
def test_a_reservation_of_dlfs_is_preempted_and_the_new_one_stays(expired: bool) -> None:
    check_preemption(namespace(), expired=expired)


@pytest.mark.parametrize("expired", [True, False], ids=["of a dead writer", "without a lease"])
def test_a_reservation_of_other_software_is_left_alone(expired: bool) -> None:
    check_foreign_reservation(namespace(), expired=expired)


def test_a_registration_of_other_software_is_left_alone() -> None:
    check_foreign_registration(namespace())


@pytest.mark.parametrize("check", IMPORT_CHECKS)
def test_a_reservation_of_an_import_with_workers(check: str) -> None:
    IMPORT_CHECKS[check](namespace())


def test_a_power_loss_leaves_workers_to_their_deadlines() -> None:
    reservations = Reservations()
    made = namespace(reservations)
    coordinator, worker = made.probe(made.host), made.probe(made.other)
    coordinator.acquire()
    coordinator.admit()
    worker.join()
    reservations.lose_power()
    coordinator.check_not_taken()
    assert not coordinator.expel(worker.key)
    made.probe(made.other).join()  # another worker, which registers nothing
    assert made.state() == ({}, None)
    coordinator.dismiss(fence=False)
    coordinator.release()
    assert made.state() == ({}, None)


def test_registrations_of_other_software_are_left_alone() -> None:
    reservations = Reservations()
    made = namespace(reservations)
    foreign = Controller(reservations, bytes(range(32, 48)))
    made.register_foreign_key(foreign)
    coordinator = made.probe(made.host)
    coordinator.acquire()
    assert not coordinator.admit()
    coordinator.dismiss(fence=False)
    coordinator.release()
    assert made.state() == ({foreign.host: FOREIGN_KEY}, None)


def test_whether_a_target_can_admit_writers() -> None:
    controller = Controller(Reservations(), HOST)
    for rescap, expected in ((1 << 1, False), (1 << 1 | 1 << 3, True)):
        controller.rescap = rescap
        found = Reservation.probe(controller, 5, "nvme:")
        assert found is not None
        assert found.can_admit == expected


def test_a_report_of_many_hosts() -> None:
    """The holder is the last of them."""
    reservations = Reservations()
    made = namespace(reservations)
    for number in range(1022):
        runner = Controller(reservations, (number + 1000).to_bytes(16, "big"))
        worker = Reservation.probe(runner, 5, "nvme:")
        assert worker is not None
        worker._register()
    coordinator = made.probe(made.host)
    assert coordinator.admit()
    made.probe(made.other).join()
    assert len(made.state()[0]) == 2
    for number in range(1022):
        reservations.keys[(number + 1000).to_bytes(16, "big")] = number + 1
    with pytest.raises(LimitError, match=r"at most 65536 bytes, got 65600"):
        coordinator.report()


def test_a_refusal_names_its_status() -> None:
    controller = Controller(Reservations(), HOST)
    mine = Reservation.probe(controller, 5, "nvme:")
    assert mine is not None
    controller.status = 0x006
    with pytest.raises(DeviceError, match=r"report reservations of nvme:: .* status 0x006"):
        mine.preempt_reservation(expired=False)
    with pytest.raises(DeviceError, match=r"identify the controller of nvme:.* 0x006"):
        Reservation.probe(controller, 5, "nvme:")
    assert REPORT_BYTES % 4 == 0
