"""Imports ArrayRecord files: every record is a sample, or one feature of each tf.train.Example.

``tfrecord.records`` makes samples of the records. The package ``array_record`` reads them, and
checks the hashes of the file. A file is read from its first record to its last, because records
that were written in groups (``group_size``) are stored and unpacked as a group; files are read in
an order drawn from the seed. So the dataset writer shuffles samples within its window.

Memory: a group of records, and the blocks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from dlfs.base.extras import load_package
from dlfs.errors import FormatError
from dlfs.ingest.bad_records import BadRecords
from dlfs.ingest.formats.tfrecord.records import RecordOptions, RecordSource
from dlfs.ingest.isolation.confines import allow_memory, note_location
from dlfs.ingest.records import files_of
from dlfs.ingest.source import SampleBlock, check_unchanged, file_errors, file_state

_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
"""Options of the reader: no threads, each of which would have a buffer of 16 MiB."""
_COPIES = 4
"""Memory that the groups of a file may take, in multiples of its size."""


@dataclass(frozen=True, slots=True)
class ArrayRecordOptions(RecordOptions):
    """Options of ArrayRecord files."""

    def open(self, paths: Sequence[str]) -> ArrayRecordSource:
        """Open ArrayRecord files, or folders of them; see ``ArrayRecordSource``."""
        return ArrayRecordSource(files_of(paths, "arrayrecord", noun="an ArrayRecord file"), self)


class ArrayRecordSource(RecordSource):
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
        self._states: list[tuple[int, int]] = []
        self._counts: list[int] = []
        for shard in self.shards:
            with file_errors(f"import {shard}"), open(shard, "rb") as file:
                self._states.append(file_state(file.fileno()))
            with _reader(shard) as reader:
                self._counts.append(reader.num_records())
        self.sample_count = sum(self._counts) if options.nulls != "skip" else None

    def read_shard(self, number: int) -> Iterator[SampleBlock]:
        """Read one file; see ``ShardSource``."""
        if self._examples is None and self.passes(self._counts[number]):
            return iter(())
        return super().read_shard(number)

    def stream(self, number: int, bad: BadRecords) -> Generator[tuple[int, bytes], None, None]:
        """Yield the records of one file; see ``RecordSource``."""
        del bad  # behind a record that is damaged, none can be read
        first = 0 if self._examples is not None else min(self.to_pass, self._counts[number])
        self.to_pass -= first
        shard = self.shards[number]
        allow_memory(_COPIES * self._states[number][0])
        with _reader(shard) as reader:
            if first:
                with _errors(f"import {shard}"):
                    reader.seek(first)
            for count in range(first, self._counts[number]):
                where = f"import {shard}: record {count}"
                note_location(where)
                with _errors(where):
                    record = reader.read()
                yield count, record
        check_unchanged(f"import {shard}", shard, self._states[number])


@contextmanager
def _reader(path: str) -> Iterator[Any]:
    """Open a file."""
    what = f"import {path}"
    module = load_package(
        "array_record.python.array_record_module",
        extra="arrayrecord",
        what=what,
        package="array_record",
    )
    note_location(what)
    with _errors(what):
        reader = module.ArrayRecordReader(path, _OPTIONS)
        if not reader.ok():
            reader.close()  # which raises the reader's error
    try:
        yield reader
    finally:
        with suppress(RuntimeError):  # of damage, which reading has raised, too
            reader.close()


@contextmanager
def _errors(where: str) -> Iterator[None]:
    """Turn the errors of the package into typed ones."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, MemoryError, SystemError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise FormatError(f"{where}: the file is damaged: {text}") from error
