"""Packs samples into a dataset's data space, and verifies packed samples, many in one call.

libdlfs copies and computes checksums without the GIL. A ``Packer`` has its progress, so a sample
larger than the window continues in the next call.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs._native import abi
from dlfs._native.library import check, library

Bytes = NDArray[np.uint8]
Crcs = NDArray[np.uint32]
Locations = NDArray[Any]


class Packer:
    """Packs samples one after the other by the packing rule of FORMAT.md.

    Args:
        chunk_bytes: chunk size of the volume, a power of two.
        block_bytes: block size of the volume, a power of two, at most chunk_bytes.
        address: first free byte of the data space, a multiple of chunk_bytes.
        parts: those of the chunks before ``address``; see ``parts``.

    Threads: one at a time.
    """

    def __init__(
        self,
        *,
        chunk_bytes: int,
        block_bytes: int,
        address: int = 0,
        parts: Crcs | None = None,
    ) -> None:
        self._state = abi.Packing(address=address, chunk_bytes=chunk_bytes, block_bytes=block_bytes)
        self._parts = np.empty(0, np.uint32) if parts is None else parts
        self._reserve_parts(address // chunk_bytes)

    @property
    def address(self) -> int:
        """The first free byte of the data space."""
        return int(self._state.address)

    @property
    def parts(self) -> Crcs:
        """CRC32C of each part of a sample larger than a chunk, by the number of its chunk.

        ``uint32[n]`` for the first n chunks of the data space; 0 for those without such a part.
        """
        return self._parts[: -(-self.address // self._state.chunk_bytes)]

    def _reserve_parts(self, chunks: int) -> None:
        if chunks > len(self._parts):
            grown = np.zeros(max(chunks, 2 * len(self._parts)), np.uint32)
            grown[: len(self._parts)] = self._parts
            self._parts = grown

    def fill_chunks(self, lengths: NDArray[np.int64], order: NDArray[np.uint64]) -> None:
        """Change an order of packing slightly, in place, so that chunks are filled better.

        Args:
            lengths: int64[n_samples].
            order: distinct numbers of samples; a sample may be moved before up to 63 others.

        Raises:
            UsageError: a number of the order is not one of a sample, or a length is negative.
        """
        code = library().dlfs_pack_order(
            ctypes.byref(self._state),
            lengths.ctypes.data,
            len(lengths),
            order.ctypes.data,
            len(order),
        )
        check(code, f"order {len(order)} samples")

    def begin_chunk(self, window: Bytes, window_address: int) -> None:
        """Leave the rest of the present chunk unused, if it has begun; zero it.

        Args:
            window: as in ``pack``; no sample is incomplete.
            window_address: address of the window.
        """
        unused = -self.address % self._state.chunk_bytes
        at = self.address - window_address
        window[at : at + unused] = 0
        self._state.address += unused

    def pack(
        self,
        source: Bytes,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        order: NDArray[np.uint64] | None,
        window: Bytes,
        window_address: int,
        locations: Locations,
    ) -> int:
        """Copy samples into a window of whole chunks until it is full.

        Args:
            source: uint8[n_bytes], which the offsets refer to.
            offsets: int64[n_samples].
            lengths: int64[n_samples], each at most 2^40 - 1.
            order: the samples to pack, in this order; None for all, as they come.
            window: uint8[n_bytes] to write to: whole chunks of the data space from
                ``window_address`` on.
            window_address: not above ``address``.
            locations: ``dlfs_location[n_samples]``; those of the samples completed are set.

        Returns:
            The number of complete samples. If it is less than the number given, the window is full:
            pass the remaining samples with the next window.

        Raises:
            UsageError: a sample lies outside the source, or the window is not at the address of
                packing.
            LimitError: the data space would grow over 2^56 bytes.
        """
        count = len(offsets) if order is None else len(order)
        chunk_bytes = self._state.chunk_bytes
        self._reserve_parts((window_address + window.size) // chunk_bytes)
        code = library().dlfs_pack(
            ctypes.byref(self._state),
            source.ctypes.data,
            source.size,
            offsets.ctypes.data,
            lengths.ctypes.data,
            None if order is None else order.ctypes.data,
            count,
            window.ctypes.data,
            window_address,
            window.size,
            locations.ctypes.data,
            self._parts[window_address // chunk_bytes :].ctypes.data,
        )
        return check(code, f"pack {count} samples at address {window_address}")


def sum_ranges(locations: Locations, *, window: Bytes, window_address: int) -> Crcs:
    """Compute the CRC32C of ranges of the data space, up to the end of a window.

    Args:
        locations: ``dlfs_location[n_ranges]``, rising by address; their checksums are not used.
        window: uint8[n_bytes], whole chunks of the data space from ``window_address`` on.
        window_address: at most the address of the first range.

    Returns:
        uint32[n]: the CRC32C of each range that begins before the window's end: the first n.

    Raises:
        FormatError: a range begins before the window, or reaches beyond its end.
    """
    crcs = np.empty(len(locations), np.uint32)
    code = library().dlfs_pack_verify(
        locations.ctypes.data,
        len(locations),
        window.ctypes.data,
        window_address,
        window.size,
        crcs.ctypes.data,
    )
    return crcs[: check(code, f"sum {len(locations)} ranges at address {window_address}")]
