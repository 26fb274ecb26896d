"""``ArrivingDataset``: reads the samples of an import while it goes on.

The first epoch takes the samples in windows of the order in which they are packed, each shuffled by
the seed (``arrived_windows``). A window is read as soon as the steps of the import that hold it
were committed. The order is a function of the packing, the size of a window, seed and epoch. So it
is the same on all ranks, however fast the import is, after a kill of the import or of the reader,
and over the dataset that the import has sealed.

Threads: any at once for a dataset; one at a time for an epoch. A forked child and a loaded pickle
open the volume again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack
from uuid import UUID

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs._native.permutation import arriving_permutation
from dlfs.base.arguments import OnError
from dlfs.base.closing import Closing
from dlfs.base.forks import Lock, OwnerProcess
from dlfs.base.units import format_count
from dlfs.base.wording import quote
from dlfs.connection.connection import Connection, DatasetSession
from dlfs.dataset.arrived_windows import ArrivedColumns, OpenImport, Window
from dlfs.dataset.arriving_epoch import STATE_PREFIX, ArrivingEpoch, merge_pieces
from dlfs.epoch.options import EpochKeywords, EpochOptions, make_options
from dlfs.errors import ClosedError, DeviceTimeoutError, UsageError
from dlfs.fields import find_fields
from dlfs.fields.batch_fields import name_types
from dlfs.format.digests import Digests
from dlfs.format.paths import display
from dlfs.reader import Batch
from dlfs.reader.following import follow

COUNT_MAX = 1 << 62
"""More samples than an import can have; ``wait`` for so many waits for its end."""
POLL_S = 0.1
"""Time between two looks at the volume while a reader waits for samples, in seconds."""
NOTICE_S = 10.0
"""Wait after which the log says what a reader waits for, in seconds; then each time this long."""
TIMEOUT_S = 600.0
"""Longest wait for the next samples by default, in seconds."""

_log = logging.getLogger("dlfs")


class ArrivingDataset(Closing):
    """The samples of an import that goes on, as far as it has committed them.

    The samples are numbered in the order in which they are packed: by address, then by path. The
    numbers are those of ``Batch.indices``; the sealed dataset numbers its samples by path instead.

    Args:
        connection: opens the volume.
        name: name of the dataset that the import makes.
        uuid: UUID of that dataset; None for the unfinished import of this name, else the newest
            version, whichever is found first.

    Attributes:
        name: name of the dataset.

    Threads: any at once; ``close`` by one.
    """

    def __init__(self, connection: Connection, name: bytes, uuid: UUID | None = None) -> None:
        self._connection, self._raw_name, self._uuid = connection, name, uuid
        self.name = display(name)
        self._mutex = Lock()
        self._owner = OwnerProcess()
        self._open: OpenImport | None = None
        self._closed = False

    def __repr__(self) -> str:
        count = format_count(self.arrived, "sample") if self._open is not None else "not open"
        return f"<ArrivingDataset {self.name!r} on {self._connection.uri}: {count}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrivingDataset, (self._connection, self._raw_name, self._uuid)

    # ---- opening ---------------------------------------------------------------------------------

    def opened(self) -> OpenImport:
        """Return the import as this process has it open.

        Raises:
            DlfsError: the volume cannot be opened.
            ClosedError: the dataset was closed.
        """
        with self._mutex:
            if self._closed:
                raise ClosedError(f"use the import of {quote(self.name)}: it is closed")
            if self._open is None or not self._owner.is_current():
                # That of a parent is not touched.
                self._owner = OwnerProcess()
                self._open = OpenImport(self._connection, self._raw_name, self._uuid)
            return self._open

    def close(self) -> None:
        """Close the devices. Batches given out stay valid. Idempotent."""
        self._closed = True
        opened, self._open = self._open, None
        if opened is not None and self._owner.is_current():
            opened.close()

    # ---- what has arrived ------------------------------------------------------------------------

    def look(self) -> None:
        """Look at the volume for samples that have arrived since.

        Raises:
            StaleError: the import was abandoned.
            DlfsError: the volume cannot be read.
        """
        opened = self.opened()
        opened.look()
        if opened.arrival is not None:
            self._uuid = opened.arrival.record.uuid

    @property
    def uuid(self) -> UUID | None:
        """UUID of the dataset that the import makes; None before its first step."""
        arrival = self.opened().arrival
        if arrival is not None:
            self._uuid = arrival.record.uuid
        return self._uuid

    @property
    def arrived(self) -> int:
        """Number of samples that had arrived when the volume was looked at last."""
        arrival = self.opened().arrival
        return 0 if arrival is None else arrival.count

    @property
    def total(self) -> int | None:
        """Number of all samples; None as long as the import has not ended."""
        arrival = self.opened().arrival
        return arrival.count if arrival is not None and arrival.is_whole else None

    @property
    def chunk_bytes(self) -> int:
        """Chunk size of the volume, in bytes."""
        return self.opened().chunk_bytes

    def wait(
        self,
        count: int,
        window_bytes: int,
        *,
        check: Callable[[], None] = lambda: None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> None:
        """Wait until windows with the first samples have arrived, or the import has ended.

        Args:
            count: number of samples; 0 to wait for the first step, ``COUNT_MAX`` for the end.
            window_bytes: size of a window.
            check: called before each look at the volume. What it raises ends the wait.
            timeout_s: longest wait without new samples, in seconds; None if ``check`` limits it.

        Raises:
            DeviceTimeoutError: no samples came within the time.
            StaleError: the import was abandoned.
            DlfsError: the volume cannot be read.
        """
        opened = self.opened()
        began = noticed = time.monotonic()
        newest = self.arrived
        while opened.arrival is None or not opened.has(count, window_bytes):
            check()
            self.look()
            now = time.monotonic()
            if self.arrived != newest:
                newest, began = self.arrived, now
            if opened.arrival is not None and opened.has(count, window_bytes):
                break
            if timeout_s is not None and now - began >= timeout_s:
                raise DeviceTimeoutError(
                    f"wait for {format_count(count, 'sample')} of the import of "
                    f"{quote(self.name)}: expected a step within {timeout_s:g} s, got none after "
                    f"{format_count(newest, 'sample')}"
                )
            if now - noticed >= NOTICE_S:
                noticed = now
                _log.warning(
                    "the import of %s is waited for: %s have arrived, and %s",
                    quote(self.name),
                    format_count(newest, "sample"),
                    f"{count:,} are needed" if 0 < count < COUNT_MAX else "it goes on",
                )
            time.sleep(POLL_S)

    # ---- samples ---------------------------------------------------------------------------------

    @property
    def fields(self) -> dict[str, str]:
        """Type of each field of the samples by name; empty before the first step."""
        session = self.opened().first_session()
        if session is None:
            return {}
        return name_types(find_fields(session.attributes(), np.empty(0, np.uint64), self.name))

    def columns(self, window_bytes: int) -> ArrivedColumns:
        """Return the columns of attributes, by the numbers of the samples."""
        return ArrivedColumns(self.opened, window_bytes, self.name)

    def column(self, name: str, numbers: ArrayLike) -> NDArray[Any]:
        """Return a column of attributes of some samples; as ``Dataset.column``.

        Args:
            name: name of the column.
            numbers: numbers of the samples, which have arrived.
        """
        return self.columns(self.chunk_bytes).column(name, numbers)

    def paths_of(self, numbers: ArrayLike) -> list[bytes]:
        """Return the paths of samples that have arrived, by their numbers."""
        found = np.empty(np.size(numbers), object)

        def read(session: DatasetSession, indices: NDArray[np.uint64]) -> list[bytes]:
            return session.directory.names_of(indices)

        for places, names in self.opened().gather(numbers, self.chunk_bytes, read):
            found[places] = names
        return list(found)

    def path(self, number: int) -> bytes:
        """Return the path of a sample that has arrived, by its number."""
        return self.paths_of([number])[0]

    def read(
        self,
        numbers: ArrayLike,
        *,
        on_error: OnError = "raise",
        fields: Sequence[str] | None = None,
    ) -> Batch:
        """Read samples that have arrived as one batch, by their numbers.

        Args:
            numbers: numbers of the samples.
            on_error: ``raise``, or ``skip``.
            fields: names of the fields that the batch has; by default all.

        Raises:
            DlfsError: as ``Dataset.read``.
        """
        _check_policy(on_error)
        wanted, size = np.asarray(numbers, np.int64), self.chunk_bytes

        def read(opened: OpenImport) -> Batch:
            pieces = opened.gather(
                wanted, size, lambda session, at: session.reader.read(at, on_error=on_error)
            )
            return merge_pieces(pieces, wanted, self.columns(size), self.name)

        return follow(self.opened, read).with_fields(fields)

    # ---- epochs ----------------------------------------------------------------------------------

    @property
    def digests(self) -> Digests:
        """What states of the first epoch say of the dataset, whose digests are not known yet."""
        return Digests(f"{STATE_PREFIX}{self.uuid or ''}", "")

    def batches(
        self,
        batch_size: int,
        *,
        check: Callable[[], None] = lambda: None,
        timeout_s: float | None = TIMEOUT_S,
        **options: Unpack[EpochKeywords],
    ) -> ArrivingEpoch:
        """Return one rank's batches of the epoch in the order in which the samples are packed.

        Args:
            batch_size: samples of this rank in a batch.
            check: called while it waits for samples; what it raises, the epoch raises.
            timeout_s: longest wait for new samples, in seconds; None if ``check`` limits it.
            options: as ``Dataset.batches`` takes them. ``window_chunks`` is the size of a window,
                and ``shuffle=None`` leaves the samples as they are packed. Samples cannot be chosen
                by ``where``, ``weights``, ``draws`` or ``order``.

        Raises:
            UsageError: an argument is out of range.
        """
        made = make_options(ArrivingDataset.batches, EpochKeywords, options, batch_size=batch_size)
        return self.start_epoch(made, check=check, timeout_s=timeout_s)

    def start_epoch(
        self,
        options: EpochOptions,
        *,
        check: Callable[[], None] = lambda: None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> ArrivingEpoch:
        """Return the batches of an epoch, as ``batches``; for callers that keep the options.

        Raises:
            UsageError: the options do not fit.
        """
        _check_policy(options.on_error)
        if options.has_choice or options.draws is not None:
            raise UsageError(
                f"take the samples of {quote(self.name)} while they arrive: expected no where, "
                "weights, draws or order, as not all samples are known yet"
            )
        return ArrivingEpoch(self, options, check=check, timeout_s=timeout_s)

    def order_epoch(self, options: EpochOptions) -> ArrivingOrder:
        """Return the order of an epoch: the number of the sample at each position."""
        return ArrivingOrder(self.opened, options, self.chunk_bytes)


def _check_policy(on_error: OnError) -> None:
    if on_error == "replace":
        raise UsageError(
            "read samples of an import: expected on_error 'raise' or 'skip', got 'replace', which "
            "could read samples twice"
        )


class ArrivingOrder:
    """The order of an epoch of an import, as far as it has arrived.

    Args:
        opened: returns the import of this process.
        options: options of the epoch.
        chunk_bytes: chunk size of the volume.
    """

    def __init__(
        self, opened: Callable[[], OpenImport], options: EpochOptions, chunk_bytes: int
    ) -> None:
        self._opened, self._options = opened, options
        self.window_bytes = options.window_chunks * chunk_bytes

    def window(self, position: int, *, pinned: bool = False) -> Window:
        """Return the window of a position; see ``OpenImport.window_of``."""
        return self._opened().window_of(position, self.window_bytes, pinned=pinned)

    def at(self, window: Window, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places in a window of the samples at positions of it, ``int64[n]``."""
        local = positions - window.first
        if self._options.shuffle is None or not len(local):
            return local
        size, seed = window.end - window.first, self._options.seed
        permutation = arriving_permutation(size, seed, self._options.epoch, window.number)
        stride = int(local[1] - local[0]) if len(local) > 1 else 1
        if (np.diff(local) == stride).all():
            mapped = permutation.map(int(local[0]), len(local), stride=stride)
        else:
            mapped = permutation.map()[local]
        return mapped.astype(np.int64)

    def indices(self, first: int = 0, count: int = 0, *, stride: int = 1) -> NDArray[np.int64]:
        """Return the numbers of the samples at positions ``first``, ``first + stride``, ..."""
        positions = first + stride * np.arange(count, dtype=np.int64)
        found, done = np.empty(count, np.int64), 0
        while done < count:
            window = self.window(int(positions[done]))
            end = int(np.searchsorted(positions, window.end))
            found[done:end] = window.first + self.at(window, positions[done:end])
            done = end
        return found
