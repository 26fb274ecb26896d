"""Identify data structures: valid ones, malformed ones, and arbitrary bytes."""

from __future__ import annotations

import contextlib
import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlfs.block.nvme import NvmeCommand, NvmeResult
from dlfs.errors import DeviceError, FormatError, LimitError
from dlfs.fabric.identify import (
    NamespaceInfo,
    decode_active_list,
    decode_descriptors,
    decode_size,
    format_identity,
    list_namespaces,
)
from tests.support.nvme import Namespace
from tests.support.nvme.identify import active_list_page, descriptors_page, namespace_page

NAME = uuid.UUID("11111111-2222-3333-4444-555555555555")


class IdentifyRunner:
    """A controller of some namespaces that refuses some Identify commands."""

    def __init__(self, *namespaces: Namespace, refused: tuple[int, ...] = ()) -> None:
        self._namespaces = {space.nsid: space for space in namespaces}
        self._refused = refused

    def run_admin(
        self, command: NvmeCommand, data: bytearray | None = None, *, to_device: bool = False
    ) -> NvmeResult:
        assert (command.opcode, to_device) == (6, False)
        assert data is not None
        if command.cdw10 in self._refused:
            return NvmeResult(0x2, 0)
        if command.cdw10 == 2:
            data[:] = active_list_page(list(self._namespaces.values()), command.nsid)
        else:
            encode = {0: namespace_page, 3: descriptors_page}[command.cdw10]
            data[:] = encode(self._namespaces[command.nsid])
        return NvmeResult(0, 0)

    run_io = run_admin


def test_lists_namespaces() -> None:
    runner = IdentifyRunner(
        Namespace(1 << 20, nsid=7, identity=NAME), Namespace(1 << 21, nsid=3, block_bytes=4096)
    )
    first, second = list_namespaces(runner, "here")
    assert (first.nsid, first.size_bytes, first.block_bytes) == (3, 1 << 21, 4096)
    assert second == NamespaceInfo(7, 1 << 20, 512, f"uuid:{NAME}")
    assert list_namespaces(IdentifyRunner(), "here") == []


def test_an_old_target_names_namespaces_in_their_page() -> None:
    runner = IdentifyRunner(Namespace(1 << 20, identity=NAME), refused=(3,))
    assert list_namespaces(runner, "here")[0].identity == f"nguid:{NAME.hex}"


@pytest.mark.parametrize("structure", [0, 2])
def test_a_refusal_is_an_error(structure: int) -> None:
    runner = IdentifyRunner(Namespace(1 << 20), refused=(structure,))
    with pytest.raises(DeviceError, match=f"at here: identify .structure {structure:#x}.*0x2"):
        list_namespaces(runner, "here")


def test_odd_lists_are_refused() -> None:
    with pytest.raises(LimitError, match="fewer than 1024"):
        decode_active_list(struct.pack("<1024I", *range(1, 1025)), "here")
    for numbers in ((2, 1), (1, 1)):
        with pytest.raises(FormatError, match="ascending"):
            decode_active_list(struct.pack("<2I", *numbers).ljust(4096, b"\0"), "here")


@pytest.mark.parametrize(
    ("blocks", "metadata", "bits", "says"),
    [
        (1, 0, 8, "2^8"),
        (1, 0, 17, "2^17"),
        (1, 0, 255, "2^255"),
        (0, 0, 9, "got 0 blocks"),
        (1 << 54, 0, 9, "18014398509481984 blocks"),
        (1, 8, 9, "got 8 bytes"),
    ],
)
def test_odd_sizes_are_refused(blocks: int, metadata: int, bits: int, says: str) -> None:
    page = bytearray(4096)
    struct.pack_into("<Q", page, 0, blocks)
    struct.pack_into("<HB", page, 128, metadata, bits)
    with pytest.raises(FormatError) as caught:
        decode_size(bytes(page), "here namespace 1")
    assert says in str(caught.value)


def test_the_format_in_use_counts() -> None:
    page = bytearray(4096)
    page[0] = 2
    page[26] = 0x23  # format 3 + 16
    struct.pack_into("<HB", page, 128 + 4 * 19, 0, 12)
    assert decode_size(bytes(page), "here") == (8192, 4096)


def test_identities() -> None:
    nguid, eui = bytes(range(16)), bytes(range(8))
    assert format_identity({}) == ""
    assert format_identity({1: eui}) == "eui64:0001020304050607"
    assert format_identity({1: eui, 2: nguid}) == f"nguid:{nguid.hex()}"
    assert format_identity({2: nguid, 3: NAME.bytes}) == f"uuid:{NAME}"
    # Wrong lengths, zeros, unknown types and descriptors beyond the end give no identifier.
    page = b"\x03\x08\0\0" + bytes(8) + b"\x01\x08\0\0" + bytes(8) + b"\x09\x01\0\0\1\x03\x10\0\0\1"
    assert decode_descriptors(page) == {}


@given(st.binary(max_size=4096))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    page = data.ljust(4096, b"\0")
    assert format_identity(decode_descriptors(page)).isascii()
    for decode in (decode_active_list, decode_size):
        with contextlib.suppress(FormatError, LimitError):
            decode(page, "here")
