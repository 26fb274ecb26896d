"""Imports tables: Parquet, Arrow IPC (Feather too), JSON Lines, and Hugging Face datasets.

One column gives the samples. It is binary or text, or a struct with such a child ``bytes``, as
Hugging Face stores images and sounds. Children of structs are named ``image.bytes``. All other
columns with a number, a bool or text in each row become attributes, unless ``attributes`` names
some; times and decimals become text. A sample's path is ``FILE/ROW`` (see ``records``), or the
value of the column ``path``. Files that ``dlfs export`` wrote mark these columns themselves.

With ``fields``, a sample has the columns that it names as fields, and other columns of single
values are attributes. This is so by itself if several columns could be the sample: these are the
fields then, and all columns of lists. A struct with a child ``bytes`` is a field of bytes, other
structs are a field for each child. ``tables.plain`` gives the types. Values of no such type, such
as lists of text, are taken as JSON by ``NAME:text``.

A folder that ``datasets`` saved is one dataset, or a folder for each of its splits. The split
begins the paths and is the attribute ``split``: ``train/data-00000-of-00002/00000017``. A folder of
the cache of ``load_dataset``, with its ``dataset_info.json``, has all splits of a dataset, treated
in the same way. The files and numbers of rows that it lists must be there; other Arrow files, which
``map`` and ``filter`` leave there, are counted.

The columns of several files are joined, also those that only some have, and types that go together
(``tables.schemas``). A null, or a file without the column, is an error that names file and row,
unless ``nulls`` says otherwise; in a column of floats it becomes NaN. ``tables`` says how damage is
found.

Memory: files are read in turn, a Parquet file by parts of row groups, an Arrow file by its record
batches, JSON Lines by 4 MiB, and a few of these exist at a time. Needs pyarrow.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.base.units import MIB
from dlfs.errors import DeviceError, FormatError, UsageError
from dlfs.ingest.bad_records import REST, Name, RecordError
from dlfs.ingest.fields import FieldRecords, parse_choices
from dlfs.ingest.records import ShardSource, end_with_cursor, files_of, shard_prefixes
from dlfs.ingest.registry import find_format
from dlfs.ingest.source import (
    SampleBlock,
    check_path,
    file_errors,
    left_out_names,
    single_path,
)
from dlfs.ingest.tables.choosing import TableOptions, choose_columns
from dlfs.ingest.tables.files import Table, open_ipc, open_parquet
from dlfs.ingest.tables.json_lines import json_lines_opener
from dlfs.ingest.tables.known import KnownTables, describe_tables
from dlfs.ingest.tables.schemas import FileSchema, JoinedSchema, join_schemas

_STATE_BYTES_MAX = 16 * MIB
"""Most bytes of a JSON file that lists the files of a dataset."""


@dataclass(frozen=True, slots=True)
class ParquetOptions(TableOptions):
    """Options of Parquet files."""

    def open(self, paths: Sequence[str]) -> ArrowSource:
        """Open Parquet files, or folders of them; see ``ArrowSource``."""
        return _open_files(paths, self, "parquet", "a Parquet file", open_parquet)

    def open_known(
        self, paths: Sequence[str], shared: bytes, facts: Sequence[bytes]
    ) -> ArrowSource:
        """Open some files of several; see ``registry.SharedOptions``."""
        known = KnownTables.of(shared, paths, facts)
        return _open_files(paths, self, "parquet", "a Parquet file", open_parquet, known)


@dataclass(frozen=True, slots=True)
class ArrowOptions(TableOptions):
    """Options of Arrow files."""

    def open(self, paths: Sequence[str]) -> ArrowSource:
        """Open Arrow files, or folders of them; see ``ArrowSource``."""
        return _open_files(paths, self, "arrow", "an Arrow file", open_ipc)

    def open_known(
        self, paths: Sequence[str], shared: bytes, facts: Sequence[bytes]
    ) -> ArrowSource:
        """Open some files of several; see ``registry.SharedOptions``."""
        known = KnownTables.of(shared, paths, facts)
        return _open_files(paths, self, "arrow", "an Arrow file", open_ipc, known)


@dataclass(frozen=True, slots=True)
class JsonLinesOptions(TableOptions):
    """Options of JSON Lines."""

    def open(self, paths: Sequence[str]) -> ArrowSource:
        """Open files of JSON Lines, or folders of them; see ``ArrowSource``."""
        return _open_files(paths, self, "jsonl", "a file of JSON Lines", json_lines_opener())

    def open_known(
        self, paths: Sequence[str], shared: bytes, facts: Sequence[bytes]
    ) -> ArrowSource:
        """Open some files of several; see ``registry.SharedOptions``."""
        known = KnownTables.of(shared, paths, facts)
        opener = json_lines_opener(known.types)
        return _open_files(paths, self, "jsonl", "a file of JSON Lines", opener, known)


@dataclass(frozen=True, slots=True)
class HuggingFaceOptions(TableOptions):
    """Options of a saved or cached Hugging Face dataset."""

    def open(self, paths: Sequence[str]) -> ArrowSource:
        """Open the folder of ``save_to_disk`` or of the cache; see ``ArrowSource``."""
        folder = Path(single_path(paths, "saved or cached dataset"))
        is_saved = (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()
        shards = _saved_shards(folder) if is_saved else _cached_shards(folder)
        source = ArrowSource(shards, self, open_ipc)
        if not is_saved:
            known = {Path(shard.path).name for shard in shards}
            others = sorted({path.name for path in folder.glob("*.arrow")} - known)
            source.skipped.update(left_out_names("file of map or filter", others))
        return source


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its path, the prefix of its samples' paths, and attributes that all have."""

    path: str
    prefix: bytes
    constants: Mapping[str, str] = field(default_factory=dict)
    row_count: int | None = None
    """Number of rows that the file must have, if it is known."""


