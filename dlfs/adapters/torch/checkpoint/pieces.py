"""Writes one rank's part of a checkpoint: pieces of its tensors, shared or written.

The bytes of each item are cut into pieces. A piece is compared with the one at the same place in
the last checkpoint. If their CRC32C differ, it has changed. If not, the stored piece is read and
compared. An equal piece becomes a reference to the earlier dataset, with its SHA-256, by which the
next saves compare it. All others go to a new version of the checkpoint's ``:shards`` dataset, from
the tensor's memory to the writer's windows in one copy. Bytes that change with every save are
therefore never hashed.

A reference keeps a whole earlier dataset on the volume. Pieces that need less than half of such a
dataset are therefore written once more, to a version of their own: they did not change since the
last checkpoint, and are shared from there on.

One process at a time can write to a volume. The ranks of a job write one after the other: a rank
locks the volume with its first new piece, and seals its dataset after its last one. The device is
therefore busy the whole time but for the commit of each rank.

Threads: the caller's, and one that computes CRC32C ahead.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
import torch
from numpy.typing import NDArray

import dlfs
from dlfs._native.checksums import crc32c
from dlfs.adapters.torch.checkpoint.layout import PIECE_BYTES, check_stored, open_source
from dlfs.adapters.torch.checkpoint.metadata import Piece
from dlfs.adapters.torch.lookahead import take_ahead
from dlfs.base.threads import ThreadPool
from dlfs.base.units import MIB, format_bytes
from dlfs.errors import DlfsError, SpaceError
from dlfs.store.locking import when_unlocked

PIECES_AHEAD = 8
"""Pieces whose CRC32C is computed ahead of the writer."""

SMALL_BYTES = 1 * MIB
"""Pieces below this length are copied to the writer's stage, in bytes."""

SHARED_MIN = 0.5
"""Smallest part of an earlier dataset that is worth a reference to it."""

_log = logging.getLogger("dlfs.checkpoint")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a save plan.

    Attributes:
        key: identity of the item for the caller.
        load: returns its bytes, ``uint8[n_bytes]``.
    """

    key: Any
    load: Callable[[], Bytes]


def tensor_bytes(tensor: Any) -> Bytes:
    """Return a tensor's elements in row-major order; its own memory if they lie there like that.

    Args:
        tensor: a dense tensor of any device, type and strides.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data: Bytes = dense.reshape(-1).view(torch.uint8).numpy()
    return data


def _cut(items: Iterable[Item], pool: ThreadPool) -> Iterator[tuple[Item, int, Bytes, Future[int]]]:
    """Yield the pieces of items: item, offset in it, bytes, and their future CRC32C."""
    for item in items:
        data = item.load()
        for start in range(0, max(data.nbytes, 1), PIECE_BYTES):
            part = data[start : start + PIECE_BYTES]
            yield item, start, part, pool.submit(crc32c, part.data)


class _ShardsVersion:
    """A new version of a ``:shards`` dataset; the volume is locked from its first piece on."""

    def __init__(self, volume: dlfs.Volume, dataset: str, timeout_s: float) -> None:
        self._volume = volume
        self._dataset = dataset
        self._timeout_s = timeout_s
        self._writer: dlfs.DatasetWriter | None = None

    def append(self, data: Bytes, crc: int) -> Piece:
        """Add a piece, without a digest."""
        writer = self._writer or self._lock()
        piece = Piece(writer.uuid, writer.sample_count, data.nbytes, crc, b"")
        path = b"%08d" % piece.sample
        if data.nbytes < SMALL_BYTES:  # the writer packs many of them by one call
            writer.add(path, data)
        else:
            lengths = np.array([data.nbytes], np.int64)
            writer.add_batch([path], data, np.zeros(1, np.int64), lengths)
        return piece

    def seal(self) -> None:
        """Commit the version, if there is a piece in it, and unlock the volume."""
        if self._writer is not None:
            self._writer.seal()

    def abort(self) -> None:
        """Discard the version, unless it is sealed."""
        if self._writer is not None:
            self._writer.abort()

    def _lock(self) -> dlfs.DatasetWriter:
        self._writer = when_unlocked(
            lambda: self._volume.writer(self._dataset, layout="path"), self._timeout_s
        )
        return self._writer


