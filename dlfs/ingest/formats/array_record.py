"""Imports ArrayRecord files: every record is a sample, or one feature of each tf.train.Example.

``tfrecord.records`` makes samples of the records. The package ``array_record`` reads them, and
checks the hashes of the file. Records that were written in groups (``group_size``) are stored and
unpacked as a group. Runs of whole groups are read in an order drawn from the seed, and the dataset
writer shuffles their samples within its window. A damaged group costs its own records only.

Memory: a run of records, which is at least a group, and the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlfs.base.extras import load_package
from dlfs.errors import FormatError
from dlfs.ingest.bad_records import REST, BadRecords
from dlfs.ingest.formats.tfrecord.records import RecordOptions, RecordSource
from dlfs.ingest.isolation.confines import allow_memory, note_location
from dlfs.ingest.records import PartSource, files_of
from dlfs.ingest.source import (
    Int64Array,
    SampleBlock,
    Uint64Array,
    file_errors,
    file_state,
)

_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
"""Options of the reader: no threads, each of which would have a buffer of 16 MiB."""
_SETTING = re.compile(r"(\w+):(\w+)")
"""A setting of the writer in the text that a file has of them."""
_COPIES = 4
"""Memory that the groups of a file may take, in multiples of its size."""


@dataclass(frozen=True, slots=True)
class ArrayRecordOptions(RecordOptions):
    """Options of ArrayRecord files."""

    def open(self, paths: Sequence[str]) -> ArrayRecordSource:
        """Open ArrayRecord files, or folders of them; see ``ArrayRecordSource``."""
        return ArrayRecordSource(files_of(paths, "arrayrecord", noun="an ArrayRecord file"), self)


class _Reader:
    """An open file.

    Args:
        path: path of the file.

    Attributes:
        records: reader of the package.
    """

    def __init__(self, path: str) -> None:
        what = f"import {path}"
        module = load_package(
            "array_record.python.array_record_module",
            extra="arrayrecord",
            what=what,
            package="array_record",
        )
        note_location(what)
        with _errors(what):
            self.records: Any = module.ArrayRecordReader(path, _OPTIONS)
            if not self.records.ok():
                self.records.close()  # which raises the reader's error

    def close(self) -> None:
        """Close the file."""
        with suppress(RuntimeError):  # of damage, which reading has raised, too
            self.records.close()


@contextmanager
def _errors(where: str) -> Iterator[None]:
    """Turn the errors of the package into typed ones."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, MemoryError, SystemError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise FormatError(f"{where}: the file is damaged: {text}") from error


class ArrayRecordSource(RecordSource, PartSource[_Reader]):
    """The records of some ArrayRecord files.

    Args:
        shards: paths of the files.
        options: options of the format.

    Raises:
        UsageError: the list of files is empty, two files have one name, or the package
            ``array_record`` is not installed.
        NotFoundError: a file does not exist.
        FormatError: a file is damaged, or ends early.
        DeviceError: a file cannot be read.
    """

    def __init__(self, shards: Sequence[str], options: ArrayRecordOptions) -> None:
        super().__init__(shards, options, noun="an ArrayRecord file", format_name="arrayrecord")
        self.states: list[tuple[int, int]] = []
        self._counts: list[int] = []
        self._group_sizes: list[int] = []
        for number, shard in enumerate(self.shards):
            with file_errors(f"import {shard}"), open(shard, "rb") as file:
                self.states.append(file_state(file.fileno()))
            count, group_size = 0, "1"
            try:
                with closing(self.open_file(number)) as reader:
                    count = reader.records.num_records()
                    written = reader.records.writer_options_string()
                    group_size = dict(_SETTING.findall(written)).get("group_size", group_size)
            except FormatError as error:
                self.bad.note(shard, REST, error)
            self._counts.append(count)
            self._group_sizes.append(int(group_size))
        self.sample_count = sum(self._counts) if options.nulls != "skip" else None
        self.find_runs()
        if self.gives_runs:
            self.undivided = "its records are read in short runs from all files, so that one pass"
            self.undivided += " shuffles them"
        elif options.fields:
            self.undivided = "its first record gives the types of the fields"
        else:
            self.divide_by_file()

    def find_parts(self, size_bytes: int) -> tuple[Int64Array, Uint64Array]:
        """Divide the files into runs of whole groups; see ``PartSource``."""
        parts: list[Int64Array] = []
        sizes: list[Uint64Array] = []
        for number, count in enumerate(self._counts):
            mean = max(1, self.states[number][0]) / max(1, count)
            group = self._group_sizes[number]
            length = max(1, int(size_bytes / mean / group)) * group
            firsts = np.arange(0, count, length)
            counts = np.minimum(length, count - firsts)
            parts.append(np.stack([np.full(len(firsts), number), firsts, counts], axis=1))
            sizes.append((counts * mean).astype(np.uint64))
        return np.concatenate(parts), np.concatenate(sizes)

    def read_part(self, group: int, first: int, count: int) -> Iterator[SampleBlock]:
        """Read some records of a file; see ``PartSource``."""
        return self.gather(group, self.samples(group, self._read(group, first, count, self.bad)))

    def open_file(self, number: int) -> _Reader:
        """Open a file; see ``PartSource``."""
        allow_memory(_COPIES * self.states[number][0])
        return _Reader(self.shards[number])

    def stream(self, number: int, bad: BadRecords) -> Generator[tuple[int, bytes], None, None]:
        """Yield the records of one file; see ``RecordSource``."""
        return self._read(number, 0, self._counts[number], bad)

    def _read(
        self, number: int, first: int, count: int, bad: BadRecords
    ) -> Generator[tuple[int, bytes], None, None]:
        """Yield the numbers and data of some records of a file."""
        shard, is_sound = self.shards[number], True
        for index in range(first, first + count):
            where = f"import {shard}: record {index}"
            note_location(where)
            try:
                with _errors(where):
                    records = self.opened(number).records
                    if index == first:
                        records.seek(first)
                    record = records.read() if is_sound else records.read([index])[0]
            except FormatError as error:
                if is_sound:
                    self.drop(number)  # it gives no further record in order
                is_sound = False
                bad.note(shard, f"record {index}", error)
            else:
                yield index, record
        if not is_sound:
            self.drop(number)
