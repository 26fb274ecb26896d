"""The samples of an import that goes on, in windows of its data space.

Window ``k`` has the samples whose addresses lie in the bytes ``k * window_bytes`` to
``(k + 1) * window_bytes`` of the data space. It has arrived when all steps before its end were
committed. The number of a sample is its place in the order of (address, path) among all samples, as
in the storage order of the sealed dataset. So windows and numbers are the same before and after the
seal, whatever the steps were.

An ``OpenImport`` has what one process needs to read them: an open volume, sessions of the steps, or
one of the sealed dataset, and the windows used last.

Threads: any at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.base.distinct import find_distinct, number_distinct
from dlfs.base.forks import Lock
from dlfs.base.wording import quote
from dlfs.connection.arriving import Arrival, ArrivedStep, find_arrival, find_record
from dlfs.connection.connection import Connection, DatasetSession
from dlfs.connection.identity import DatasetIdentity
from dlfs.epoch.options import EpochOptions
from dlfs.epoch.order import Sequence as EpochSequence
from dlfs.errors import DeviceError, FormatError, NotFoundError, StaleError
from dlfs.reader.following import MOVES_MAX

WINDOWS_MAX = 4
"""Most windows of which the samples' places are in memory, besides those that are being read."""

_T = TypeVar("_T")


def _end_of(step: ArrivedStep) -> int:
    return step.end


@dataclass(frozen=True, eq=False)
class Window:
    """The samples of a window, in the order of their numbers.

    Attributes:
        number: number of the window.
        first: number of its first sample.
        sessions: sessions of the steps that have the samples.
        owners: position in ``sessions`` of each sample's session, ``uint32[n]``.
        indices: index of each sample in its session, ``uint64[n]``.
    """

    number: int
    first: int
    sessions: tuple[DatasetSession, ...]
    owners: NDArray[np.uint32]
    indices: NDArray[np.uint64]

    @property
    def end(self) -> int:
        """Number of the sample behind the last one."""
        return self.first + len(self.indices)

    @property
    def is_lost(self) -> bool:
        """True if a session must be opened anew, since its samples were moved."""
        return any(session.is_lost() for session in self.sessions)


