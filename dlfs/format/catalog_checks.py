"""Checks a whole catalog at once, as arrays: fields, names, and the owner of each chunk.

A decoder calls ``check_arrays`` on what it has read, a writer on what it is about to commit. Time
is that of sorting the runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dlfs.base.wording import quote
from dlfs.errors import UsageError
from dlfs.format.constants import (
    ADDRESS_MAX,
    ATTRIBUTE_BLOCK_BYTES,
    BAD_RECORDS_BYTES_MAX,
    CHUNK_END_MAX,
    DATASET_NAME_BYTES_MAX,
    DATASET_SAMPLES_MAX,
    DATASET_VERSION_MAX,
    DIRECTORY_BLOCK_BYTES,
    FIRST_PASS_BYTES,
    LOCATION_BYTES,
    SOURCE_BYTES_MAX,
    TAG_BAD_RECORDS,
    TAG_FIRST_PASS,
    TAG_SOURCE,
    TAG_TERM,
    TERM_BYTES,
    TIME_NS_MAX,
)
from dlfs.format.dataset_record import LAYOUTS, RUN_KINDS, STATES, decode_tags
from dlfs.format.names import dataset_name_problem
from dlfs.format.run_arrays import gaps, to_array
from dlfs.format.superblock import Superblock

if TYPE_CHECKING:
    from dlfs.format.catalog import Catalog

NO_GROUP = "chunk numbers of no group"
_Values = NDArray[Any]


def check_arrays(catalog: Catalog, superblock: Superblock) -> None:
    """Check the arrays of a catalog.

    Raises:
        UsageError: a field is out of its range or disagrees with another, records are not in order
            of (name, version), two owners share a chunk, or a chunk has none.
    """
    _check_totals(catalog)
    _check_names(catalog)
    _check_tags(catalog)
    _check_ranges(catalog)
    _check_sizes(catalog, superblock.geometry.chunk_bytes)
    _check_free(catalog)
    _Owners(catalog, superblock).check()


def describe(catalog: Catalog, position: int) -> str:
    """Return the words for a record in messages."""
    start = int(catalog.text_starts[position])
    row = catalog.table[position]
    name = catalog.text[start : start + int(row["name_bytes"])].tobytes()
    if row["state"] == STATES.index("unfinished"):
        return f"unfinished dataset {quote(name)}"
    return f"dataset {quote(name)} version {row['version']}"


def _check_totals(catalog: Catalog) -> None:
    """Check that the records have all runs and all text."""
    for what, expected, got in (
        ("runs of datasets", catalog.run_starts[-1], len(catalog.runs)),
        ("bytes of names and tagged values", catalog.text_starts[-1], len(catalog.text)),
    ):
        if expected != got:
            raise UsageError(f"expected {expected} {what}, got {got}")


def _check_names(catalog: Catalog) -> None:
    """Check the names, and that they rise with the versions."""
    table = catalog.table
    lengths = table["name_bytes"]
    for position in np.flatnonzero((lengths < 1) | (lengths > DATASET_NAME_BYTES_MAX))[:1].tolist():
        raise UsageError(
            f"expected a name of 1..{DATASET_NAME_BYTES_MAX} bytes of dataset {position}, "
            f"got {lengths[position]}"
        )
    names = catalog.names
    letters = names.view(np.uint8).reshape(len(names), names.itemsize)
    zeros = np.count_nonzero(letters == 0, axis=1)
    wrong = (letters == ord("/")).any(axis=1) | (names == b".") | (names == b"..")
    wrong |= letters.shape[1] - zeros != lengths
    for position in np.flatnonzero(wrong)[:1].tolist():
        start = int(catalog.text_starts[position])
        name = catalog.text[start : start + int(lengths[position])].tobytes()
        raise UsageError(f"dataset {quote(name)}: {dataset_name_problem(name)}")
    same = names[1:] == names[:-1]
    rises = (names[1:] > names[:-1]) | (same & (table["version"][1:] > table["version"][:-1]))
    for position in np.flatnonzero(~rises)[:1].tolist():
        raise UsageError(
            f"expected datasets in rising order of (name, version), got "
            f"{describe(catalog, position)} before {describe(catalog, position + 1)}"
        )


def _check_tags(catalog: Catalog) -> None:
    """Check the tagged values of the records that have some."""
    table = catalog.table
    for position in np.flatnonzero(table["tags_bytes"]).tolist():
        end = int(catalog.text_starts[position + 1])
        start = end - int(table["tags_bytes"][position])
        try:
            tags = decode_tags(catalog.text[start:end].tobytes())
        except UsageError as error:
            raise UsageError(f"{describe(catalog, position)}: {error}") from error
        for known, noun, least, most in (
            (TAG_SOURCE, "description of its source", 0, SOURCE_BYTES_MAX),
            (TAG_BAD_RECORDS, "report of bad records", 8, BAD_RECORDS_BYTES_MAX),
            (TAG_FIRST_PASS, "account of a first pass", FIRST_PASS_BYTES, FIRST_PASS_BYTES),
            (TAG_TERM, "term of a coordinator", TERM_BYTES, TERM_BYTES),
        ):
            sizes = [len(value) for tag, value in tags if tag == known]
            if len(sizes) > 1 or any(not least <= size <= most for size in sizes):
                raise UsageError(
                    f"{describe(catalog, position)}: expected one {noun} of {least} to {most} "
                    f"bytes, got {sizes}"
                )


def _check_ranges(catalog: Catalog) -> None:
    """Check the fields that have a range, one field of all records after the other."""
    table = catalog.table
    sealed = table["state"] == STATES.index("sealed")
    longest = np.where(sealed, np.uint64(ADDRESS_MAX), np.uint64(0))
    least = np.where(sealed, np.uint64(DIRECTORY_BLOCK_BYTES), np.uint64(0))
    versions_max = np.where(sealed, np.uint64(DATASET_VERSION_MAX), np.uint64(0))
    in_directory = table["entries_bytes"] // np.uint64(LOCATION_BYTES)
    samples_max = np.where(sealed, in_directory, np.uint64(DATASET_SAMPLES_MAX))
    in_journal = np.where(sealed, np.uint64(0), np.uint64(ADDRESS_MAX))
    fields: list[tuple[str, str, _Values | int, _Values | int]] = [
        ("state", "state", 0, len(STATES) - 1),
        ("layout", "layout", 0, len(LAYOUTS) - 1),
        ("version", "version", sealed.astype(np.uint64), versions_max),
        ("creation time", "created_ns", 0, TIME_NS_MAX),
        ("entries bytes", "entries_bytes", least, longest),
        ("names bytes", "names_bytes", least, longest),
        ("sample count", "sample_count", 0, samples_max),
        ("data bytes", "data_bytes", 0, ADDRESS_MAX),
        ("sample bytes", "sample_bytes", 0, table["data_bytes"]),
        ("journal bytes", "journal_bytes", 0, in_journal),
        ("journal runs", "journal_run_count", 0, in_journal),
        ("granted runs", "granted_run_count", 0, in_journal),
        ("attribute address", "attributes_address", 0, longest),
        ("attribute bytes", "attributes_bytes", 0, longest),
        ("attribute head bytes", "attributes_head_bytes", 0, longest),
    ]
    for name, field, low, high in fields:
        values = table[field]
        for position in np.flatnonzero((values < low) | (values > high))[:1].tolist():
            least_here, most_here = (np.broadcast_to(b, len(table))[position] for b in (low, high))
            raise UsageError(
                f"{describe(catalog, position)}: expected {name} in {least_here}..{most_here}, "
                f"got {values[position]}"
            )


def _check_sizes(catalog: Catalog, chunk_bytes: int) -> None:
    """Check the sizes of records against their runs, and their attribute segments."""
    table, size = catalog.table, np.uint64(chunk_bytes)
    block = np.uint64(ATTRIBUTE_BLOCK_BYTES)
    # A sum that has wrapped around is of runs that overlap, which is an error as well.
    chunks = catalog.sums(catalog.runs[:, 1]).view(np.uint64)
    data_chunks, directory_chunks, journal_chunks, _ = chunks.T
    data = table["data_bytes"]
    address, segment, head = (
        table[f"attributes_{field}"] for field in ("address", "bytes", "head_bytes")
    )
    has_attributes = segment > 0
    whole = (segment % block == 0) & (head % block == 0) & (head >= block) & (head <= segment)
    whole = np.where(has_attributes, whole, (address == 0) & (head == 0))
    for position in np.flatnonzero(~whole)[:1].tolist():
        raise UsageError(
            f"{describe(catalog, position)}: expected an attribute segment of whole blocks with "
            f"its head, got {segment[position]} bytes from {address[position]} with "
            f"{head[position]} of head"
        )
    end = address + _chunks(segment, size) * size
    zero = np.zeros(len(table), np.uint64)
    equal: list[tuple[str, _Values, _Values]] = [
        ("data bytes", data_chunks * size, data),
        ("entries bytes past a block", zero, table["entries_bytes"] % block),
        ("names bytes past a block", zero, table["names_bytes"] % block),
        (
            "directory chunks",
            _chunks(table["entries_bytes"] + table["names_bytes"], size),
            directory_chunks,
        ),
        ("bytes past a chunk in the attribute address", zero, address % size),
        ("end of the attributes", np.where(has_attributes, data, zero), end),
    ]
    for name, expected, got in equal:
        for position in np.flatnonzero(expected != got)[:1].tolist():
            raise UsageError(
                f"{describe(catalog, position)}: expected {name} {expected[position]}, "
                f"got {got[position]}"
            )
    for position in np.flatnonzero(table["journal_bytes"] > journal_chunks * size)[:1].tolist():
        raise UsageError(
            f"{describe(catalog, position)}: expected journal bytes in "
            f"{journal_chunks[position]} chunks, got {table['journal_bytes'][position]}"
        )


def _chunks(sizes: _Values, chunk_bytes: np.uint64) -> _Values:
    """Return the numbers of chunks that hold some bytes."""
    chunks: _Values = (sizes + (chunk_bytes - np.uint64(1))) // chunk_bytes
    return chunks


def _check_free(catalog: Catalog) -> None:
    """Check that free runs rise and that no two could be one."""
    first, counts = catalog.free_runs[:, 0], catalog.free_runs[:, 1]
    wrong = (first[1:] <= first[:-1]) | (first[1:] - first[:-1] <= counts[:-1])
    for at in np.flatnonzero(wrong)[:1].tolist():
        raise UsageError(
            f"expected free runs in order with gaps between them, got {counts[at]} chunks at "
            f"{first[at]} before {first[at + 1]}"
        )


class _Owners:
    """The owner of each run of a catalog: a record, the free space, the catalog, or no group."""

    def __init__(self, catalog: Catalog, superblock: Superblock) -> None:
        self._catalog = catalog
        self._end = superblock.geometry.groups[-1].end_chunk
        others = [
            ("the free space", catalog.free_runs),
            ("the catalog", to_array(superblock.catalog_runs)),
            (NO_GROUP, gaps(superblock.geometry)),
        ]
        self._others = [(name, len(runs)) for name, runs in others]
        self._runs = np.concatenate([catalog.runs, *(runs for _, runs in others)])
        kinds = np.tile(np.arange(len(RUN_KINDS), dtype=np.uint8), len(catalog.table))
        self._kinds = np.repeat(kinds, catalog.run_counts.reshape(-1))
        """Kind of each run of a record, as a position in ``RUN_KINDS``."""
        self._is_data = np.zeros(len(self._runs), bool)
        self._is_data[: len(self._kinds)] = self._kinds == RUN_KINDS.index("data")

    def check(self) -> None:
        """Check that each chunk has one owner, or belongs to the data of several datasets."""
        counts = self._runs[:, 1]
        limit = np.uint64(CHUNK_END_MAX)
        for at in np.flatnonzero(counts == 0)[:1].tolist():
            raise UsageError(f"{self._name(at)}: expected runs of at least one chunk, got 0")
        for at in np.flatnonzero((self._runs[:, 0] >= limit) | (counts > limit))[:1].tolist():
            raise UsageError(
                f"{self._name(at)}: expected chunks below {CHUNK_END_MAX}, got {counts[at]} from "
                f"{self._runs[at, 0]}"
            )
        self._check_own_data()
        self._check_all()

    def _check_own_data(self) -> None:
        """Check that no chunk is in the data of one dataset twice."""
        runs = self._catalog.runs
        records = np.repeat(np.arange(len(self._catalog.table)), np.diff(self._catalog.run_starts))
        data = np.flatnonzero(self._is_data)
        order = data[np.lexsort((runs[data, 0], records[data]))]
        first, ends = runs[order, 0], runs[order, 0] + runs[order, 1]
        twice = (records[order][1:] == records[order][:-1]) & (first[1:] < ends[:-1])
        for at in np.flatnonzero(twice)[:1].tolist():
            raise UsageError(
                f"{self._name(int(order[at + 1]))}: expected each chunk once, got chunk "
                f"{first[at + 1]} twice"
            )

    def _check_all(self) -> None:
        order = np.argsort(self._runs[:, 0], kind="stable")
        first = self._runs[order, 0]
        ends = np.maximum.accumulate(first + self._runs[order, 1])
        before = np.concatenate([np.zeros(1, np.uint64), ends[:-1]])
        is_data = self._is_data[order]
        shared = np.zeros(len(order), bool)
        shared[1:] = is_data[1:] & is_data[:-1] & (first[1:] < before[1:])
        for at in np.flatnonzero((first != before) & ~shared)[:1].tolist():
            what = "no owner" if first[at] > before[at] else "two owners"
            raise UsageError(
                f"expected one owner of every chunk, got {what} at chunk "
                f"{min(int(before[at]), int(first[at]))} between {self._name_before(order, at)} "
                f"and {self._name(int(order[at]))}"
            )
        if ends[-1] != self._end:
            raise UsageError(
                f"expected runs up to chunk {self._end}, got "
                f"{self._name_before(order, len(order))} up to chunk {ends[-1]}"
            )

    def _name_before(self, order: NDArray[np.intp], at: int) -> str:
        """Return the name of the owner that ends before a position in the order."""
        if at == 0:
            return "the start"
        ends = self._runs[order[:at]].sum(axis=1)
        return self._name(int(order[int(ends.argmax())]))

    def _name(self, at: int) -> str:
        """Return the name of a run's owner."""
        if at < len(self._kinds):
            position = int(self._catalog.run_starts.searchsorted(at, "right")) - 1
            return f"the {RUN_KINDS[self._kinds[at]]} of {describe(self._catalog, position)}"
        ends = np.cumsum([count for _, count in self._others])
        return self._others[int(ends.searchsorted(at - len(self._kinds), "right"))][0]
