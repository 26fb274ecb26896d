"""Writes one rank's part of a checkpoint: pieces of its tensors, hashed, shared or written.

The bytes of each item are cut into pieces. A piece is compared with the one at the same place in
the last checkpoint. If their CRC32C differ, it has changed; if not, SHA-256 decides. An equal piece
becomes a reference to the earlier dataset. All others go to a new version of the checkpoint's
``:shards`` dataset, from the tensor's memory to the writer's windows in one copy. Threads compute
SHA-256 meanwhile, for the next save.

A reference keeps a whole earlier dataset on the volume. Pieces that need less than half of such a
dataset are therefore written once more, to a version of their own: they did not change since the
last checkpoint, and are shared from there on.

One process at a time can write to a volume. The ranks of a job write one after the other: a rank
locks the volume with its first new piece, and seals its dataset after its last one. The device is
therefore busy the whole time but for the commit of each rank.

Threads: the caller's, and ``HASH_THREADS`` for SHA-256.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import dlfs
from dlfs._native.checksums import crc32c
from dlfs.adapters.locking import when_unlocked
from dlfs.adapters.torch.checkpoint.layout import PIECE_BYTES, Piece
from dlfs.errors import SpaceError
from dlfs.units import MIB, format_bytes

HASH_THREADS = 2
"""Threads of each rank that compute SHA-256."""

COPIES_BYTES_MAX = 256 * MIB
"""Most bytes of copied tensors, such as those of a GPU, that wait to be written, in bytes."""

SMALL_BYTES = 1 * MIB
"""Pieces below this length are added to the dataset together, in bytes."""

SMALL_BATCH_BYTES = 8 * MIB
"""Total length at which small pieces are added to the dataset, in bytes."""

SHARED_MIN = 0.5
"""Smallest part of an earlier dataset that is worth a reference to it."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a save plan.

    Attributes:
        key: identity of the item for the caller.
        load: returns its bytes, ``uint8[n_bytes]``, and how many of them had to be copied.
    """

    key: Any
    load: Callable[[], tuple[Bytes, int]]


def tensor_bytes(tensor: Any) -> tuple[Bytes, int]:
    """Return a tensor's elements in row-major order, and the bytes that had to be copied.

    Args:
        tensor: a dense tensor of any device, type and strides.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data: Bytes = dense.reshape(-1).view(torch.uint8).numpy()
    shared = tensor.device.type == "cpu" and dense.data_ptr() == tensor.data_ptr()
    return data, 0 if shared else data.nbytes


@dataclass(frozen=True, slots=True)
class _Cut:
    """A piece whose SHA-256 is being computed.

    Attributes:
        item: item of the piece.
        start: offset of the piece in the item, in bytes.
        data: bytes of the piece.
        copied_bytes: bytes that had to be copied.
        digest: its SHA-256, once it is known.
    """

    item: Item
    start: int
    data: Bytes
    copied_bytes: int
    digest: Future[bytes]


def _digest(data: Bytes) -> bytes:
    return hashlib.sha256(data.data).digest()


