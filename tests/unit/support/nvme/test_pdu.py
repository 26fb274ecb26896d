"""PDUs: bytes from the specification, round trips, and malformed bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.nvme.command import Command
from tests.support.nvme.pdu import (
    R2T,
    TO_CONTROLLER,
    TO_HOST,
    C2HData,
    C2HTermReq,
    CapsuleCmd,
    CapsuleResp,
    Decoder,
    FatalError,
    H2CData,
    H2CTermReq,
    ICReq,
    ICResp,
    Pdu,
    PduError,
    PduType,
    Wire,
    encode,
    frame_of,
    sign_header,
)

EVERY_TYPE = frozenset(PduType)

u16 = st.integers(0, 0xFFFF)
u32 = st.integers(0, 0xFFFFFFFF)
payload = st.binary(min_size=4, max_size=64).map(lambda data: data[: len(data) // 4 * 4])
wires = st.builds(Wire, st.booleans(), st.booleans(), st.sampled_from([4, 8, 64, 128]))
pdus: st.SearchStrategy[Pdu] = st.one_of(
    st.builds(ICReq, u16, st.integers(0, 255), st.integers(0, 255), u32),
    st.builds(ICResp, u16, st.integers(0, 255), st.integers(0, 255), u32),
    st.builds(H2CTermReq, u16, u32, st.binary(max_size=128)),
    st.builds(C2HTermReq, u16, u32, st.binary(max_size=128)),
    st.builds(CapsuleCmd, st.binary(min_size=64, max_size=64), payload | st.just(b"")),
    st.builds(CapsuleResp, st.binary(min_size=16, max_size=16)),
    st.builds(H2CData, u16, u16, u32, payload, last=st.booleans()),
    st.builds(C2HData, u16, st.just(0), u32, payload, last=st.booleans(), success=st.booleans()),
    st.builds(R2T, u16, u16, u32, u32),
)


def decoded(data: bytes, wire: Wire | None = None, *, piece: int = 1 << 20) -> list[Pdu]:
    decoder = Decoder(EVERY_TYPE, wire or Wire())
    found = []
    for at in range(0, len(data), piece):
        decoder.feed(data[at : at + piece])
        while (pdu := decoder.next()) is not None:
            found.append(pdu)
    return found


@given(st.lists(pdus, min_size=1, max_size=4), wires, st.integers(1, 300))
def test_pdus_survive_the_wire_in_pieces_of_any_size(
    sent: list[Pdu], wire: Wire, piece: int
) -> None:
    data = b"".join(encode(pdu, wire) for pdu in sent)
    assert decoded(data, wire, piece=piece) == sent


# Written from the diagrams of the specification, byte by byte.
ICREQ = bytes([0, 0, 128, 0, 128, 0, 0, 0]) + b"\0\0" + b"\x01" + b"\x03" + b"\x0f\0\0\0"
C2H_DATA = bytes([7, 0x0C, 24, 24, 28, 0, 0, 0]) + b"\x34\x12\0\0" + b"\0\x10\0\0" + b"\4\0\0\0"
R2T_HEAD = bytes([9, 0, 24, 0, 24, 0, 0, 0]) + b"\7\0" + b"\1\0" + b"\0\2\0\0" + b"\0\x10\0\0"


def test_layouts_are_those_of_the_specification() -> None:
    assert encode(ICReq(0, 1, 3, 15)) == ICREQ.ljust(128, b"\0")
    pdu = C2HData(0x1234, 0, 0x1000, b"data", last=True, success=True)
    assert encode(pdu) == C2H_DATA + bytes(4) + b"data"
    assert encode(R2T(7, 1, 0x200, 0x1000)) == R2T_HEAD + bytes(4)


def test_digests_are_where_the_specification_puts_them() -> None:
    """CRC32C of 32 zeros is 0x8a9136aa (RFC 3720, B.4)."""
    whole = encode(CapsuleCmd(bytes(64), bytes(32)), Wire(True, True, 128))
    assert whole[:8] == bytes([4, 3, 72, 128, 164, 0, 0, 0])
    assert whole[76:128] == bytes(52)
    assert whole[128:160] == bytes(32)
    assert whole[160:] == bytes([0xAA, 0x36, 0x91, 0x8A])


def refused(data: bytes, wire: Wire | None = None) -> PduError:
    with pytest.raises(PduError) as caught:
        decoded(data, wire)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"pdu_type": 8}, 0),
        ({"pdu_type": 0xFF}, 0),
        ({"flags": 1}, 1),
        ({"flags": 0x12}, 1),
        ({"header_bytes": 23}, 2),
        ({"header_bytes": 0}, 2),
        ({"data_offset": 20}, 3),
        ({"data_offset": 25}, 3),
        ({"data_offset": 252}, 3),
        ({"length_bytes": 23}, 4),
        ({"length_bytes": 0}, 4),
        ({"length_bytes": 1 << 31}, 4),
    ],
)
def test_a_wrong_common_header_is_refused_where_it_is_wrong(
    fields: dict[str, int], at: int
) -> None:
    frame = frame_of(C2HData(1, 0, 0, b"data"), Wire())
    for name, value in fields.items():
        setattr(frame, name, value)
    error = refused(frame.encode())
    assert (error.fes, error.fei) == (FatalError.INVALID_HEADER_FIELD, at)


def test_wrong_digests_of_header_and_data_are_distinct_errors() -> None:
    wire = Wire(True, True)
    frame = frame_of(C2HData(1, 0, 0, b"data"), wire)
    frame.header_digest = bytes(4)
    assert refused(frame.encode(), wire).fes == FatalError.HEADER_DIGEST
    sign_header(frame)
    frame.data_digest = bytes(4)
    (pdu,) = decoded(frame.encode(), wire)
    assert isinstance(pdu, C2HData)
    assert pdu.damaged


def test_datal_must_be_what_came() -> None:
    error = refused(encode(dataclasses.replace(C2HData(1, 0, 0, b"data"), length=8)))
    assert error.fei == 16


def test_only_the_peers_types_are_accepted() -> None:
    decoder = Decoder(TO_CONTROLLER)
    decoder.feed(encode(R2T(0, 0, 0, 0)))
    with pytest.raises(PduError, match="R2T"):
        decoder.next()


@given(st.binary(max_size=400), wires, st.sampled_from([EVERY_TYPE, TO_HOST, TO_CONTROLLER]))
def test_malformed_bytes_are_pdus_or_refused(
    data: bytes, wire: Wire, accepted: frozenset[PduType]
) -> None:
    decoder = Decoder(accepted, wire)
    decoder.feed(data)
    with contextlib.suppress(PduError):
        while decoder.next() is not None:
            pass
    assert decoder.pending_bytes <= len(data)


@given(pdus, wires, st.integers(0, 1 << 32))
def test_spoiled_pdus_are_pdus_or_refused(pdu: Pdu, wire: Wire, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(encode(pdu, wire))
    for _ in range(chance.randint(1, 3)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    try:
        found = decoded(bytes(data), wire)
    except PduError:
        return
    assert len(found) <= 1 + len(data) // 24


@given(st.binary(min_size=64, max_size=64))
def test_commands_keep_the_fields_that_are_looked_at(entry: bytes) -> None:
    command = Command.decode(entry)
    assert Command.decode(command.encode()) == command
