"""Attributes given at import, whatever the source: from samples' paths, or from a table beside it.

An ``AttributedSource`` is a source whose blocks get further attributes by rules: a part of each
path (``PathRule``), the row of a table with each path (``TableRule``), or what arrays the samples
are (``ArrayRule``). A sample that a rule has nothing for is an error that names it; rows of a table
without a sample are counted, since one table often describes more than one import.

A table is held in memory: its columns, and a place for each path.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dlfs.arguments import Layout
from dlfs.errors import FormatError, UsageError
from dlfs.ingest.arrays.description import array_attributes
from dlfs.ingest.source import SampleBlock, Source, show
from dlfs.ingest.tables.columns import Column, column_values, is_scalar
from dlfs.ingest.tables.csv import DELIMITERS, read_csv, text_column, typed_column
from dlfs.ingest.tables.files import open_ipc, open_parquet
from dlfs.reader.arrays import ArrayForm

Columns = Mapping[str, npt.NDArray[Any]]

PATH_COLUMNS = ("path", "file_name", "filename")
"""What the column of a table with the samples' paths is called, unless its name is given."""

UNUSED_ROWS = "row of attributes without a sample"

_ARROW = (".arrow", ".arrows", ".feather", ".ipc")
_PARQUET = (".parquet", ".parq", ".pq")

_TYPES: dict[str, Callable[[str], int | float | str]] = {"int": int, "float": float, "str": str}


class Rule(Protocol):
    """What gives samples further attributes."""

    def columns(self, block: SampleBlock) -> Columns:
        """The attributes of a block's samples.

        Raises:
            UsageError: it has nothing for a sample; the message names it.
        """
        ...

    @property
    def skipped(self) -> Mapping[str, int]:
        """What was left out, by reason; complete once all blocks were seen."""
        ...


class AttributedSource:
    """A source with further attributes.

    Args:
        source: of the samples; closed with this object.
        rules: that give attributes; where two give the same, the later one counts, and before the
            source's own.
    """

    def __init__(self, source: Source, rules: Sequence[Rule]) -> None:
        self._source = source
        self._rules = rules

    @property
    def name(self) -> str:
        """The source's."""
        return self._source.name

    @property
    def sample_count(self) -> int | None:
        """The source's."""
        return self._source.sample_count

    @property
    def sample_bytes(self) -> int | None:
        """The source's."""
        return self._source.sample_bytes

    @property
    def gives_shuffled(self) -> bool:
        """As the source."""
        return self._source.gives_shuffled

    @property
    def skipped(self) -> Mapping[str, int]:
        """What the source leaves out, and the rules."""
        found = dict(self._source.skipped)
        for rule in self._rules:
            for reason, count in rule.skipped.items():
                found[reason] = found.get(reason, 0) + count
        return found

    @property
    def empty_directories(self) -> int:
        """The source's."""
        return self._source.empty_directories

    def blocks(self, *, layout: Layout, seed: int) -> Generator[SampleBlock, None, None]:
        """The source's blocks, with what the rules say; see ``Source.blocks``."""
        with closing(self._source.blocks(layout=layout, seed=seed)) as blocks:
            for block in blocks:
                attributes = dict(block.attributes)
                for rule in self._rules:
                    attributes.update(rule.columns(block))
                yield replace(block, attributes=attributes)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


# ---- from paths ----------------------------------------------------------------------------------


