"""Makes samples with fields of what a source has: several members, columns or arrays.

A ``FieldRecords`` belongs to one source. The first sample determines the types of its fields, as
``DatasetWriter.add`` does: bytes, text, or arrays all of whose dimensions vary. Its records have
the bytes of the sample, and the reserved attributes that describe its fields.

Threads: one at a time.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldEncoder
from dlfs.ingest.records import Record, Value


class FieldRecords:
    """Makes the records of one source, which all have the same fields."""

    def __init__(self) -> None:
        self._encoder: FieldEncoder | None = None

    def make(
        self,
        path: bytes,
        values: Mapping[str, Any],
        where: str,
        attributes: Mapping[str, Value] | None = None,
    ) -> Record:
        """Make the record of one sample.

        Args:
            path: path of the sample.
            values: value of each field: bytes, text, or an array or a number.
            where: name of the source and the sample, for errors.
            attributes: further attributes of the sample.

        Raises:
            FormatError: a value cannot be stored, or its type differs from that in other samples.
        """
        try:
            if self._encoder is None:
                self._encoder = FieldEncoder.of_sample(values, where)
            data, columns = self._encoder.encode(values, where)
        except UsageError as error:
            raise FormatError(str(error)) from error
        return Record(path, data.data, {**(attributes or {}), **columns})


def read_npy(data: bytes | memoryview) -> NDArray[Any]:
    """Return the array in the bytes of a NPY file.

    Raises:
        ValueError: they are no NPY file, or of Python objects, or too short or too long.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version} of the NPY format")
    first = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    flat = np.frombuffer(data, dtype, offset=file.tell()) if dtype.itemsize else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")
