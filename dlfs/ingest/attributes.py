"""Adds attributes to the samples of any source during an import.

``AttributedSource`` wraps a source and applies rules to its blocks. ``PathRule`` takes a part of
each path, ``TableRule`` the row of a table with that path, and ``ArrayRule`` records that all
samples are arrays of one form. A sample without a value is an error that names the sample. Rows of
a table without a sample are counted, because one table often describes several imports.

Memory: the columns of each table, and a dictionary of its paths.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from dlfs.base.arguments import Layout
from dlfs.errors import FormatError, UsageError
from dlfs.fields.arrays import ArrayForm
from dlfs.format.journal import Cursor
from dlfs.ingest.bad_records import Name
from dlfs.ingest.descriptions import AttributedPart, malformed
from dlfs.ingest.isolation.messages import to_bytes, to_text
from dlfs.ingest.source import (
    PATH_COLUMNS,
    Array,
    Division,
    SampleBlock,
    Source,
    WrappedSource,
    array_attributes,
    check_attribute_names,
    fingerprint_of,
    show,
    slice_samples,
    without_known,
)
from dlfs.ingest.tables.coco import FILE_NAME, read_coco
from dlfs.ingest.tables.columns import Column, column_values
from dlfs.ingest.tables.csv import DELIMITERS, read_csv, text_column, typed_column
from dlfs.ingest.tables.files import Table, open_ipc, open_parquet
from dlfs.ingest.tables.json_lines import open_json_lines
from dlfs.ingest.tables.plain import is_scalar

Columns = Mapping[str, Array]

UNUSED_ROWS = "row of attributes without a sample"

_ARROW = (".arrow", ".arrows", ".feather", ".ipc")
_PARQUET = (".parquet", ".parq", ".pq")
_JSON_LINES = (".jsonl", ".ndjson")
_COCO = ".json"
_OPENERS: dict[str, Callable[[str], AbstractContextManager[Table]]] = {
    **dict.fromkeys(_ARROW, open_ipc),
    **dict.fromkeys(_PARQUET, open_parquet),
    **dict.fromkeys(_JSON_LINES, open_json_lines),
}
"""Function that opens a table, by the ending of its name in lower case."""

_TYPES: dict[str, Callable[[str], int | float | str]] = {"int": int, "float": float, "str": str}


def parse_named(text: str) -> tuple[str, Callable[[str], int | float | str], str]:
    """Read ``NAME=VALUE`` or ``NAME:TYPE=VALUE``.

    Returns:
        The name, the function that reads a value of the type, and the text of the value.

    Raises:
        UsageError: the text has another form.
    """
    name, kind, value = _split_named(text, "VALUE")
    return name, _TYPES[kind], value


def _split_named(text: str, what: str) -> tuple[str, str, str]:
    """Return name, type and value of ``NAME=VALUE`` or ``NAME:TYPE=VALUE``."""
    head, equals, value = text.partition("=")
    name, colon, kind = head.rpartition(":")
    if not colon or kind not in _TYPES:
        name, kind = head, "str"
    if not equals or not name or not (value or what == "VALUE"):
        raise UsageError(f"expected an attribute as NAME={what}, got {text!r}")
    return name, kind, value


class Rule(Protocol):
    """A rule that gives samples further attributes."""

    skipped: Mapping[str, int] = {}
    """Number of entries left out, by reason; complete once all blocks were seen."""
    fingerprint: str | None = None
    """Differs for a rule that gives other attributes. None: no import goes on with the rule."""

    description: Sequence[str] = ()
    """Kind and parameters of a rule that another process can make; empty if it cannot."""
    needs_all: bool = False
    """True for a rule that compares samples: it sees those that an earlier import has, too."""

    def seek(self, count: int) -> None:
        """Take note that so many samples had their attributes in an earlier import."""
        del count

    def columns(self, block: SampleBlock) -> Columns:
        """Return the rule's attributes of the samples of a block.

        Raises:
            UsageError: the rule has no value for a sample; the message names the sample.
        """
        ...


class AttributedSource(WrappedSource):
    """A source whose samples have further attributes.

    Args:
        source: source of the samples; closed with this object.
        rules: rules that give the attributes. Where two give an attribute of one name, the later
            rule wins; each wins over the source's own attribute.
    """

    def __init__(self, source: Source, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._is_known: Callable[[bytes], bool] | None = None
        super().__init__(source)
        if any(not rule.description for rule in rules):
            self.undivided = "some of its attributes come from a table"
        parts = [source.fingerprint, *(rule.fingerprint for rule in rules)]
        self.fingerprint = None if None in parts else fingerprint_of(*parts)

    def _take_facts(self) -> None:
        super()._take_facts()
        for rule in self._rules:
            self.skipped.update(rule.skipped)

    def divide(self, *, layout: Layout, seed: int, part_bytes: int) -> Division | None:
        """Divide the wrapped source, if the rules can be described; see ``Source.divide``."""
        if any(not rule.description for rule in self._rules):
            return None
        found = super().divide(layout=layout, seed=seed, part_bytes=part_bytes)
        return found and Division(found.part_bytes, partial(self._describe, found))

    def _describe(self, division: Division, part: int) -> bytes:
        rules = [[to_bytes(text) for text in rule.description] for rule in self._rules]
        return msgspec.msgpack.encode(AttributedPart(division.describe(part), rules))

    def leave_out(self, is_known: Callable[[bytes], bool]) -> int:
        """Leave out samples of the wrapped source; the rules see none of them.

        See ``Source.leave_out``.
        """
        self._is_known = is_known
        return super().leave_out(is_known)

    def seek(self, count: int, cursor: Cursor | None = None) -> int:
        """Leave out the first samples of the wrapped source; see ``Source.seek``."""
        if any(rule.needs_all for rule in self._rules):
            return 0
        sought = super().seek(count, cursor)
        for rule in self._rules:
            rule.seek(sought)
        return sought

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """Yield the source's blocks with the attributes of all rules; see ``Source.blocks``."""
        with closing(self.blocks_of_source(layout=layout, seed=seed)) as blocks:
            for read in blocks:
                if not read.paths and not read.attributes:
                    yield read
                    continue
                block = read if self._is_known is None else without_known(read, self._is_known)
                self.left_out += len(read.paths) - len(block.paths)
                found = [block]
                for rule in self._rules:
                    found = [*chain.from_iterable(self._apply(rule, part) for part in found)]
                yield from found
        self._take_facts()

    def _apply(self, rule: Rule, block: SampleBlock) -> Iterator[SampleBlock]:
        """Yield the samples of a block with the attributes of a rule."""

        def make(first: int, count: int) -> SampleBlock:
            part = slice_samples(block, first, count)
            return replace(part, attributes={**part.attributes, **rule.columns(part)})

        def name(index: int) -> Name:
            return self.name, os.fsdecode(block.paths[index])

        return self.bad.each_part(len(block.paths), make, name, (UsageError,))


