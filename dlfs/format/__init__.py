"""Converts between bytes and records of the on-media format, which FORMAT.md specifies.

Nothing here does I/O. Encoders take records of the writer and refuse invalid ones with UsageError
or LimitError. Decoders take any bytes and return a record or raise a FormatError, in time and
memory bounded by the length of those bytes. Every error of a decoder starts with ``where``: the
device's URI and byte offset.
"""