class OpenImport:
    """An import that goes on, or the dataset that it has made, open in one process.

    Args:
        connection: opens the volume.
        name: name of the dataset.
        uuid: UUID of the dataset; None for the import that is found first.

    Attributes:
        arrival: what had arrived when the volume was looked at last; None before the first step.
        dtypes: dtype of each column of the steps that were opened.

    Threads: any at once.
    """

    def __init__(self, connection: Connection, name: bytes, uuid: UUID | None) -> None:
        self._name, self._uuid = name, uuid
        self._volume = connection.open_volume()
        self._lock = Lock()
        self._sessions: dict[ArrivedStep, DatasetSession] = {}
        self._lost: list[DatasetSession] = []
        """Sessions in whose place others were opened, which windows may still use."""
        self._windows: dict[tuple[int, int], Window] = {}
        self._pins: Counter[Window] = Counter()
        self.arrival: Arrival | None = None
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.look(is_fresh=True)

    @property
    def chunk_bytes(self) -> int:
        """Chunk size of the volume, in bytes."""
        return self._volume.superblock.geometry.chunk_bytes

    def look(self, *, is_fresh: bool = False) -> None:
        """Look at the volume for samples that have arrived since.

        Args:
            is_fresh: True if the volume was opened just now.

        Raises:
            StaleError: the import was abandoned, or the dataset removed.
            DlfsError: the volume cannot be read.
        """
        with self._lock:
            if not is_fresh:
                self._volume.refresh()
            self._follow(lambda: None)

    def _follow(self, use: Callable[[], _T]) -> _T:
        """Call a function with ``arrival`` as the loaded generation has it.

        If what it reads cannot be read, a newer generation may have it in other chunks.
        """
        for attempt in range(MOVES_MAX):
            try:
                self._find()
                return use()
            except (FormatError, DeviceError, StaleError):
                used = None if self.arrival is None else self.arrival.record
                self._volume.refresh()
                newest = find_record(self._volume.catalog, self._name, self._uuid)
                if newest is None:
                    self._find()  # raises, if there was an import
                elif newest == used or attempt == MOVES_MAX - 1:
                    raise
        raise AssertionError

    def _find(self) -> None:
        known = self.arrival
        found = find_arrival(
            self._volume.catalog,
            self._name,
            self._uuid,
            known,
            chunk_bytes=self.chunk_bytes,
            read_steps=self._volume.read_steps,
        )
        if found is None and known is not None:
            raise StaleError(
                f"read the import of {quote(self._name)} ({self._uuid}): it was abandoned, or its "
                "dataset was removed"
            )
        if found is not None:
            self._uuid = found.record.uuid
        self.arrival = found

    # ---- steps -----------------------------------------------------------------------------------

    def session(self, step: ArrivedStep) -> DatasetSession:
        """Return the session of a step of ``arrival``.

        Raises:
            DlfsError: it cannot be opened.
        """
        assert self.arrival is not None
        found = self._sessions.get(step)
        if found is not None and not found.is_lost():
            return found
        if step.committed is not None:
            opened = self._volume.open_step(self.arrival, step)
        else:
            identity = DatasetIdentity.of(self.arrival.record, self._volume.superblock.volume_uuid)
            opened = self._volume.connection.open_dataset(identity, None)
        if found is not None:
            self._lost.append(found)
        self._sessions[step] = opened
        self.dtypes = {**self.dtypes, **opened.attributes().dtypes}
        return opened

    def first_session(self) -> DatasetSession | None:
        """Return the session of the first step that has samples; None before there is one."""
        with self._lock:
            return self._follow(self._first_session)

    def _first_session(self) -> DatasetSession | None:
        arrival = self.arrival
        steps = () if arrival is None else arrival.steps
        found = next((step for step in steps if step.count or step.committed is None), None)
        return None if found is None else self.session(found)

    # ---- windows ---------------------------------------------------------------------------------

    def has(self, count: int, window_bytes: int) -> bool:
        """Return True if the first samples lie in windows that have arrived, or all samples have.

        Args:
            count: number of samples.
            window_bytes: size of a window.
        """
        with self._lock:
            if self.arrival is None:
                return False
            if self.arrival.is_whole:
                return True
            # Of an import by workers, steps of later parts may come before the first.
            if not self.arrival.steps or self.arrival.count < count:
                return False
            end = self.arrival.end // window_bytes * window_bytes
            place = bisect_left(self.arrival.steps, end, key=_end_of)
            if self.arrival.steps[place].first >= count:
                return True
            return self._follow(lambda: self._number_at(end)) >= count

    def _number_at(self, address: int) -> int:
        """Return the number of the first sample at or behind an address."""
        assert self.arrival is not None
        steps = self.arrival.steps
        place = bisect_left(steps, address, key=_end_of)
        if place == len(steps):
            return self.arrival.count
        step = steps[place]
        if not step.count or step.start >= address:
            return step.first
        # Samples without bytes may lie at the end of the step, and so behind the address.
        return step.first + self.session(step).directory.rank_at(address - step.start)

    def window_of(self, position: int, window_bytes: int, *, pinned: bool = False) -> Window:
        """Return the window of the sample with a number.

        Args:
            position: number of the sample, which has arrived.
            window_bytes: size of a window.
            pinned: True to keep it until ``unpin``.
        """
        with self._lock:
            window = self._cached(position, window_bytes)
            if window is None:
                window = self._follow(lambda: self._load(position, window_bytes))
            key = window_bytes, window.number
            self._windows.pop(key, None)
            self._windows[key] = window  # as the one used last
            if pinned:
                self._pins[window] += 1
            self._evict()
            return window

    def unpin(self, window: Window) -> None:
        """Allow to forget a window that was pinned."""
        with self._lock:
            self._pins[window] -= 1
            self._pins += Counter()  # without those that are 0
            self._evict()

    def _cached(self, position: int, window_bytes: int) -> Window | None:
        for (size, _), window in reversed(self._windows.items()):
            if size == window_bytes and window.first <= position < window.end:
                return None if window.is_lost else window
        return None

    def _evict(self) -> None:
        unpinned = [key for key, window in self._windows.items() if not self._pins[window]]
        for key in unpinned[: max(0, len(unpinned) - WINDOWS_MAX)]:
            del self._windows[key]
        used = {id(s) for w in (*self._windows.values(), *self._pins) for s in w.sessions}
        latest = self.arrival.steps[-1] if self.arrival is not None and self.arrival.steps else None
        for step, session in list(self._sessions.items()):
            if id(session) not in used and step != latest:
                del self._sessions[step]
                session.close(with_directory=True)
        unused = [session for session in self._lost if id(session) not in used]
        self._lost = [session for session in self._lost if id(session) in used]
        for session in unused:
            session.close(with_directory=True)

    def _load(self, position: int, window_bytes: int) -> Window:
        address = self._address_of(position)
        number = address // window_bytes
        start, end = number * window_bytes, (number + 1) * window_bytes
        assert self.arrival is not None
        steps = self._steps_in(start, end)
        sessions = tuple(self.session(step) for step in steps)
        owners, indices, addresses = [], [], []
        for place, (step, session) in enumerate(zip(steps, sessions, strict=True)):
            directory = session.directory
            low = directory.rank_at(start - step.start) if start > step.start else 0
            high = directory.rank_at(end - step.start) if end <= step.end else step.count
            order = EpochSequence(
                directory, EpochOptions(shuffle=None), chunk_bytes=self.chunk_bytes
            )
            found = order.indices(low, high - low)
            owners.append(np.full(len(found), place, np.uint32))
            indices.append(found)
            addresses.append(directory.addresses(found) + np.uint64(step.start))
        first = self._number_at(start)
        window = Window(number, first, sessions, np.concatenate(owners), np.concatenate(indices))
        _sort_ties(window, steps, np.concatenate(addresses))
        return window

    def _steps_in(self, start: int, end: int) -> list[ArrivedStep]:
        """Return the steps that may have samples between two addresses."""
        assert self.arrival is not None
        steps = self.arrival.steps
        first = bisect_left(steps, start, key=_end_of)
        behind = takewhile(lambda step: step.start < end or step.end == start, steps[first:])
        return [step for step in behind if step.count]

    def _address_of(self, position: int) -> int:
        """Return the address of the sample with a number, or of another one at the same address."""
        assert self.arrival is not None
        steps = self.arrival.steps
        place = bisect_right(steps, position, key=lambda step: step.first) - 1
        while not steps[place].count:
            place -= 1
        step = steps[place]
        directory = self.session(step).directory
        order = EpochSequence(directory, EpochOptions(shuffle=None), chunk_bytes=self.chunk_bytes)
        index = order.indices(position - step.first, 1)
        return step.start + int(directory.addresses(index)[0])

    # ---- samples ---------------------------------------------------------------------------------

    def gather(
        self,
        numbers: ArrayLike,
        window_bytes: int,
        read: Callable[[DatasetSession, NDArray[np.uint64]], Any],
    ) -> list[tuple[NDArray[np.int64], Any]]:
        """Call a function with each session that has some of the samples.

        Args:
            numbers: numbers of the samples, which have arrived.
            window_bytes: size of a window.
            read: called with a session and the indices of its samples.

        Returns:
            The places of the samples of each session among ``numbers``, and what was read.
        """
        wanted = np.asarray(numbers, np.int64)
        left, found = np.arange(len(wanted)), []
        while len(left):
            window = self.window_of(int(wanted[left].min()), window_bytes)
            inside = wanted[left] < window.end
            places, left = left[inside], left[~inside]
            local = wanted[places] - window.first
            for owner in find_distinct(window.owners[local]).tolist():
                own = window.owners[local] == owner
                indices = np.ascontiguousarray(window.indices[local[own]])
                found.append((places[own], read(window.sessions[owner], indices)))
        return found

    def close(self) -> None:
        """Close sessions and devices. Batches given out stay valid. Idempotent."""
        with self._lock:
            self._windows.clear()
            self._pins.clear()
            sessions = [*self._sessions.values(), *self._lost]
            self._sessions.clear()
            self._lost.clear()
            for session in sessions:
                session.close(with_directory=True)
            self._volume.close()


