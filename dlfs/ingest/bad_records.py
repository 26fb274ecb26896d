"""Leaves bad records of a source out of an import, up to a limit (``skip_bad``).

A source has a ``BadRecords``. Where an error concerns one record alone, the source gives it to
``note``, and goes on without the record. ``note`` raises the error unless the caller of
``open_source`` allowed bad records; it raises ``TooManyBadError`` when there are more of them than
allowed. So the code of a format is the same with and without the option.

Three kinds of errors reach ``note``:

- The code that makes one sample catches the error of this sample.
- ``each_part`` makes many samples at once. If that fails, it tries each half of them, down to
  single ones.
- ``salvage`` takes what a file gives up to an error after which the rest of it cannot be found. The
  rest counts as one bad record, and the next file goes on.

An import that goes on at a cursor of its source begins with the bad records up to there, which the
unfinished import has (``restore``). One that reads its source again from the start finds them
again, but not those that the dataset writer found: so it takes the ones that the unfinished import
has when it has passed over the samples of earlier steps (``replace``). What a thread notes while it
reads ahead counts when its block is taken (``hold_back``).

A source takes the ``BadRecords`` of its caller from ``current`` when it is made; ``opening`` sets
it, because errors are also found while a source is opened.

Threads: any at once.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from dlfs.base.forks import Lock
from dlfs.errors import (
    ChecksumError,
    ClosedError,
    DeviceError,
    DlfsError,
    ExistsError,
    FormatError,
    LimitError,
    TruncatedError,
    UsageError,
)
from dlfs.format.bad_records import BAD_RECORDS_LISTED_MAX, BadRecord, BadReport

EARLY_CHECK_RECORDS = 1000
"""Number of records of a stream after which the share of bad ones is checked before its end."""

REST = "the rest of the file"
"""Name of what is lost behind an error after which no further record can be found."""

_REASON_CHARACTERS_MAX = 500

RecordError = (FormatError, LimitError)
"""Errors of the code that makes a sample of a record."""

_KINDS: Mapping[type[DlfsError], str] = {
    ChecksumError: "wrong checksum",
    TruncatedError: "cut short",
    FormatError: "malformed",
    LimitError: "beyond a limit",
    ExistsError: "path of another sample",
    DeviceError: "cannot be read",
    UsageError: "does not fit the dataset",
}

_T = TypeVar("_T")
_Held = list[tuple[Mapping[str, int], Iterable[BadRecord]]]
Name = tuple[str, str]
"""Path of a file, and the name of a record in it."""


class TooManyBadError(FormatError):
    """A source has more bad records than the caller allows."""


@dataclass(frozen=True, slots=True)
class SkipBad:
    """The bad records that an import may leave out.

    Attributes:
        count: most of them; None if only their share is limited.
        percent: most of them in percent of all records; None if only their number is limited.
    """

    count: int | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, value: int | str | SkipBad) -> SkipBad:
        """Read a number of records, or a share of all records, such as ``0.1%``.

        Raises:
            UsageError: the value is neither.
        """
        if isinstance(value, SkipBad):
            return value
        text = str(value).strip()
        try:
            found = cls(None, float(text[:-1])) if text.endswith("%") else cls(int(text))
        except ValueError:
            found = cls(-1)
        if not ((found.count or 0) >= 0 and 0 <= (found.percent or 0) <= 100):
            raise UsageError(
                f"import: expected the bad records to leave out as a number, or as a share such as "
                f"0.1%, got {text!r}"
            )
        return found

    def __str__(self) -> str:
        return f"{self.count:,}" if self.percent is None else f"{self.percent:g} %"

    def allows(self, bad: int, total: int) -> bool:
        """Return True if a number of bad records among all records is allowed."""
        if self.percent is None:
            return bad <= (self.count or 0)
        return bad * 100 <= self.percent * total


class BadRecords:
    """The bad records of one import.

    Args:
        limit: those that may be left out; None if the first is an error.
        carried: bad records of the source, which is a dataset itself.

    Attributes:
        show: function that returns the text for the path of a file, such as the URL of a copy.
    """

    def __init__(self, limit: SkipBad | None = None, carried: BadReport | None = None) -> None:
        self.limit = limit
        self.show: Callable[[str], str] = str
        self._carried = carried or BadReport()
        self._lock = Lock()
        self._reasons: Counter[str] = Counter()
        self._records: list[BadRecord] = []
        self._taken: tuple[Counter[str], int] = Counter(), 0
        self._opened: tuple[Counter[str], int] = Counter(), 0
        self._held = 0
        self._others = 0
        self._holder = threading.local()
        self._good = 0
        self._expected = 0

    @property
    def are_allowed(self) -> bool:
        """True if a bad record is no error."""
        return self.limit is not None

    @property
    def count(self) -> int:
        """Number of bad records so far."""
        return self._reasons.total()

    def report(self) -> BadReport:
        """Return the bad records so far, and those of the source's own dataset."""
        records = self._shown(self._records)
        return self._carried + BadReport(self.count, dict(self._reasons), records)

    def report_since_opening(self, *, shown: bool = False) -> BadReport:
        """Return the bad records so far without those that are found whenever the source is opened.

        Args:
            shown: True for records with the texts that ``show`` returns.
        """
        reasons, first = self._opened
        found, records = self._reasons - reasons, self._records[first:]
        listed = self._shown(records) if shown else tuple(records)
        return BadReport(found.total(), dict(found), listed)

    def report_of_opening(self) -> BadReport:
        """Return the bad records that are found whenever the source is opened."""
        reasons, first = self._opened
        return BadReport(reasons.total(), dict(reasons), self._shown(self._records[:first]))

    def _shown(self, records: Iterable[BadRecord]) -> tuple[BadRecord, ...]:
        """Return records with the texts that ``show`` returns."""
        show = self.show
        return tuple(
            BadRecord(show(one.source), show(one.record), show(one.reason)) for one in records
        )

    # ---- noting ----------------------------------------------------------------------------------

    def note(self, source: str, record: str, error: DlfsError, count: int = 1) -> None:
        """Note a bad record, which the caller leaves out.

        Args:
            source: path of its file.
            record: its name in the file.
            error: the error that it causes.
            count: number of records that this name stands for.

        Raises:
            TooManyBadError: there are more bad records than allowed.
            DlfsError: the error, if no bad records are allowed.
        """
        if not self.are_allowed or isinstance(error, TooManyBadError | ClosedError):
            try:
                raise error
            finally:
                del error  # or its traceback, which has this frame, would keep files open
        kinds = (name for base, name in _KINDS.items() if isinstance(error, base))
        kind = getattr(error.__cause__, "bad_record_kind", None) or next(kinds, "other")
        reason = _reason(source, record, error)
        self.add(Counter({kind: count}), [BadRecord(source, record, reason)], error)

    def add(
        self,
        reasons: Mapping[str, int],
        records: Iterable[BadRecord],
        error: DlfsError | None = None,
    ) -> None:
        """Add bad records that were noted, by this process or by another one.

        Args:
            reasons: number of them by kind of error.
            records: the first of them.
            error: the error of the last one.

        Raises:
            TooManyBadError: there are more bad records than allowed.
        """
        if getattr(self._holder, "ignores", False):
            return
        held: _Held | None = getattr(self._holder, "held", None)
        with self._lock:
            if held is not None:
                held.append((reasons, records := [*records]))
                self._held += sum(reasons.values())
            else:
                self._add(reasons, records)
        if self.limit is not None and self.limit.count is not None:
            self._check(self.count + self._held, error, records)

    def _add(self, reasons: Mapping[str, int], records: Iterable[BadRecord]) -> None:
        self._reasons.update(reasons)
        self._records += records
        del self._records[BAD_RECORDS_LISTED_MAX:]

    @contextmanager
    def hold_back(self) -> Iterator[_Held]:
        """Keep the bad records that this thread adds meanwhile, for ``release``.

        They count for the limit of a number at once.
        """
        held: _Held = []
        self._holder.held = held
        try:
            yield held
        finally:
            del self._holder.held

    def release(self, held: _Held) -> None:
        """Add the bad records that a thread has held back."""
        with self._lock:
            for reasons, records in held:
                self._held -= sum(reasons.values())
                self._add(reasons, records)

    @contextmanager
    def ignore(self) -> Iterator[None]:
        """Do not count the bad records that this thread adds meanwhile: they count already."""
        self._holder.ignores = True
        try:
            yield
        finally:
            del self._holder.ignores

    def take_new(self) -> tuple[dict[str, int], list[BadRecord]]:
        """Return the bad records since the last call, for ``add`` in another process."""
        with self._lock:
            reasons, first = self._taken
            self._taken = self._reasons.copy(), len(self._records)
            return dict(self._reasons - reasons), self._records[first:]

    def expect(self, sample_count: int | None) -> None:
        """Take the number of samples that the opened source knows to have, if it knows it."""
        self._expected = self.count + (sample_count or 0)
        self._opened = self._reasons.copy(), len(self._records)

    def check_none(self, report: BadReport) -> None:
        """Check that an earlier import, with which one goes on, left no bad records out.

        Raises:
            TooManyBadError: it did.
        """
        if report.count:
            raise TooManyBadError(
                f"import: expected no bad records, but the unfinished import has left out "
                f"{report.count:,}; allow them again, or abandon it"
            )

    def restore(self, report: BadReport, good_count: int) -> None:
        """Take the bad records and the samples up to the cursor at which an import goes on.

        Args:
            report: the bad records, from ``report_since_opening`` of the earlier import.
            good_count: number of samples that it has imported.
        """
        self._good += good_count
        self.add(report.reasons, report.records)

    def replace(self, report: BadReport) -> None:
        """Take the bad records of an earlier import in place of those that were found again.

        Args:
            report: from ``report_since_opening`` of the earlier import.
        """
        with self._lock:
            reasons, first = self._opened
            self._reasons = reasons + Counter(report.reasons)
            self._records[first:] = report.records

    def count_good(self, count: int) -> None:
        """Count samples that are imported; check the share of bad ones if enough were seen.

        Raises:
            TooManyBadError: the share of bad records is more than allowed.
        """
        self._good += count
        total = max(self._good + self.count, self._expected)
        if total > EARLY_CHECK_RECORDS:
            self._check(total)

    def finish(self) -> None:
        """Check the bad records when all records were seen.

        Raises:
            TooManyBadError: there are more bad records than allowed.
        """
        self._check(self._good + self.count)

    def check_others(self, bad: int, good: int, expected: int | None, *, is_end: bool) -> None:
        """Check the bad records of other processes, which read parts of the source in any order.

        So a share is compared with all records that there are, if their number is known, else when
        all were read: the result does not depend on the order.

        Args:
            bad: number of bad records that the others have found.
            good: number of samples that they have imported.
            expected: number of samples of the source, if it is known.
            is_end: True when all records were read.

        Raises:
            TooManyBadError: there are more bad records than allowed.
        """
        if self.limit is None:
            return
        if is_end or self.limit.count is not None or expected is not None:
            self._others = bad
            total = good + self.count
            self._check(total if is_end else max(total, self.count + (expected or 0)))

    def _check(
        self, total: int, error: DlfsError | None = None, records: Iterable[BadRecord] = ()
    ) -> None:
        count = self.count + self._held + self._others
        total += self._others
        if self.limit is None or self.limit.allows(count, total):
            return
        among = f" of {total:,} records" if self.limit.percent is not None else ""
        last = ""
        if listed := [*self._records[-1:], *records]:
            one = listed[-1]
            last = f"; such as {one.source}: {one.record}: {one.reason}"
        raise TooManyBadError(
            f"import: expected at most {self.limit} bad records, got {count:,}{among}{last}"
        ) from error

    # ---- going on --------------------------------------------------------------------------------

    def unreported(self) -> BadRecords:
        """Return bad records for another pass over a source, which finds the same ones again."""
        return BadRecords(SkipBad(percent=100)) if self.are_allowed else self

    @contextmanager
    def leave_out(
        self, source: str, record: str, errors: tuple[type[DlfsError], ...] = RecordError
    ) -> Iterator[None]:
        """Note a record if its code raises one of some errors; see ``note``."""
        try:
            yield
        except errors as error:
            self.note(source, record, error)

    def salvage(
        self,
        items: Iterable[_T],
        source: str,
        errors: tuple[type[DlfsError], ...] = (*RecordError, DeviceError),
    ) -> Generator[_T, None, None]:
        """Yield items of a file up to an error; note that the rest of the file is lost.

        A file that changes meanwhile is an error in any case, because of the items before.

        Args:
            items: yields the items, and raises the error.
            source: path of the file.
            errors: errors after which the items before are sound; by default errors of the format
                and of reading.
        """
        try:
            yield from items
        except errors as error:
            if isinstance(error, DeviceError) and error.errno == errno.ESTALE:
                raise
            self.note(source, REST, error)

    def each_part(
        self,
        count: int,
        make: Callable[[int, int], _T],
        name: Callable[[int], Name],
        errors: tuple[type[DlfsError], ...] = RecordError,
    ) -> Iterator[_T]:
        """Yield what is made of records, in parts without those of which nothing can be made.

        Args:
            count: number of the records.
            make: function that makes something of consecutive records: number of the first, and
                how many. It is called again for halves of records with which it fails.
            name: function that returns the file and the name of a record.
            errors: errors of a record.
        """
        pending = [(0, count)]
        while pending:
            first, size = pending.pop()
            try:
                made = make(first, size)
            except errors as error:
                if size > 1 and self.are_allowed and not isinstance(error, TooManyBadError):
                    half = size // 2
                    pending += [(first + half, size - half), (first, half)]
                else:
                    self.note(*name(first), error)
                continue
            yield made


def _reason(source: str, record: str, error: DlfsError) -> str:
    """Return the text of an error without the names of the file and the record at its start."""
    text = str(error).removeprefix("import ")
    for start in (f"{source}/{record}: ", f"{source}: ", f"{record}: "):
        text = text.removeprefix(start)
    return text[:_REASON_CHARACTERS_MAX]


_current: ContextVar[BadRecords] = ContextVar("bad records")


def current() -> BadRecords:
    """Return the bad records of the import whose source is being opened; without, none may be."""
    return _current.get(None) or BadRecords()


@contextmanager
def opening(bad: BadRecords) -> Iterator[None]:
    """Let sources that are opened meanwhile have these bad records."""
    token = _current.set(bad)
    try:
        yield
    finally:
        _current.reset(token)
