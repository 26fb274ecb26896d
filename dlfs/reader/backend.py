"""The native readers below ``SampleReader``: of this process, or of a node service.

A ``NativeReader`` reads the devices in this process. A ``ClientReader`` sends the same calls to a
node service. Both have the same methods, and report failed samples in their batches instead of
raising for them.

Threads: any at once for a reader; one at a time for a stream.
"""

from __future__ import annotations

from dlfs._native.channel import ClientReader, ClientStream
from dlfs._native.reader import NativeReader, NativeStream

ReaderBackend = NativeReader | ClientReader
"""A reader of one dataset, local or of a node service."""

StreamBackend = NativeStream | ClientStream
"""One consumer's part of an epoch, read ahead."""