def _cut_ahead(items: Iterable[Item], pool: ThreadPoolExecutor) -> Iterator[_Cut]:
    """Cut items into pieces and start their SHA-256; only copied bytes are bounded."""
    waiting: deque[_Cut] = deque()
    copied_bytes = 0
    for item in items:
        data, copied = item.load()
        for start in range(0, max(data.nbytes, 1), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            own = piece.nbytes if copied else 0
            waiting.append(_Cut(item, start, piece, own, pool.submit(_digest, piece)))
            copied_bytes += own
        while copied_bytes > COPIES_BYTES_MAX:
            copied_bytes -= waiting[0].copied_bytes
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


class _ShardsVersion:
    """A new version of a ``:shards`` dataset; the volume is locked from its first piece on."""

    def __init__(self, volume: dlfs.Volume, dataset: str, timeout_s: float) -> None:
        self._volume = volume
        self._dataset = dataset
        self._timeout_s = timeout_s
        self._writer: dlfs.DatasetWriter | None = None
        self._samples = 0
        self._waiting: list[Bytes] = []
        self._waiting_bytes = 0

    def append(self, data: Bytes, crc: int) -> Piece:
        """Add a piece, without a digest; its memory must not change before the seal."""
        writer = self._writer or self._lock()
        source = f"{self._dataset}@{writer.description.version}"
        piece = Piece(source, self._samples, data.nbytes, crc, b"")
        self._samples += 1
        if data.nbytes >= SMALL_BYTES:
            self._add_waiting(self._samples - 1)
            self._add(self._samples - 1, [data])
            return piece
        self._waiting.append(data)
        self._waiting_bytes += data.nbytes
        if self._waiting_bytes >= SMALL_BATCH_BYTES:
            self._add_waiting(self._samples)
        return piece

    def seal(self) -> None:
        """Commit the version, if there is a piece in it, and unlock the volume."""
        if self._writer is not None:
            self._add_waiting(self._samples)
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

    def _add_waiting(self, end: int) -> None:
        """Add the small pieces, the last of which has the number ``end - 1``."""
        if self._waiting:
            self._add(end - len(self._waiting), self._waiting)
            self._waiting, self._waiting_bytes = [], 0

    def _add(self, first: int, pieces: Sequence[Bytes]) -> None:
        assert self._writer is not None
        lengths = np.array([piece.nbytes for piece in pieces], np.int64)
        data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        paths = [b"%08d" % (first + i) for i in range(len(pieces))]
        self._writer.add_batch(paths, data, np.cumsum(lengths) - lengths, lengths)


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
        return {key: tuple(pieces) for key, pieces in self._found.items()}

    def _write_new(self, items: Iterable[Item]) -> None:
        """Write all pieces that the last checkpoint does not have."""
        version = _ShardsVersion(self._volume, self._dataset, self._timeout_s)
        pool = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="dlfs-hash")
        digests: list[tuple[list[Piece], int, Future[bytes]]] = []
        try:
            for cut in _cut_ahead(items, pool):
                pieces = self._found.setdefault(cut.item.key, [])
                crc = crc32c(cut.data.data)
                piece = self._unchanged(cut, crc)
                if piece is not None:
                    self._shared.append((cut.item, cut.start, piece))
                else:
                    piece = version.append(cut.data, crc)
                    digests.append((pieces, len(pieces), cut.digest))
                pieces.append(piece)
            version.seal()
            for pieces, number, digest in digests:
                pieces[number] = pieces[number]._replace(digest=digest.result())
        finally:
            pool.shutdown(cancel_futures=True)
            version.abort()

    def _unchanged(self, cut: _Cut, crc: int) -> Piece | None:
        """Return the piece of the last checkpoint that has the same bytes at the same place."""
        known = self._known.get(cut.item.key, ())
        number = cut.start // PIECE_BYTES
        if number >= len(known):
            return None
        piece = known[number]
        if (piece.length_bytes, piece.crc32c) != (cut.data.nbytes, crc):
            return None
        return piece if piece.digest == cut.digest.result() else None

    def _rewrite_scattered(self) -> None:
        """Write shared pieces again that would keep too much of an earlier dataset."""
        stored = {f"{i.name}@{i.version}": i.sample_bytes for i in self._volume.datasets()}
        needed: Counter[str] = Counter()
        for piece in {piece for _, _, piece in self._shared}:
            needed[piece.source] += piece.length_bytes
        version = _ShardsVersion(self._volume, self._dataset, self._timeout_s)
        moved: dict[Piece, Piece] = {}
        try:
            for item, start, piece in self._shared:
                if needed[piece.source] >= SHARED_MIN * stored.get(piece.source, 0):
                    continue
                if piece not in moved:
                    data = item.load()[0][start : start + PIECE_BYTES]
                    moved[piece] = version.append(data, piece.crc32c)._replace(digest=piece.digest)
                self._found[item.key][start // PIECE_BYTES] = moved[piece]
            version.seal()
        finally:
            version.abort()
