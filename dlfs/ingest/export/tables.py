"""Writes samples into one Arrow IPC or Parquet file: a row for each sample, with its attributes.

The columns are ``path`` (text, or binary when a path is not UTF-8), ``bytes`` (large binary), and
one for each attribute. Rows come in storage order, a record batch for each batch read, so that
memory is bounded. The schema's metadata names the dataset; by it ``dlfs import`` recognises the
columns. Needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.attributes.arrow import arrow_type, column_to_arrow
from dlfs.base.extras import load_package
from dlfs.dataset.dataset import Dataset
from dlfs.errors import FormatError, LimitError, UsageError
from dlfs.ingest.export.samples import ExportedSamples, whole_file
from dlfs.ingest.tables.arrow import pyarrow
from dlfs.ingest.tables.choosing import EXPORT_BYTES, EXPORT_MARK, EXPORT_PATH
from dlfs.reader.batch import Batch

ARROW_SUFFIXES = (".arrow", ".ipc", ".feather")
PARQUET_SUFFIXES = (".parquet", ".parq", ".pq")
PARQUET_VALUE_BYTES_MAX = (1 << 31) - 1
_PATHS_AT_ONCE = 65536


def write_arrow(samples: ExportedSamples, path: str, *, force: bool) -> None:
    """Write every sample into an Arrow IPC file; see ``export_dataset``.

    Raises:
        UsageError: pyarrow is not installed, or an attribute has the name of another column.
    """
    pyarrow = load_package("pyarrow", extra="arrow", what=f"export to {path}")
    _write(samples, path, pyarrow.ipc.new_file, force=force)


def write_parquet(samples: ExportedSamples, path: str, *, force: bool) -> None:
    """Write every sample into a Parquet file, a row group for each batch that is read.

    Raises:
        LimitError: a sample is larger than Parquet's values may be, 2 GiB - 1.
        UsageError: as for ``write_arrow``.
    """
    what = f"export to {path}"
    parquet = load_package("pyarrow.parquet", extra="arrow", what=what)
    longest = int(samples.dataset.lengths().max()) if len(samples.dataset) else 0
    if longest > PARQUET_VALUE_BYTES_MAX:
        raise LimitError(
            f"{what}: expected samples of at most {PARQUET_VALUE_BYTES_MAX} bytes, got one of "
            f"{longest}; an Arrow file or an archive holds it"
        )
    _write(samples, path, partial(parquet.ParquetWriter, use_dictionary=False), force=force)


def _write(
    samples: ExportedSamples, path: str, make_writer: Callable[[Any, Any], Any], *, force: bool
) -> None:
    schema = _schema(samples.dataset, path)
    with (
        whole_file(path, force=force) as file,
        make_writer(pyarrow.PythonFile(file, "w"), schema) as writer,
    ):
        for batch, paths in samples.batches():
            if len(batch):
                writer.write_batch(_record_batch(samples.dataset, batch, paths, schema))


def _schema(dataset: Dataset, target: str) -> Any:
    fields = [
        (EXPORT_PATH, pyarrow.string() if _paths_are_text(dataset) else pyarrow.binary()),
        (EXPORT_BYTES, pyarrow.large_binary()),
    ]
    for name, dtype in dataset.columns.items():
        if name in (EXPORT_PATH, EXPORT_BYTES):
            raise UsageError(
                f"export to {target}: expected no attribute {name!r}, the name of another column"
            )
        fields.append((name, arrow_type(pyarrow, dtype)))
    mark = f"{dataset.name}@{dataset.version}".encode("utf-8", "surrogateescape")
    return pyarrow.schema(fields, metadata={EXPORT_MARK: mark})


def _paths_are_text(dataset: Dataset) -> bool:
    for first in range(0, len(dataset), _PATHS_AT_ONCE):
        count = min(_PATHS_AT_ONCE, len(dataset) - first)
        try:
            b"".join(dataset.paths(first, count)).decode()
        except (UnicodeDecodeError, FormatError):  # a damaged path is reported when it is read
            return False
    return True


def _record_batch(dataset: Dataset, batch: Batch, paths: list[bytes | None], schema: Any) -> Any:
    """Return the rows of a batch, without samples whose path is bad."""
    data, offsets = batch.pack()
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
    columns = [
        pyarrow.array(paths, pyarrow.binary()).cast(schema.field(EXPORT_PATH).type),
        pyarrow.Array.from_buffers(pyarrow.large_binary(), len(batch), buffers),
    ]
    for name in dataset.columns:
        values: npt.NDArray[Any] = dataset.column(name, batch.indices)
        if values.dtype.kind in "OU":
            values = np.asarray(values, object)
        columns.append(column_to_arrow(pyarrow, values, schema.field(name).type))
    rows = pyarrow.record_batch(columns, schema=schema)
    return (
        rows.filter(pyarrow.array([path is not None for path in paths])) if None in paths else rows
    )