class PathRule:
    """A column from samples' paths.

    Args:
        name: of the column.
        pattern: a component's number, 0 the first and -1 the last; or a regular expression that is
            searched for in the path. Its value is the group of the column's name, else the first
            group, else the whole match.
        kind: ``str``, ``int`` or ``float``.

    Raises:
        UsageError: there is no such type, or the pattern is no regular expression.
    """

    skipped: Mapping[str, int] = {}

    def __init__(self, name: str, pattern: str, kind: str = "str") -> None:
        if kind not in _TYPES:
            raise UsageError(f"take {name!r} from paths: expected {', '.join(_TYPES)}, got {kind}")
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
            UsageError: it is not of this form.
        """
        head, equals, pattern = text.partition("=")
        name, colon, kind = head.rpartition(":")
        if not colon or kind not in _TYPES:
            name, kind = head, "str"
        if not equals or not name or not pattern:
            raise UsageError(f"expected an attribute as NAME=PATTERN, got {text!r}")
        return cls(name, pattern, kind)

    def columns(self, block: SampleBlock) -> Columns:
        """One column; see ``Rule``."""
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
    """The column ``label``: the name of the folder that each sample is in."""
    return PathRule("label", "-2")


# ---- from tables ---------------------------------------------------------------------------------


class TableRule:
    """The columns of a table that has a row for each sample.

    Args:
        path: of a CSV file (``.csv``, ``.tsv``; the first line names the columns), Parquet file or
            Arrow file. Columns of a CSV file are integers, floats or text; see ``csv_table``.
        path_column: with the samples' paths; by default one of ``PATH_COLUMNS``.

    Raises:
        NotFoundError: there is no such file.
        UsageError: it is of another kind, has no such column, or pyarrow is not installed.
        FormatError: it is damaged, or has two rows for one path.
    """

    def __init__(self, path: str, path_column: str | None = None) -> None:
        self._name = f"attributes of {path}"
        names = PATH_COLUMNS if path_column is None else (path_column,)
        suffix = Path(path).suffix.lower()
        if suffix in DELIMITERS:
            columns = _read_csv(path, DELIMITERS[suffix], text=names)
        elif suffix in (*_ARROW, *_PARQUET):
            columns = _read_arrow(path, is_parquet=suffix in _PARQUET)
        else:
            raise UsageError(
                f"{self._name}: expected a file {', '.join([*DELIMITERS, *_PARQUET, *_ARROW])}"
            )
        found = next((name for name in names if name in columns), None)
        if found is None or columns[found].dtype != object:
            raise UsageError(
                f"{self._name}: expected a column {' or '.join(names)} of text with the samples' "
                f"paths, got {', '.join(columns) or 'none'}"
            )
        paths = columns.pop(found)
        self._columns = columns
        self._rows = {
            text.encode("utf-8", "surrogateescape"): row for row, text in enumerate(paths)
        }
        if len(self._rows) != len(paths):
            twice = Counter(paths.tolist()).most_common(1)[0][0]
            raise FormatError(f"{self._name}: expected one row for each path, got two: {twice}")
        self._used = 0

    @property
    def skipped(self) -> Mapping[str, int]:
        """Rows without a sample."""
        unused = len(self._rows) - self._used
        return {UNUSED_ROWS: unused} if unused else {}

    def columns(self, block: SampleBlock) -> Columns:
        """All columns but that of paths; see ``Rule``."""
        rows = [self._rows.get(path, -1) for path in block.paths]
        if -1 in rows:
            missing = show(block.paths[rows.index(-1)])
            raise UsageError(f"{self._name}: expected a row for every sample, got none: {missing}")
        self._used += len(rows)
        chosen = np.array(rows, np.int64)
        return {name: values[chosen] for name, values in self._columns.items()}


def _read_csv(path: str, delimiter: str, *, text: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """The columns of a CSV file; those that are called so in ``text`` stay text."""
    where = f"attributes of {path}"
    table = read_csv(path, delimiter, where=where)
    return {
        name: text_column(values)
        if name in text
        else typed_column(values, where=f"{where}: column {name}")
        for name, values in table.columns.items()
    }


def _read_arrow(path: str, *, is_parquet: bool) -> dict[str, npt.NDArray[Any]]:
    where = f"attributes of {path}"
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    with (open_parquet if is_parquet else open_ipc)(path) as table:
        schema = table.schema
        columns = [Column(name, (name,), schema.field(name).type) for name in schema.names]
        for column in columns:
            if not is_scalar(column):
                raise UsageError(
                    f"{where}: expected numbers, truths or text in every column, got "
                    f"{column.type} in {column.name}"
                )
            parts[column.name] = []
        row = 0
        for batch in table.batches(schema.names):
            for column in columns:
                parts[column.name].append(column_values(column, batch, row, where))
            row += batch.num_rows
    return {name: np.concatenate(found) if found else _empty(schema, name)
            for name, found in parts.items()}  # fmt: skip


def _empty(schema: Any, name: str) -> npt.NDArray[Any]:
    types = importlib.import_module("pyarrow.types")
    kind = schema.field(name).type
    return np.empty(0, kind.to_pandas_dtype() if types.is_primitive(kind) else object)


# ---- arrays --------------------------------------------------------------------------------------


class ArrayRule:
    """Samples that are all arrays of one type and shape.

    Args:
        dtype: as numpy reads it: ``f4``, ``uint8``.
        shape: lengths of the dimensions, with commas between; empty for scalars.

    Raises:
        UsageError: there are no such arrays.
    """

    skipped: Mapping[str, int] = {}

    def __init__(self, dtype: str, shape: str) -> None:
        self._form = ArrayForm.parse(dtype, shape)

    def columns(self, block: SampleBlock) -> Columns:
        """The reserved columns of arrays; see ``Rule``."""
        wrong = np.flatnonzero(block.lengths != self._form.length_bytes)
        if len(wrong):
            at = int(wrong[0])
            raise UsageError(
                f"import arrays: sample {show(block.paths[at])}: expected "
                f"{self._form.length_bytes} bytes, {self._form}, got {int(block.lengths[at])}"
            )
        return array_attributes(self._form.dtype, self._form.shape, len(block.paths))