def read_rules(descriptions: Sequence[Sequence[bytes]]) -> list[Rule]:
    """Return the rules whose descriptions another process has sent.

    Raises:
        FormatError: one is no description of a rule.
        UsageError: as the rules.
    """
    return [_read_rule(*map(to_text, texts)) for texts in descriptions]


def _read_rule(kind: str = "", *texts: str) -> Rule:
    if kind == PathRule.__name__ and len(texts) == 3:
        return PathRule(*texts)
    if kind == ArrayRule.__name__ and len(texts) == 2:
        return ArrayRule(*texts)
    raise malformed(f"expected a rule, got {kind!r} of {len(texts)} texts")


# ---- from paths ----------------------------------------------------------------------------------


class PathRule(Rule):
    """A rule that makes one attribute from the samples' paths.

    Args:
        name: name of the attribute.
        pattern: number of a path component, 0 the first and -1 the last; or a regular expression
            that is searched for in the path. The value is the group that has the attribute's name,
            else the first group, else the whole match.
        kind: type of the values: ``str``, ``int`` or ``float``.

    Raises:
        UsageError: the type is unknown, or the pattern is no regular expression.
    """

    def __init__(self, name: str, pattern: str, kind: str = "str") -> None:
        if kind not in _TYPES:
            raise UsageError(f"take {name!r} from paths: expected {', '.join(_TYPES)}, got {kind}")
        check_attribute_names([name], f"take {name!r} from paths")
        self.fingerprint = fingerprint_of(name, pattern, kind)
        self.description = PathRule.__name__, name, pattern, kind
        self._name = name
        self._pattern = pattern
        self._convert = _TYPES[kind]
        self._dtype = object if kind == "str" else np.dtype(kind)
        self._component = int(pattern) if re.fullmatch(r"-?[0-9]+", pattern) else None
        try:
            self._expression = re.compile(pattern)
        except re.error as error:
            raise UsageError(
                f"take {name!r} from paths: expected a component's number or a regular expression, "
                f"got {pattern!r}: {error}"
            ) from error
        groups = self._expression.groupindex
        self._group = groups.get(name, 1 if self._expression.groups else 0)

    @classmethod
    def parse(cls, text: str) -> PathRule:
        """Read ``NAME=PATTERN`` or ``NAME:TYPE=PATTERN``.

        Raises:
            UsageError: the text has another form.
        """
        name, kind, pattern = _split_named(text, "PATTERN")
        return cls(name, pattern, kind)

    def columns(self, block: SampleBlock) -> Columns:
        """Return the attribute of a block's samples; see ``Rule``."""
        values = np.empty(len(block.paths), self._dtype)
        values[:] = [self._value(path) for path in block.paths]
        return {self._name: values}

    def _value(self, path: bytes) -> int | float | str:
        found = self._find(path.decode("utf-8", "backslashreplace"))
        if found is None:
            raise UsageError(
                f"take {self._name!r} from paths: expected {self._pattern!r} in every path, "
                f"got {show(path)}"
            )
        try:
            return self._convert(found)
        except ValueError as error:
            raise UsageError(
                f"take {self._name!r} from paths: sample {show(path)}: {error}"
            ) from error

    def _find(self, path: str) -> str | None:
        if self._component is None:
            match = self._expression.search(path)
            return None if match is None else match[self._group]
        parts = path.split("/")
        inside = -len(parts) <= self._component < len(parts)
        return parts[self._component] if inside else None


