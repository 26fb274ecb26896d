"""What a peer is: one way to keep samples and to read them back, in its best documented manner.

The framework gives every peer a child process of its own, a fresh interpreter, so that packages do
not meet and memory is the peer's own. In that child it calls, in this order::

    peer.prepare(source, folder)        # once a data set; timed, folder's bytes are counted
    peer.open(folder).close()           # untimed: loads what Python loads on first use
    --- caches dropped, or filled; then the start signal ---
    reader = peer.open(folder)          # timed into the time to the first batch
    reader.read(indices)                # global order: batch after batch, until time is over
    reader.epoch(seed, batch)           # or its own order
    reader.read(...), compared          # untimed
    reader.close()

An adapter imports its package when it is used, never with its module, and raises
`bench.machine.Unavailable` from `prepare` or `open` where a package, a program or a privilege is
missing. Threads and workers are the adapter's choice, as its documentation recommends; child
processes must be descendants of the process that opened, so that their time and memory count.

**All bytes of a sample must have been read when it is handed out.** Who hands out views of a
mapped file copies them or calls `touch`: otherwise a page that nobody looked at costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

GLOBAL = "global"
"""An `own_order` that is a uniform permutation of all samples: such an epoch is a global order."""

PAGE_BYTES = 4096

Buffer: TypeAlias = bytes | bytearray | memoryview


class Source(Protocol):
    """The samples to be converted, 0..n-1; any of them at any time."""

    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        """How many."""
        ...

    def __iter__(self) -> Iterator[tuple[int, bytes, bytes]]:
        """``(index, path, data)`` of each, rising: what a converter goes through."""
        ...

    def path(self, index: int) -> bytes:
        """Relative, unique, in rising order of the index; of a corpus any bytes but NUL."""
        ...

    def data(self, index: int) -> bytes:
        """Of a sample; may be empty in a corpus."""
        ...


class Samples(Protocol):
    """A batch that comes as one object instead of a list: for peers that make no Python objects.

    Attributes:
        lengths: in bytes, ``int[n]``.
    """

    lengths: NDArray[np.integer]

    def __len__(self) -> int:
        """How many."""
        ...

    def __getitem__(self, position: int) -> Buffer:
        """The bytes at a position of the batch."""
        ...


class IndexedSamples(Samples, Protocol):
    """The same of an epoch, which also says which samples they are.

    Attributes:
        indices: of the samples, ``int[n]``.
    """

    indices: NDArray[np.integer]


class Reader(Protocol):
    """An opened peer. What it hands out stays valid until its next call.

    It is a `RandomReader`, a `ShuffledReader`, or both: it has the methods of what it can do.
    """

    def close(self) -> None:
        """Give everything back; processes it started have ended when this returns."""
        ...


class RandomReader(Reader, Protocol):
    """Reads in an order that is given."""

    def read(self, indices: Sequence[int]) -> Sequence[Buffer] | Samples:
        """A batch in the order given, by the peer's batched call where it has one.

        Called only where `Peer.random` is true. Indices are distinct plain ints.
        """
        ...


@runtime_checkable
class ShuffledReader(Reader, Protocol):
    """Reads in an order of its own.

    Attributes:
        own_order: what `epoch` does, in a few words ("shards shuffled, buffer of 1000"), or
            `GLOBAL` where that is a uniform permutation.
    """

    own_order: str

    def epoch(
        self, seed: int, batch: int
    ) -> Iterator[list[tuple[int, Buffer]]] | Iterator[IndexedSamples]:
        """All samples once, in the peer's own shuffle; the last batch may be short.

        A sample goes with its index; where the format has no identity, `prepare` stores it beside
        the bytes. The framework may stop in the middle and close the iterator; workers of it end
        then, or in `close`.
        """
        ...


class Peer(Protocol):
    """One way to keep and read samples: a small class with these, without state.

    Attributes:
        name: what ``--only`` selects and tables show; unique, lower case. Ways to use one peer
            share the word before the first hyphen: "lmdb", "lmdb-views".
        about: one line: the documented way that is used, and where that is documented.
        packages: distributions whose versions the report names; empty for programs and the kernel.
        random: whether it is read in an order that is given; its readers are `RandomReader` then.
    """

    name: str
    about: str
    packages: tuple[str, ...]
    random: bool

    def prepare(self, source: Source, folder: Path) -> None:
        """Convert the samples into a folder, which exists and is empty."""
        ...

    def open(self, folder: Path) -> Reader:
        """Open what `prepare` left; may be done in two processes at once."""
        ...


# ---- what some peers have besides ----------------------------------------------------------------


@runtime_checkable
class Limited(Protocol):
    """A peer for which many samples are hard to prepare, as one file each.

    Attributes:
        samples_max: it gets a uniform random subset of so many, numbered anew.
    """

    samples_max: int


@runtime_checkable
class Borrowing(Protocol):
    """Another way to read what a peer has prepared; its own `prepare` is not called.

    Attributes:
        data_of: that peer's name.
    """

    data_of: str


@runtime_checkable
class Shared(Protocol):
    """A peer with something that all its readers share: a mount, a service."""

    def share(self, folder: Path, *, warm: bool) -> AbstractContextManager[tuple[int, ...]]:
        """Held by the framework around the readers' processes.

        Args:
            folder: what `prepare` left.
            warm: as for `Warmable`.

        Returns:
            A context; it gives the processes whose time and memory count, too.
        """
        ...


@runtime_checkable
class Warmable(Protocol):
    """A peer that keeps samples in memory of its own, not in the kernel's page cache."""

    def open_warm(self, folder: Path) -> Reader:
        """Open with memory for all samples, and bring them there; untimed."""
        ...


@runtime_checkable
class TakesArrays(Protocol):
    """A reader whose documented argument is an array.

    Attributes:
        takes_arrays: true: `read` is given ``int64[n]`` instead of a list.
    """

    takes_arrays: bool


def touch(view: memoryview) -> memoryview:
    """Have the kernel read every page under a view of a mapped file; gives it back."""
    if len(view):
        bytes(view[::PAGE_BYTES])
        view[-1]
    return view