Opener = Callable[[str], AbstractContextManager[Table]]


class ArrowSource(ShardSource):
    """The rows of some files.

    Args:
        shards: the files.
        options: options of the format.
        opener: function that opens a file of this kind.
        known: what is known of all files, if these are some of them.

    Raises:
        UsageError: the list of files is empty, a column does not exist or cannot be the sample, or
            pyarrow is not installed.
        FormatError: a file lacks a column, or has it in a type that does not go with another's.
        DlfsError: a file does not exist, is damaged, or cannot be read.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        options: TableOptions,
        opener: Opener,
        known: KnownTables | None = None,
    ) -> None:
        super().__init__([shard.path for shard in shards], noun="a file")
        self._shards = shards
        self._opener = opener
        wanted = options.attributes
        self._constants = [name for name in shards[0].constants if wanted is None or name in wanted]
        if wanted is not None:
            wanted = tuple(name for name in wanted if name not in shards[0].constants)
        self._lost: set[int] = set()
        joined = self._join_schemas(options) if known is None else known.joined
        fields = parse_choices(options.fields, f"import {self.name}")
        chosen = dataclasses.replace(options, attributes=wanted)
        where = f"import {self.shards[0]}"
        self._columns = choose_columns(joined.schema, chosen, fields, where)
        self._columns.check(joined)
        self.skipped: dict[str, int] = self._columns.left_out
        self._maker = FieldRecords(self._columns.declared, self._columns.known_types)

    def _join_schemas(self, options: TableOptions) -> JoinedSchema:
        """Join the schemas of all files; count their rows, if these are known."""
        counts: list[int | None] = []
        found: list[FileSchema] = []
        conflicts: dict[str, str] = {}
        joins_numbers = False
        types: list[tuple[int, int | None]] = []
        for number, shard in enumerate(self._shards):
            try:
                with self._opener(shard.path) as table:
                    joins_numbers = table.joins_numbers
                    conflicts.update(table.conflicts)
                    counts.append(shard.row_count if table.row_count is None else table.row_count)
                    equal = (at for at, one in enumerate(found) if table.schema.equals(one.schema))
                    at = next(equal, len(found))
                    if at == len(found):
                        found.append(FileSchema(shard.path, table.schema))
                    types.append((at, table.row_count))
            except (FormatError, DeviceError) as error:
                self.bad.note(shard.path, REST, error)
                self._lost.add(number)
        if not found:
            raise FormatError(f"import {self.name}: expected a readable file, got none")
        if None not in counts and options.nulls != "skip":
            self.sample_count = sum(filter(None, counts))
        joined = join_schemas(found, joins_numbers=joins_numbers)
        joined.conflicts.update(conflicts)
        self.separate_files = [path for at, path in enumerate(self.shards) if at not in self._lost]
        self.shared, self.file_facts = describe_tables(joined, types)
        return joined

    def restore_skipped(self, skipped: Mapping[str, int]) -> None:
        """Take the counts of rows up to a cursor; see ``ShardSource``."""
        self._columns.left_out.clear()
        self._columns.left_out.update(skipped)

    def read_shard(self, number: int) -> Iterator[SampleBlock]:
        """Read one file; see ``ShardSource``."""
        if number in self._lost:
            return
        shard, columns = self._shards[number], self._columns
        passed, self.first_record = self.first_record, 0
        with self._opener(shard.path) as table:
            count = None  # of its samples, if it is needed and known
            if self.to_pass and columns.nulls != "skip":
                count = table.find_row_count() if table.row_count is None else table.row_count
            if count is not None and self.passes(count - passed):
                return
            first = passed + (0 if count is None else self.to_pass)
            for row, batch in self._batches(table, shard.path, first):
                end = row + batch.num_rows
                if end <= passed:
                    continue
                self.passes(row - passed)
                make = partial(self._blocks, shard, batch, row)
                name = partial(_row_name, shard.path, row)
                found = chain.from_iterable(self.bad.each_part(batch.num_rows, make, name))
                yield from end_with_cursor(found, {"record": end})
                passed = end
        if shard.row_count not in (None, passed):
            raise FormatError(
                f"import {shard.path}: expected {shard.row_count} rows as its dataset_info.json "
                f"says, got {passed}"
            )

    def _batches(self, table: Table, path: str, first: int) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a file from a row on, without parts of it that are damaged."""
        while True:
            try:
                for row, batch in table.batches(self._columns.names, first):
                    yield row, batch
                    first = row + batch.num_rows
                return
            except (FormatError, DeviceError) as error:
                end = table.part_end(first) if self.bad.are_allowed else None
                if end is None:
                    raise
                name = f"rows {first}..{end - 1}" if end - first > 1 else f"row {first}"
                self.bad.note(path, name, error, end - first)
                first = end

    def _blocks(
        self, shard: Shard, batch: Any, row: int, first: int, count: int
    ) -> Iterable[SampleBlock]:
        """Make blocks of some rows of a batch, at once if bad rows are to be left out.

        Args:
            shard: the file.
            batch: a batch of it.
            row: number of its first row in the file.
            first: number of the first of the rows in the batch.
            count: number of the rows.
        """
        columns, before = self._columns, dict(self._columns.left_out)
        part = batch if count == batch.num_rows else batch.slice(first, count)
        found = columns.blocks(part, row + first, shard.prefix, f"import {shard.path}", self._maker)
        blocks = (self._with_constants(block, shard) for block in found)
        if not self.bad.are_allowed:
            return blocks
        try:
            return list(blocks)
        except RecordError:  # its rows are tried again in parts
            columns.left_out.clear()
            columns.left_out.update(before)
            raise

    def _with_constants(self, block: SampleBlock, shard: Shard) -> SampleBlock:
        added: dict[str, npt.NDArray[Any]] = {
            name: np.full(len(block.paths), shard.constants[name], object)
            for name in self._constants
        }
        return dataclasses.replace(block, attributes={**added, **block.attributes})


