"""Reads samples: batches on demand, and epochs that are read ahead.

``SampleReader`` reads one dataset through native code (``ReaderBackend``), in this process or in a
node service. ``FieldReaders`` has the readers of an open dataset: of whole samples, and of some of
their fields. A ``Batch`` has the samples of one read, in the memory into which they were read. An
``Epoch`` gives the batches of one rank in the order of an epoch. ``failures`` describes samples
that could not be read, and ``parts`` reads samples that are too large for a batch.
"""

from dlfs.fields.batch_fields import pick_fields
from dlfs.reader.batch import Batch
from dlfs.reader.budget import MemoryBudget
from dlfs.reader.epoch import Epoch, EpochReader, EpochStream
from dlfs.reader.failures import SampleFailure, Where
from dlfs.reader.field_readers import FieldReaders
from dlfs.reader.following import MOVES_MAX, MovedError, Placement, follow
from dlfs.reader.parts import read_into, read_pieces
from dlfs.reader.reader import (
    DEPTH_MAX,
    ReaderOptions,
    SampleReader,
    make_native_reader,
    read_timeout_ms,
)

__all__ = [
    "DEPTH_MAX",
    "MOVES_MAX",
    "Batch",
    "Epoch",
    "EpochReader",
    "EpochStream",
    "FieldReaders",
    "MemoryBudget",
    "MovedError",
    "Placement",
    "ReaderOptions",
    "SampleFailure",
    "SampleReader",
    "Where",
    "follow",
    "make_native_reader",
    "pick_fields",
    "read_into",
    "read_pieces",
    "read_timeout_ms",
]