def label_rule() -> PathRule:
    """Return the rule for ``label``: the name of the folder that each sample is in."""
    return PathRule("label", "-2")


# ---- from tables ---------------------------------------------------------------------------------


class TableRule(Rule):
    """A rule that takes attributes from a table with a row for each sample.

    Args:
        path: path of a CSV file (``.csv``, ``.tsv``; the first line names the columns), Parquet
            file, Arrow file or file of JSON Lines (``.jsonl``). Columns of a CSV file become
            integers, floats or text; see ``tables.csv``. Or path of a file of annotations as COCO's
            (``.json``), see ``tables.coco``: its ``file_name`` may be the end of a sample's path,
            behind a slash.
        path_column: name of the column with the samples' paths; by default one of ``PATH_COLUMNS``.

    Raises:
        NotFoundError: the file does not exist.
        UsageError: the file is of another kind or has no such column, or pyarrow is not installed.
        FormatError: the file is damaged, or has two rows for one path.
    """

    def __init__(self, path: str, path_column: str | None = None) -> None:
        self._name = f"attributes of {path}"
        names = PATH_COLUMNS if path_column is None else (path_column,)
        suffix = Path(path).suffix.lower()
        self._left_out: dict[str, int] = {}
        self._path_of: dict[int, bytes] | None = None
        """Path of the sample of each row, where paths may be longer than the row's."""
        if suffix == _COCO:
            names = (FILE_NAME,) if path_column is None else names
            columns, self._left_out = read_coco(path, self._name)
            self._path_of = {}
            self.needs_all = True
        elif suffix in DELIMITERS:
            columns = _read_csv(path, DELIMITERS[suffix], text=names)
        elif suffix in _OPENERS:
            columns = _read_table(path, _OPENERS[suffix])
        else:
            known = ", ".join([*DELIMITERS, *_OPENERS, _COCO])
            raise UsageError(f"{self._name}: expected a file {known}")
        found = next((name for name in names if name in columns), None)
        if found is None or columns[found].dtype != object:
            raise UsageError(
                f"{self._name}: expected a column {' or '.join(names)} of text with the samples' "
                f"paths, got {', '.join(columns) or 'none'}"
            )
        paths = columns.pop(found)
        check_attribute_names(columns, self._name)
        self.fingerprint = fingerprint_of(path_column, paths=[path])
        self._columns = columns
        self._rows = {
            text.encode("utf-8", "surrogateescape"): row for row, text in enumerate(paths)
        }
        if len(self._rows) != len(paths):
            twice = Counter(paths.tolist()).most_common(1)[0][0]
            raise FormatError(f"{self._name}: expected one row for each path, got two: {twice}")
        self._count_unused(len(self._rows))

    def _count_unused(self, rows: int) -> None:
        self._unused = rows
        self.skipped = {**self._left_out, **({UNUSED_ROWS: rows} if rows else {})}

    def seek(self, count: int) -> None:
        """Count the rows of samples of an earlier import as used; see ``Rule``."""
        self._count_unused(self._unused - count)

    def columns(self, block: SampleBlock) -> Columns:
        """Return the attributes of a block's samples: all columns but the paths; see ``Rule``."""
        find = self._rows.get if self._path_of is None else self._find_by_end
        rows = [find(path, -1) for path in block.paths]
        if -1 in rows:
            missing = show(block.paths[rows.index(-1)])
            raise UsageError(f"{self._name}: expected a row for every sample, got none: {missing}")
        self._count_unused(self._unused - len(rows))
        chosen = np.array(rows, np.int64)
        return {name: values[chosen] for name, values in self._columns.items()}

    def _find_by_end(self, path: bytes, otherwise: int) -> int:
        """Return the row of a path, or of what is left of it without its first folders.

        Raises:
            UsageError: another sample has this row.
        """
        assert self._path_of is not None
        end = path
        while end not in self._rows and b"/" in end:
            end = end.partition(b"/")[2]
        row = self._rows.get(end, otherwise)
        if row != otherwise and self._path_of.setdefault(row, path) != path:
            raise UsageError(
                f"{self._name}: expected one sample for {show(end)}, got "
                f"{show(self._path_of[row])} and {show(path)}"
            )
        return row


