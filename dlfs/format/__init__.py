"""Converts between bytes and records of the on-media format, as FORMAT.md specifies it. Does no
I/O.

Nothing here does I/O. Encoders take records that the writer made and refuse wrong ones with
UsageError or LimitError; decoders take any bytes at all and give a record or a FormatError, in time
and memory bounded by the length of those bytes. Every error of a decoder starts with ``where``: the
device's URI and byte offset.
"""
