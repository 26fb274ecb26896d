"""Reading samples: batches on demand, and epochs read ahead.

``SampleReader`` reads one dataset through native code; a ``Batch`` is the samples of one read,
where they landed; an ``Epoch`` gives the batches of one rank in the epoch's order. What can be
wrong with a single sample is told by ``failures``.
"""

from dlfs.reader.batch import Batch
from dlfs.reader.columns import ColumnAccess
from dlfs.reader.epoch import Epoch
from dlfs.reader.failures import SampleFailure, Where
from dlfs.reader.parts import LargeSample, read_into, read_pieces
from dlfs.reader.reader import (
    DEPTH_MAX,
    ReaderOptions,
    SampleReader,
    make_native_reader,
    read_timeout_ms,
)

__all__ = [
    "DEPTH_MAX",
    "Batch",
    "ColumnAccess",
    "Epoch",
    "LargeSample",
    "ReaderOptions",
    "SampleFailure",
    "SampleReader",
    "Where",
    "make_native_reader",
    "read_into",
    "read_pieces",
    "read_timeout_ms",
]
