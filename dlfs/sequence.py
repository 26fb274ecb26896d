"""The order of an epoch, and each rank's part of it, as functions of a few numbers.

A ``Sequence`` maps positions 0..N-1 of an epoch to indices. It is never a stored list: ``global``
is a keyed bijection, ``chunk`` permutes chunks and then the samples within each window of chunks,
and ``storage`` is the order on media. Ranks take interleaved slices of the same order, so the
samples of a global batch do not depend on how many ranks share it, and an epoch is resumed at a
position by any number of ranks: its state is (seed, epoch, position). An order over chosen samples
(``dlfs.selection``) is one of the same kind.

The order of packing (``packing_permutation``) is made here too, so that one place keeps it apart
from the epochs'.

Everything here is immutable or a plain value; any thread may use it.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dlfs._native.permutation import Permutation
from dlfs._native.reader import NativeSequence
from dlfs.arguments import SHUFFLES, Shuffle, check_choice, check_integer
from dlfs.directory import FrozenDirectory
from dlfs.errors import UsageError
from dlfs.selection import Selection
from dlfs.wording import show_value

WINDOW_CHUNKS = 64
"""Chunks that chunk shuffle mixes at a time by default: 16 MiB of the default chunk size.

Where samples were packed in a random order, as import does by default, any window shuffles batches
as well as a global order. Where they lie class by class, the number of a class's samples in a batch
varies 1 + (batch - 1) / window_chunks times as much as in a global order: for batches of 256 by 17,
4.9, 1.9 and 1.2 with windows of 16, 64, 256 and 1,024. A window that the memory budget does not
hold is read several times over.

Source: ``python -m bench.shuffle``; the section "Shuffle quality" of bench/README.md.
"""

WINDOW_CHUNKS_MAX = 1 << 20

STATE_VERSION = 1

_PACKING = b"dlfs.packing"
_UINT64_MAX = (1 << 64) - 1

_RANGES = (
    ("seed", 0, _UINT64_MAX),
    ("epoch", 0, _UINT64_MAX),
    ("position", 0, _UINT64_MAX),
    ("window_chunks", 1, WINDOW_CHUNKS_MAX),
)


@dataclass(frozen=True, slots=True)
class EpochState:
    """Where an epoch stands; enough to go on with it in another process, at another world size.

    Attributes:
        dataset: UUID of the dataset, as text.
        shuffle: ``global``, ``chunk`` or None.
        seed: 0..2^64-1.
        epoch: 0..2^64-1.
        window_chunks: of chunk shuffle.
        position: samples of the epoch that all ranks together have taken.
        selection: fingerprint of the samples that were chosen; None: all.
    """

    dataset: str
    shuffle: Shuffle | None
    seed: int
    epoch: int
    window_chunks: int
    position: int
    version: int = STATE_VERSION
    selection: str | None = None

    def __post_init__(self) -> None:
        check_shuffle(self.shuffle)
        for option, low, high in _RANGES:
            value = getattr(self, option)
            number = check_integer(value, low, high, option=option, action="order an epoch")
            object.__setattr__(self, option, number)  # numpy's integers are no plain values

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for a checkpoint (JSON, pickle, ``torch.save``)."""
        values = asdict(self)
        if self.selection is None:
            del values["selection"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what ``to_dict`` wrote.

        Raises:
            UsageError: it is not such a dictionary, or of a version this code does not know.
        """
        if not isinstance(values, dict) or "version" not in values:
            raise UsageError(
                f"resume an epoch: expected an epoch's state, got {show_value(values)}"
            )
        if values["version"] != STATE_VERSION:
            raise UsageError(
                f"resume an epoch: expected a state of version {STATE_VERSION}, got version "
                f"{show_value(values['version'])}, of another release"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise UsageError(
                f"resume an epoch: expected an epoch's state, got {show_value(values)}"
            ) from error


def check_shuffle(shuffle: object) -> None:
    """Refuse a kind of shuffle that there is not.

    Raises:
        UsageError: it is not ``"global"``, ``"chunk"`` or None.
    """
    check_choice(shuffle, (*SHUFFLES, None), option="shuffle", action="order an epoch")


class Sequence:
    """One epoch's order over a whole dataset, or over samples that were chosen.

    Args:
        directory: of the dataset.
        chunk_bytes: of its volume.
        shuffle: ``global``, ``chunk`` or None for storage order.
        seed: 0..2^64-1.
        epoch: 0..2^64-1.
        window_chunks: how many chunks ``chunk`` mixes at a time; ``WINDOW_CHUNKS`` tells which
            to choose.
        selection: of samples; with it ``shuffle`` does not matter any more.

    Raises:
        UsageError: an argument is out of range.

    Source: ``dlfs_permutation`` in ``dlfs/sequence.h`` for the bijection.
    """

    def __init__(
        self,
        directory: FrozenDirectory,
        *,
        chunk_bytes: int,
        shuffle: Shuffle | None = "global",
        seed: int = 0,
        epoch: int = 0,
        window_chunks: int = WINDOW_CHUNKS,
        selection: Selection | None = None,
    ) -> None:
        self._count = len(directory) if selection is None else len(selection)
        EpochState("", shuffle, seed, epoch, window_chunks, 0)
        if selection is not None:
            self._native = NativeSequence.choose(
                directory.native,
                kind=selection.kind,
                indices=selection.indices,
                weights=selection.weights,
                draws=selection.draws,
                seed=seed,
                epoch=epoch,
            )
            return
        self._native = NativeSequence(
            directory.native,
            chunk_bytes=chunk_bytes,
            order=shuffle or "storage",
            seed=seed,
            epoch=epoch,
            window_chunks=window_chunks,
        )

    @property
    def native(self) -> NativeSequence:
        """For the reader's streams."""
        return self._native

    def __len__(self) -> int:
        return self._count

    def indices(
        self, first: int = 0, count: int | None = None, *, stride: int = 1
    ) -> npt.NDArray[np.uint64]:
        """Indices at positions ``first``, ``first + stride``, ...

        Args:
            first: 0..N.
            count: how many; all that are left by default.
            stride: >= 1.

        Returns:
            ``uint64[count]``.

        Raises:
            UsageError: a position is outside 0..N-1.
        """
        left = shard_count(self._count, first, stride)
        count = left if count is None else count
        if first < 0 or stride < 1 or not 0 <= count <= left:
            raise UsageError(
                f"take positions of an epoch of {self._count}: expected at most {left} "
                f"from {first} on by steps of {stride}, got {count}"
            )
        return self._native.fill(first, count, stride)


def shard_count(total: int, first: int, stride: int) -> int:
    """How many positions ``first``, ``first + stride``, ... lie below ``total``."""
    return len(range(first, total, stride)) if stride > 0 else 0


def packing_permutation(size: int, seed: int, stage: int = 0) -> Permutation:
    """The order in which a writer packs the samples of one stage.

    An epoch in the order of packing would read the device from its begin to its end, and be no
    shuffle of what is stored. So seed and stage are hashed into a key of 128 bits, which nobody
    chooses for an epoch: (seed, epoch) are small numbers, and (0, 0) is the default of both.

    Args:
        size: samples, 1..2^62.
        seed: 0..2^64-1.
        stage: of the writer, 0..2^64-1.

    Raises:
        UsageError: the size is out of range.
    """
    key = blake2b(struct.pack("<QQ", seed, stage), digest_size=16, person=_PACKING).digest()
    return Permutation(size, *struct.unpack("<QQ", key))