def _sort_ties(window: Window, steps: Sequence[ArrivedStep], addresses: NDArray[np.uint64]) -> None:
    """Sort the samples of several steps that share an address by their paths.

    Only the samples without bytes at the end of a step can share one with those of the next step.

    Args:
        window: the window, in the order of addresses.
        steps: step of each of its sessions.
        addresses: address of each of its samples.
    """
    owners, indices = window.owners, window.indices
    for step in steps[1:]:
        low, high = np.searchsorted(addresses, np.array([step.start, step.start + 1], np.uint64))
        if len(find_distinct(owners[low:high])) < 2:
            continue
        pairs = zip(owners[low:high].tolist(), indices[low:high].tolist(), strict=True)
        paths = [window.sessions[owner].directory.name(index) for owner, index in pairs]
        order = int(low) + np.array(sorted(range(len(paths)), key=paths.__getitem__))
        owners[low:high], indices[low:high] = owners[order], indices[order]


class ArrivedColumns:
    """The columns of the samples that have arrived, by the numbers of the samples.

    Args:
        opened: returns the import of this process.
        window_bytes: size of a window.
        name: name of the dataset, for errors.

    Threads: any.
    """

    def __init__(self, opened: Callable[[], OpenImport], window_bytes: int, name: str) -> None:
        self._opened, self._window_bytes, self._name = opened, window_bytes, name

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Dtype of each column, by name, of the steps that were opened."""
        opened = self._opened()
        if not opened.dtypes:
            opened.first_session()
        return opened.dtypes

    def __contains__(self, name: object) -> bool:
        return name in self.dtypes

    def column(self, name: str, indices: ArrayLike) -> NDArray[Any]:
        """Return some values of a column; as ``Dataset.column``."""

        def read(session: DatasetSession, inner: NDArray[np.uint64]) -> NDArray[Any] | None:
            table = session.attributes()
            return table.column(name, inner) if name in table.dtypes else None

        wanted = np.asarray(indices, np.int64)
        pieces = self._opened().gather(wanted, self._window_bytes, read)
        dtypes = self.dtypes
        if name not in dtypes:
            known = ", ".join(map(quote, dtypes)) or "none"
            raise NotFoundError(
                f"read column {quote(name)} of {quote(self._name)}: expected one of its columns: "
                f"{known}"
            )
        dtype = dtypes[name]
        base = np.result_type(dtype.base, *(v.dtype.base for _, v in pieces if v is not None))
        found = np.empty((len(wanted), *dtype.shape), base)
        for places, values in pieces:  # a reserved column may begin in a later step
            found[places] = ("" if base.kind == "O" else 0) if values is None else values
        return found

    def parsed(
        self, name: str, indices: ArrayLike, parse: Callable[[list[str]], NDArray[Any]]
    ) -> NDArray[Any]:
        """Return what a function makes of the strings of some samples; as ``AttributeTable``."""
        return parse(self.column(name, indices).tolist())

    def distinct(self, name: str, indices: ArrayLike) -> tuple[list[str], NDArray[np.intp]]:
        """Return the distinct strings among some values of a column; as ``AttributeTable``."""
        values, codes = number_distinct(self.column(name, indices))
        return values.tolist(), codes