def _row_name(path: str, row: int, index: int) -> Name:
    """Return the file and the name of a row, by its number from ``row`` on."""
    return path, f"row {row + index}"


# ---- files ---------------------------------------------------------------------------------------


def _open_files(
    paths: Sequence[str],
    options: TableOptions,
    name: str,
    noun: str,
    opener: Opener,
    known: KnownTables | None = None,
) -> ArrowSource:
    files = files_of(paths, name, noun=noun)
    prefixes = shard_prefixes(files, find_format(name).suffixes)
    return ArrowSource(list(map(Shard, files, prefixes)), options, opener, known)


# ---- saved datasets ------------------------------------------------------------------------------


def _saved_shards(folder: Path) -> list[Shard]:
    """Return the files of a saved dataset, or of each of its splits."""
    if not (folder / "dataset_dict.json").exists():
        return _split_shards(folder, b"", {})
    shards: list[Shard] = []
    for split in _names(folder / "dataset_dict.json", "splits"):
        shards += _split_shards(folder / split, os.fsencode(split) + b"/", {"split": split})
    return shards


def _split_shards(folder: Path, prefix: bytes, constants: Mapping[str, str]) -> list[Shard]:
    state = folder / "state.json"
    if _json(state).get("_indices_data_files"):
        raise UsageError(
            f"import {state}: expected a dataset without indices; its flatten_indices(), saved, "
            "has none"
        )
    files = [str(folder / name) for name in _names(state, "_data_files", "filename")]
    return [
        Shard(file, prefix + start, constants)
        for file, start in zip(files, shard_prefixes(files, [".arrow"]), strict=True)
    ]


