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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.datasets import Source

GLOBAL = "global"
"""An `own_order` that is a uniform permutation of all samples: such an epoch is a global order."""

PAGE_BYTES = 4096

Buffer: TypeAlias = bytes | bytearray | memoryview


class Samples(Protocol):
    """A batch in one object, of peers that make no Python object for each sample.

    Attributes:
        lengths: length of each sample in bytes, ``int[n]``.
    """

    lengths: NDArray[np.integer]

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Buffer: ...


class IndexedSamples(Samples, Protocol):
    """A batch of an epoch in the peer's own order.

    Attributes:
        indices: indices of the samples, ``int[n]``.
    """

    indices: NDArray[np.integer]


class Reader:
    """A peer that was opened. What it returns is valid until its next call.

    Attributes:
        own_order: description of the order of `epoch` ("shards shuffled, buffer of 1000"), `GLOBAL`
            for a uniform permutation, or empty if the peer has no order of its own.
        takes_arrays: `read` is called with ``int64[n]`` instead of a list of int.
    """

    own_order = ""
    takes_arrays = False

    def read(self, indices: Any) -> Sequence[Buffer] | Samples:
        """Read a batch in the given order, by the peer's batched call where it has one.

        Called only if `Peer.random` is true. Indices are distinct.
        """
        raise NotImplementedError

    def epoch(
        self, seed: int, batch: int
    ) -> Iterator[list[tuple[int, Buffer]]] | Iterator[IndexedSamples]:
        """Read all samples once in the peer's own order; the last batch may be short.

        Called only if the reader has an `own_order`. A sample comes with its index. Where the
        format stores no index, `prepare` stores it next to the bytes. The framework may stop in the
        middle and close the iterator; its workers end then, or in `close`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release everything; processes that the reader started have ended on return."""


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
        """Open with all samples in the peer's own memory; untimed.

        Returns:
            None for peers whose samples the kernel caches, which is the default.
        """
        del folder
        return None

    @contextmanager
    def share(self, folder: Path, *, warm: bool) -> Iterator[tuple[int, ...]]:
        """Run what all readers share, such as a mount or a service, while they read.

        Args:
            folder: folder that `prepare` wrote.
            warm: True if all samples are to be in memory.

        Yields:
            IDs of the processes whose time and memory count as the peer's.
        """
        del folder, warm
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
