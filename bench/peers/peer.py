"""Peers: ways to store samples and read them back, each in its best documented manner.

Every run of a peer has a child process of its own, a fresh interpreter, so that packages do not
interfere and the memory is the peer's own. In that child, the framework calls in this order::

    peer.prepare(source, folder)        # once for each data set; timed, bytes of folder counted
    peer.open(folder).close()           # untimed: imports what Python imports on first use
    --- caches dropped, or filled; then the start signal ---
    reader = peer.open(folder)          # counts into the time to the first batch
    reader.read(indices)                # global order: batch after batch, until time is over
    reader.epoch(seed, batch)           # or the peer's own order
    reader.read(...), compared          # untimed
    reader.close()

An adapter imports its package when the package is used, never at the top of its module. It raises
`bench.errors.Unavailable` from `prepare` or `open` where a package, a program or a privilege is
missing. Threads and workers are the adapter's choice, as the package's documentation recommends.
Child processes must be descendants of the process that opened, so that their time and memory count.

**All bytes of a sample must have been read when it is returned.** An adapter that returns views of
a mapped file copies them or calls `touch`: otherwise a page that was never read would cost nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.datasets import Source

GLOBAL = "global"
"""An `own_order` that is a uniform permutation of all samples: such an epoch is a global order."""

PAGE_BYTES = 4096

Buffer: TypeAlias = bytes | bytearray | memoryview


MODULES: tuple[str, ...] = (
    "ours",
    "files",
    "packed",
    "images",
    "lmdb",
    "hdf5",
    # Formats of other projects.
    "array_record",
    "huggingface",
    "lance",
    "mds",
    "litdata",
    "webdataset",
)
"""Modules of this folder with a tuple ``PEERS``."""


class Samples(Protocol):
    """A batch in one object, of peers that make no Python object for each sample.

    Attributes:
        lengths: length of each sample in bytes, ``int[n]``.
    """

    lengths: NDArray[np.integer]

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Buffer: ...


Batch: TypeAlias = list[Buffer] | list[bytes] | Samples
Indices: TypeAlias = Sequence[int] | NDArray[np.integer]


class Rows:
    """A batch of samples of one length: the rows of an array, ``uint8[n, length]``."""

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        self._rows = rows
        self.lengths: NDArray[np.integer] = np.full(len(rows), rows.shape[1], np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> memoryview:
        return self._rows[position].data


class Joined:
    """A batch whose samples follow each other in memory.

    Args:
        offsets: where each sample begins and the last one ends, ``int64[n + 1]``.
        data: the memory.
    """

    def __init__(self, offsets: NDArray[np.int64], data: memoryview) -> None:
        self._offsets, self._data = offsets, data
        self.lengths: NDArray[np.integer] = np.diff(offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, position: int) -> memoryview:
        return self._data[self._offsets[position] : self._offsets[position + 1]]


def _unsupported(*_arguments: Any) -> Any:
    raise NotImplementedError("the peer does not read like this, or is closed")


@dataclass
class Reader:
    """A peer that was opened. What it returns is valid until its next call.

    Attributes:
        read: reads a batch in the given order, by the peer's batched call where it has one. Called
            only if `Peer.random` is true. Indices are distinct.
        epoch: reads all samples once in the peer's own order, given a seed and the samples of a
            batch: a generator of ``(indices, batch)``, whose last batch may be short. Called only
            if there is an `own_order`. Where the format stores no index, `Peer.prepare` stores it
            next to the bytes. The framework may close the generator in the middle; its workers end
            then, or in `close`.
        release: releases everything; processes that the reader started have ended on return.
        own_order: description of the order of `epoch` ("shards shuffled, buffer of 1000"), `GLOBAL`
            for a uniform permutation, or empty if the peer has no order of its own.
        takes_arrays: `read` is called with ``int64[n]`` instead of a list of int.
    """

    read: Callable[[Any], Batch] = _unsupported
    epoch: Callable[[int, int], Generator[tuple[Indices, Batch], None, None]] = _unsupported
    release: Callable[[], object] = lambda: None
    own_order: str = ""
    takes_arrays: bool = False

    def close(self) -> None:
        """Release everything, and the references to the package's objects. Idempotent."""
        self.release()
        self.read = self.epoch = _unsupported
        self.release = lambda: None


class Peer:
    """One way to store and read samples.

    Attributes:
        name: name that ``--only`` selects; unique, lower case. All ways to use one peer share the
            word before the first hyphen: "lmdb", "lmdb-views".
        about: the documented way that is used, and where it is documented.
        packages: distributions whose versions the report names; empty for programs and the kernel.
        random: True if the peer reads in a given order.
        data_of: name of the peer that prepares the data; empty: this one.
        samples_max: most samples, if many are hard to prepare; a larger data set is cut to a
            uniform random subset. None: unlimited.
    """

    name: str
    about: str
    packages: tuple[str, ...] = ()
    random = True
    data_of = ""
    samples_max: int | None = None

    def prepare(self, source: Source, folder: Path) -> None:
        """Convert the samples into a folder, which exists and is empty."""
        raise NotImplementedError

    def open(self, folder: Path) -> Reader:
        """Open what `prepare` wrote; two processes may do so at once."""
        raise NotImplementedError

    def open_warm(self, folder: Path) -> Reader | None:
        """Open with all samples in the peer's memory; None if the kernel caches them. Untimed."""
        return None

    @contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        """Run what all readers share, such as a mount or a service, while they read.

        Yield the IDs of the processes whose time and memory count as the peer's.
        """
        yield ()

    @property
    def owner(self) -> str:
        """Name of the peer that prepares the data."""
        return self.data_of or self.name


def touch(view: memoryview) -> memoryview:
    """Read one byte of every page under a view of a mapped file; return the view."""
    if len(view):
        bytes(view[::PAGE_BYTES])
        view[-1]
    return view


def all_peers() -> dict[str, Peer]:
    """Return all peers by name, in the order of the tables."""
    peers: dict[str, Peer] = {}
    for module in MODULES:
        for peer in importlib.import_module(f"bench.peers.{module}").PEERS:
            assert peer.name not in peers, f"two peers are called {peer.name}"
            peers[peer.name] = peer
    return peers
