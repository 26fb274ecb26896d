"""A dataset into one Arrow IPC file: a row a sample, with its path, its bytes and its attributes.

Columns are ``path`` (text, or binary when a path is not UTF-8), ``bytes`` (large binary), and one
for each attribute. Rows come in storage order, a record batch for each batch read, so that memory
is bounded by those; the schema's metadata says which dataset it was, by which ``dlfs import`` knows
the columns again. Needs pyarrow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dlfs.dataset import Dataset
from dlfs.errors import UsageError
from dlfs.ingest.columns import EXPORT_BYTES, EXPORT_MARK, EXPORT_PATH
from dlfs.ingest.export import ExportReport, batch_size, checked_path, whole_file
from dlfs.ingest.formats import load_package
from dlfs.ingest.progress import Meter, ProgressCallback
from dlfs.reader.batch import Batch

_PATHS_AT_ONCE = 65536


def export_arrow(
    dataset: Dataset,
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> ExportReport:
    """Write every sample into an Arrow IPC file.

    Args:
        dataset: to read.
        target: the file.
        force: replace a file that is there.
        progress: called after each batch, and once at the start.

    Raises:
        UsageError: pyarrow is not installed, or an attribute has the name of another column.
        ExistsError: there is something of that name.
        DeviceError: the file cannot be written, or the dataset cannot be read.
        FormatError: a sample is damaged.
    """
    path = os.fspath(target)
    pyarrow = load_package("pyarrow", extra="arrow", what=f"export to {path}")
    schema = _schema(pyarrow, dataset, path)
    meter = Meter(progress, len(dataset), dataset.sample_bytes)
    with (
        whole_file(path, force=force) as file,
        pyarrow.ipc.new_file(pyarrow.PythonFile(file, "w"), schema) as writer,
    ):
        for batch in _batches(dataset):
            writer.write_batch(_record_batch(pyarrow, dataset, batch, schema))
            meter.add(len(batch), int(batch.lengths.sum()))
    return ExportReport(meter.samples, meter.bytes, meter.seconds)


def _batches(dataset: Dataset) -> Iterator[Batch]:
    with dataset.batches(batch_size(dataset), shuffle=None) as epoch:
        for batch in epoch:
            with batch:
                yield batch


def _schema(pyarrow: Any, dataset: Dataset, target: str) -> Any:
    fields = [
        (EXPORT_PATH, pyarrow.string() if _paths_are_text(dataset) else pyarrow.binary()),
        (EXPORT_BYTES, pyarrow.large_binary()),
    ]
    for name, dtype in dataset.columns.items():
        if name in (EXPORT_PATH, EXPORT_BYTES):
            raise UsageError(
                f"export to {target}: expected no attribute {name!r}, the name of another column"
            )
        is_text = dtype.kind in "OU"
        fields.append((name, pyarrow.string() if is_text else pyarrow.from_numpy_dtype(dtype)))
    mark = f"{dataset.name}@{dataset.version}".encode("utf-8", "surrogateescape")
    return pyarrow.schema(fields, metadata={EXPORT_MARK: mark})


def _paths_are_text(dataset: Dataset) -> bool:
    for first in range(0, len(dataset), _PATHS_AT_ONCE):
        count = min(_PATHS_AT_ONCE, len(dataset) - first)
        try:
            b"".join(dataset.paths(first, count)).decode()
        except UnicodeDecodeError:
            return False
    return True


def _record_batch(pyarrow: Any, dataset: Dataset, batch: Batch, schema: Any) -> Any:
    data, offsets = batch.pack()
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
    paths = [checked_path(dataset.path(index)) for index in batch.indices.tolist()]
    columns = [
        pyarrow.array(paths, pyarrow.binary()).cast(schema.field(EXPORT_PATH).type),
        pyarrow.Array.from_buffers(pyarrow.large_binary(), len(batch), buffers),
    ]
    for name in dataset.columns:
        values: npt.NDArray[Any] = dataset.column(name, batch.indices)
        if values.dtype.kind in "OU":
            values = np.asarray(values, object)
        columns.append(pyarrow.array(values, schema.field(name).type))
    return pyarrow.record_batch(columns, schema=schema)