def _cached_shards(folder: Path) -> list[Shard]:
    """Return the files of all splits of a dataset in the cache."""
    info = folder / "dataset_info.json"
    if not info.exists():
        raise UsageError(
            f"import {folder}: expected the folder of a dataset, saved (dataset_dict.json, "
            "state.json) or cached (dataset_info.json), got none of these files"
        )
    listed = _json(info)
    splits = listed.get("splits")
    shards: list[Shard] = []
    for split, found in splits.items() if isinstance(splits, dict) else []:
        where = f"import {info}: split {split!r}"
        found = found if isinstance(found, dict) else {}
        lengths = found.get("shard_lengths") or [found.get("num_examples")]
        if not isinstance(lengths, list) or not all(isinstance(one, int) for one in lengths):
            raise FormatError(f"{where}: expected numbers of rows, got {lengths}")
        dataset = found.get("dataset_name") or listed.get("builder_name")
        prefix = os.fsencode(_entry_name(split, f"{where}: expected a name"))
        start = _entry_name(f"{dataset}-{split}", f"{where}: expected the name of a file")
        for number, length in enumerate(lengths):
            part = f"-{number:05d}-of-{len(lengths):05d}" if len(lengths) > 1 else ""
            path = b"%s/%s" % (prefix, os.fsencode(start + part))
            file = str(folder / f"{start}{part}.arrow")
            shards.append(Shard(file, path, {"split": split}, length))
    if not shards:
        raise FormatError(f"import {info}: expected splits with numbers of rows, got {splits}")
    return shards


def _entry_name(name: object, where: str) -> str:
    """Return a name in a JSON file, which has to be that of an entry of the file's folder."""
    if not isinstance(name, str) or not name or "/" in name or name in (".", ".."):
        raise FormatError(f"{where}, got {name!r}")
    check_path(os.fsencode(name), where)
    return name


def _names(path: Path, key: str, member: str | None = None) -> list[str]:
    """Return the names in a list of a JSON file; each names an entry of the file's folder."""
    listed = _json(path).get(key)
    names: list[str] = []
    for item in listed if isinstance(listed, list) else [None]:
        name = item.get(member) if member and isinstance(item, dict) else item
        names.append(_entry_name(name, f"import {path}: expected names in {key}"))
    return names


def _json(path: Path) -> dict[str, Any]:
    with file_errors(f"import {path}"), path.open("rb") as file:
        text = file.read(_STATE_BYTES_MAX)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"import {path}: expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"import {path}: expected a JSON object")
    return found