def _read_csv(path: str, delimiter: str, *, text: Sequence[str]) -> dict[str, Array]:
    """Read the columns of a CSV file; the columns named in ``text`` stay text."""
    where = f"attributes of {path}"
    columns, _ = read_csv(path, delimiter, where=where)
    return {
        name: text_column(values)
        if name in text
        else typed_column(values, where=f"{where}: column {name}")
        for name, values in columns.items()
    }


def _read_table(
    path: str, opener: Callable[[str], AbstractContextManager[Table]]
) -> dict[str, Array]:
    where = f"attributes of {path}"
    with opener(path) as table:
        for conflict in table.conflicts.values():
            raise FormatError(conflict)
        schema = table.schema
        columns = [Column(name, (name,), schema.field(name).type) for name in schema.names]
        for column in columns:
            if not is_scalar(column.type):
                raise UsageError(
                    f"{where}: expected numbers, bools or text in every column, got "
                    f"{column.type} in {column.name}"
                )
        parts: dict[str, list[Array]] = {column.name: [] for column in columns}
        no_rows = importlib.import_module("pyarrow").RecordBatch.from_pylist([], schema)
        for row, batch in chain([(0, no_rows)], table.batches(schema.names, 0)):
            for column in columns:
                parts[column.name].append(column_values(column, batch, row, where))
    return {name: np.concatenate(found) for name, found in parts.items()}


# ---- arrays --------------------------------------------------------------------------------------


class ArrayRule(Rule):
    """A rule for samples that are all arrays of one type and shape.

    Args:
        dtype: type of the elements, as numpy reads it: ``f4``, ``uint8``.
        shape: lengths of the dimensions, separated by commas; empty for scalars.

    Raises:
        UsageError: numpy knows no such type, or the shape is malformed.
    """

    def __init__(self, dtype: str, shape: str) -> None:
        self._form = ArrayForm.parse(dtype, shape)
        self.fingerprint = fingerprint_of(self._form.texts)
        self.description = ArrayRule.__name__, dtype, shape

    def columns(self, block: SampleBlock) -> Columns:
        """Return the reserved columns of arrays; see ``Rule``."""
        wrong = np.flatnonzero(block.lengths != self._form.length_bytes)
        if len(wrong):
            at = int(wrong[0])
            raise UsageError(
                f"import arrays: sample {show(block.paths[at])}: expected "
                f"{self._form.length_bytes} bytes, {self._form}, got {int(block.lengths[at])}"
            )
        return array_attributes(self._form.dtype, self._form.shape, len(block.paths))
