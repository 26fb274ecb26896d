"""What the sources of record formats share: shards read in turn, records gathered into blocks.

A record format keeps many samples in a file, a shard. Where its records have no names, a sample's
path is ``SHARD/NUMBER``: the shard's file name without its suffix, and the record's number in it,
from 0, with leading zeros to eight digits. So the paths of one shard do not depend on which others
are imported with it; two shards of one name are an error.

Shards that cannot be read out of order are streamed: in the order given for layout ``path``, in an
order drawn from the seed for ``shuffled``, where the writer's window shuffles what comes. A shard's
records are gathered into blocks of ``BUFFER_BYTES`` or less, or one record where it is larger; the
next block is made while the present one is packed, so that there are never more than three.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.arguments import Layout
from dlfs.errors import FormatError, UsageError
from dlfs.ingest.order import packing_order
from dlfs.ingest.source import (
    BLOCK_SAMPLES_MAX,
    BUFFER_BYTES,
    SampleBlock,
    check_path,
    clean_path,
    read_ahead,
    show,
)

Value = int | float | bool | str
"""Of an attribute."""


@dataclass(frozen=True, slots=True)
class Record:
    """One sample of a stream."""

    path: bytes
    data: bytes | memoryview
    attributes: Mapping[str, Value] = field(default_factory=dict)


class ShardSource(ABC):
    """A source of shards that are read one after the other.

    Args:
        shards: their paths.
        noun: what a shard is called when there is none: ``a TFRecord file``.

    Raises:
        UsageError: there are no shards.
    """

    def __init__(self, shards: Sequence[str], *, noun: str) -> None:
        if not shards:
            raise UsageError(f"import: expected {noun}, got none")
        self.shards = list(shards)

    @abstractmethod
    def read_shard(self, number: int) -> Iterator[SampleBlock]:
        """Give the blocks of a shard, each with memory of its own."""

    @property
    def name(self) -> str:
        """The shard, or the first and the last."""
        first, last = self.shards[0], self.shards[-1]
        return first if len(self.shards) == 1 else f"{first} .. {last}"

    @property
    def sample_count(self) -> int | None:
        """Not known before all was read."""
        return None

    @property
    def sample_bytes(self) -> int | None:
        """Not known before all was read."""
        return None

    @property
    def gives_shuffled(self) -> bool:
        """Only whole shards come in another order: the writer shuffles."""
        return False

    @property
    def skipped(self) -> Mapping[str, int]:
        """Nothing is left out."""
        return {}

    @property
    def empty_directories(self) -> int:
        """Record formats have none."""
        return 0

    def close(self) -> None:  # noqa: B027 - not every source holds something open
        """Nothing is held open between blocks."""

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Read every shard once; see ``Source.blocks``.

        Raises:
            DlfsError: a shard is damaged, ends early, or cannot be read.
        """
        stream = self._stream(packing_order(len(self.shards), layout=layout, seed=seed).tolist())
        return read_ahead(lambda _: next(stream, None), buffer_bytes=0)

    def _stream(self, order: Iterable[int]) -> Iterator[SampleBlock]:
        for number in order:
            yield from self.read_shard(number)


def gather(
    records: Iterable[Record], *, where: str, buffer_bytes: int = BUFFER_BYTES
) -> Iterator[SampleBlock]:
    """Make blocks of records; their bytes are copied before the next record is asked for.

    Args:
        records: of one shard, all with the same attributes.
        where: names the shard, for errors.
        buffer_bytes: what a block holds; a record over it comes alone.

    Raises:
        FormatError: an attribute's values are not of one type.
    """
    paths: list[bytes] = []
    rows: list[Mapping[str, Value]] = []
    data = bytearray()
    lengths: list[int] = []

    def block() -> SampleBlock:
        sizes = np.array(lengths, np.int64)
        columns = {
            name: attribute_array([row[name] for row in rows], name, where) for name in rows[0]
        }
        return SampleBlock(
            paths, np.frombuffer(data, np.uint8), np.cumsum(sizes) - sizes, sizes, columns
        )

    for record in records:
        full = len(data) + len(record.data) > buffer_bytes or len(paths) == BLOCK_SAMPLES_MAX
        if paths and full:
            yield block()
            paths, rows, data, lengths = [], [], bytearray(), []
        paths.append(record.path)
        rows.append(record.attributes)
        data += record.data
        lengths.append(len(record.data))
    if paths:
        yield block()


def attribute_array(values: Sequence[Value], name: str, where: str) -> npt.NDArray[Any]:
    """Values of an attribute as an array: int64, float64, bool, or object for text.

    Raises:
        FormatError: they are not of one type; whole numbers count as numbers.
    """
    kinds = set(map(type, values))
    if kinds <= {str}:
        return np.array(values, object)
    dtype = {frozenset([bool]): np.bool_, frozenset([int]): np.int64}.get(frozenset(kinds))
    if dtype is None and kinds <= {int, float}:
        dtype = np.float64
    if dtype is None:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise FormatError(f"{where}: attribute {name}: expected values of one type, got {names}")
    try:
        return np.array(values, dtype)
    except OverflowError as error:
        raise FormatError(
            f"{where}: attribute {name}: expected whole numbers of 64 bits"
        ) from error


# ---- paths ---------------------------------------------------------------------------------------


def shard_prefixes(shards: Sequence[str], suffixes: Iterable[str] = ()) -> list[bytes]:
    """What the paths of each shard's samples begin with: its name without its suffix.

    Args:
        shards: their paths.
        suffixes: in lower case; the first that fits is taken off.

    Raises:
        UsageError: two are of one name.
        DlfsError: a name is too long for a path.
    """
    known: dict[bytes, str] = {}
    for shard in shards:
        name = Path(shard).name
        for suffix in suffixes:
            if name.lower().endswith(suffix) and len(name) > len(suffix):
                name = name[: -len(suffix)]
                break
        prefix = os.fsencode(name)
        if prefix in known:
            raise UsageError(
                f"import {shard}: expected shards of different names, since they begin the "
                f"samples' paths, got that of {known[prefix]}"
            )
        check_path(prefix, f"import {shard}")
        known[prefix] = shard
    return list(known)


def number_path(prefix: bytes, number: int) -> bytes:
    """The path of a record without a name of its own."""
    return b"%s/%08d" % (prefix, number)


def text_path(text: bytes, where: str) -> bytes:
    """The path that a field of a record gives, normalised as archives' members are.

    Raises:
        FormatError: it is empty, absolute, or leads upwards.
        LimitError: it is too long.
    """
    path = clean_path(text, where)
    if not path:
        raise FormatError(f"{where}: expected a path, got {show(text)!r}")
    return path


def files_of(paths: Sequence[str], accepts: Callable[[str], bool], *, noun: str) -> list[str]:
    """The files that some paths stand for: a folder stands for those in it that are accepted.

    Args:
        paths: of files and folders.
        accepts: whether a file's name, in lower case, is of the format.
        noun: what they are called, for the error: ``a TFRecord file``.

    Raises:
        UsageError: a folder has none.
    """
    found: list[str] = []
    for path in paths:
        if not Path(path).is_dir():
            found.append(path)
            continue
        inside = sorted(
            str(entry)
            for entry in Path(path).iterdir()
            if entry.is_file() and accepts(entry.name.lower())
        )
        if not inside:
            raise UsageError(f"import {path}: expected {noun} in the folder, got none")
        found.extend(inside)
    return found