class ShardWriter:
    """Stores the items of one rank.

    Args:
        volume: volume to write to.
        dataset: name of the checkpoint's ``:shards`` dataset.
        known: pieces of each item of the last checkpoint, by its key.
        timeout_s: time to wait while another writer has the volume, in seconds.
    """

    def __init__(
        self,
        volume: dlfs.Volume,
        dataset: str,
        known: Mapping[Any, Sequence[Piece]],
        *,
        timeout_s: float,
    ) -> None:
        self._volume = volume
        self._dataset = dataset
        self._known = known
        self._timeout_s = timeout_s
        self._there = {info.uuid for info in volume.datasets()}
        """Datasets of the volume."""
        self._sources: dict[UUID, dlfs.Dataset] = {}
        """Earlier datasets that are open for comparisons."""
        self._unreadable: set[UUID] = set()
        """Earlier datasets that cannot be opened."""
        self._found: dict[Any, list[Piece]] = {}
        self._shared: list[tuple[Item, int, Piece]] = []
        """Item, offset in it, and earlier location of each piece of the last checkpoint."""

    def write(self, items: Iterable[Item]) -> dict[Any, tuple[Piece, ...]]:
        """Store the items and return the pieces of each by its key.

        Raises:
            SpaceError: the volume is full.
            LockedError: another writer had the volume for the whole time.
            DlfsError: as ``DatasetWriter.add_batch`` and ``seal``.
        """
        try:
            self._write_new(items)
            self._rewrite_scattered()
        except SpaceError as error:
            raise SpaceError(
                f"save to dataset {self._dataset!r} of {self._volume.uri}, which has "
                f"{format_bytes(self._volume.free_bytes)} free: {error}"
            ) from error
        finally:
            for dataset in self._sources.values():
                dataset.close()
        return {key: tuple(pieces) for key, pieces in self._found.items()}

    def _write_new(self, items: Iterable[Item]) -> None:
        """Write all pieces that the last checkpoint does not have."""
        version = _ShardsVersion(self._volume, self._dataset, self._timeout_s)
        pool = ThreadPool(1, thread_name_prefix="dlfs-crc")
        try:
            for item, start, data, crc in take_ahead(_cut(items, pool), PIECES_AHEAD):
                pieces = self._found.setdefault(item.key, [])
                piece = self._find_equal(item.key, len(pieces), data, crc.result())
                if piece is not None:
                    self._shared.append((item, start, piece))
                else:
                    piece = version.append(data, crc.result())
                pieces.append(piece)
            version.seal()
        finally:
            pool.shutdown(cancel_futures=True)
            version.abort()

    def _find_equal(self, key: Any, number: int, data: Bytes, crc: int) -> Piece | None:
        """Return the piece of the last checkpoint at the same place, if it has the same bytes."""
        known = self._known.get(key, ())
        if number >= len(known):
            return None
        piece = known[number]
        if piece.source not in self._there:  # it was removed, or left where this one was copied
            return None
        if (piece.length_bytes, piece.crc32c) != (data.nbytes, crc):
            return None
        digest = hashlib.sha256(data.data).digest()
        if piece.digest:
            return piece if piece.digest == digest else None
        return piece._replace(digest=digest) if self._stored_equals(piece, data) else None

    def _stored_equals(self, piece: Piece, data: Bytes) -> bool:
        """Read a stored piece and compare it; a damaged one is not equal, and is thus replaced."""
        if piece.source in self._unreadable:
            return False
        stored = np.empty(piece.length_bytes, np.uint8)
        try:
            if piece.source not in self._sources:
                self._sources[piece.source] = self._open_source(piece.source)
            check_stored(self._sources[piece.source], [piece])
            self._sources[piece.source].read_into(piece.sample, stored.data)
        except DlfsError as error:
            _log.warning("a shard cannot be shared and is written again: %s", error)
            return False
        return np.array_equal(stored, data)

    def _open_source(self, source: UUID) -> dlfs.Dataset:
        """Open an earlier dataset; note that it cannot be read if that fails."""
        try:
            return open_source(self._volume, source)
        except DlfsError:
            self._unreadable.add(source)
            raise

    def _rewrite_scattered(self) -> None:
        """Write shared pieces again that would keep too much of an earlier dataset."""
        sizes = {info.uuid: info.sample_bytes for info in self._volume.datasets()}
        needed: Counter[UUID] = Counter()
        for piece in {piece for _, _, piece in self._shared}:
            needed[piece.source] += piece.length_bytes
        version = _ShardsVersion(self._volume, self._dataset, self._timeout_s)
        moved: dict[Piece, Piece] = {}
        try:
            for item, start, piece in self._shared:
                if needed[piece.source] >= SHARED_MIN * sizes.get(piece.source, 0):
                    continue
                if piece not in moved:
                    data = item.load()[start : start + PIECE_BYTES]
                    moved[piece] = version.append(data, piece.crc32c)._replace(digest=piece.digest)
                self._found[item.key][start // PIECE_BYTES] = moved[piece]
            version.seal()
        finally:
            version.abort()
