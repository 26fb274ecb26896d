"""``FieldReaders``: the readers of one open dataset, of whole samples and of some of their fields.

A reader of some fields is opened when they are first read. It has a directory with the part of each
sample that has these fields (``dlfs.fields.locate_span``), and its own slots of the sample memory,
so that its bytes are not taken for whole samples. It reads and verifies the part as other readers
do whole samples. Whole samples are read instead where that saves little, where the CRC32C of a
field is not stored, and where the columns of the fields are malformed.

A node service has such readers for its clients. Each of its clients finds the parts as well, and
has the service's reader of the same fields in place of one of its own.

Threads: any at once; ``close`` by one. Limits: ``SPANS_MAX`` readers of fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlfs.attributes import AttributeTable
from dlfs.base.forks import Lock
from dlfs.directory import PartDirectory
from dlfs.errors import ClosedError, FormatError, LimitError, UsageError
from dlfs.fields import FieldSpan, find_fields, find_span, has_checksums, locate_span
from dlfs.fields.batch_fields import pick_fields
from dlfs.format.location import pack_locations
from dlfs.reader.reader import SampleReader

SPANS_MAX = 4
"""Most readers of fields of an open dataset. Other choices of fields are read as whole samples."""

SHARE_MAX = 7 / 8
"""Largest share of the bytes of the samples that a reader of fields is opened for."""

OpenParts = Callable[[PartDirectory, FieldSpan], SampleReader | None]
"""Opens a reader of parts of samples, given their directory and the fields that they have. It
returns None if a service has too many of them."""


class FieldReaders:
    """The readers of one open dataset in one process.

    Args:
        whole: reader of whole samples.
        attributes: returns the columns of the dataset.
        open_parts: opens a reader of parts.
        dataset: name of the dataset.

    Attributes:
        whole: reader of whole samples.

    Threads: any at once; ``close`` by one.
    """

    def __init__(
        self,
        whole: SampleReader,
        attributes: Callable[[], AttributeTable],
        open_parts: OpenParts,
        dataset: str,
    ) -> None:
        self.whole = whole
        self._attributes = attributes
        self._open_parts = open_parts
        self._dataset = dataset
        self._spans: dict[FieldSpan, SampleReader] = {}
        self._opening = Lock()
        self._closed = False

    def reader(self, fields: Sequence[str] | None) -> SampleReader:
        """Return the reader for some fields, opened if need be.

        Args:
            fields: names of the fields; None for whole samples.

        Raises:
            UsageError: there is no such field, or a name occurs twice.
            ClosedError: the dataset was closed.
            DlfsError: the columns cannot be read.
        """
        if fields is None or not len(self.whole.directory):
            return self.whole
        table = self._attributes()
        types = find_fields(table, np.empty(0, np.uint64), self._dataset)
        span = find_span(types, pick_fields(types, fields, self._dataset))
        found = self._spans.get(span)
        if found is not None:
            return found
        with self._opening:
            if self._closed:
                raise ClosedError(f"use dataset {self._dataset!r}: it is closed")
            if span not in self._spans:
                self._spans[span] = self._open(span)
            return self._spans[span]

    def _open(self, span: FieldSpan) -> SampleReader:
        """Open the reader of a span; return the reader of whole samples where it is as good."""
        table, whole = self._attributes(), self.whole.directory
        opened = sum(reader is not self.whole for reader in self._spans.values())
        if opened == SPANS_MAX or not has_checksums(table, span):
            return self.whole
        sample_bytes = whole.lengths()
        try:
            types = find_fields(table, np.arange(len(whole), dtype=np.uint64), self._dataset)
            starts, lengths, crcs = locate_span(table, types, span, sample_bytes, self._dataset)
            addresses = whole.addresses() + starts.view(np.uint64)
            locations = pack_locations(addresses, lengths, crcs)
        except (FormatError, LimitError, UsageError):
            return self.whole  # batches of whole samples name the sample with the error
        if int(lengths.sum()) > SHARE_MAX * int(sample_bytes.sum()):
            return self.whole
        reader = self._open_parts(PartDirectory(whole, locations), span)
        if reader is None:
            return self.whole
        reader.attributes = self.whole.attributes
        return reader

    def _all(self) -> list[SampleReader]:
        """Return all readers, each once."""
        opened = list(self._spans.values())  # a copy: another thread may open one
        return [self.whole, *(reader for reader in opened if reader is not self.whole)]

    def stats(self) -> dict[str, int]:
        """Return the sums of the readers' counters by their ``dlfs_reader_stats`` names."""
        each = [reader.stats() for reader in self._all()]
        return {name: sum(stats[name] for stats in each) for name in each[0]}

    def member_stats(self) -> list[dict[str, Any]]:
        """Return the sums of the readers' counters of each member; see ``SampleReader``."""
        return sum_members([reader.member_stats() for reader in self._all()])

    def close(self) -> None:
        """Close all readers. Epochs and calls under way keep what they use until they end."""
        with self._opening:
            self._closed = True
            readers = self._all()
        for reader in readers:
            reader.close()


def sum_members(each: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the sums of several readers' counters of each member; see ``SampleReader``.

    Args:
        each: ``member_stats`` of the readers, of which the first one takes the sums.
    """
    first, *others = each
    for other in others:
        for total, one in zip(first, other, strict=True):
            for name in ("reads", "read_bytes", "errors", "latency_ns"):
                total[name] += one[name]
            pairs = zip(total["latency"], one["latency"], strict=True)
            total["latency"] = [a + b for a, b in pairs]
    return first
