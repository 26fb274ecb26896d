"""The descriptions of the parts of sources: MessagePack, of which each field has a type.

A description has all that another process needs to read a part (``ingest.parts.open_part``). It
comes from another host, so it is decoded to plain values and arrays of plain elements, and nothing
that could run code. Texts and paths are bytes, because names of files may be no UTF-8. It has the
URLs of objects as the user gave them, and no other credentials.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from dlfs.errors import FormatError
from dlfs.format.constants import SAMPLE_BYTES_MAX
from dlfs.ingest.isolation.messages import Array, to_bytes, to_text

Count = Annotated[int, msgspec.Meta(ge=0)]


class FilesPart(msgspec.Struct, frozen=True, tag=True):
    """Files of a folder, in the order in which they are packed; see ``ingest.files``.

    Attributes:
        name: name of the source.
        folder: absolute path of the folder.
        follows_links: True if a path may end in a symbolic link.
        buffer_bytes: most bytes of a block of more than one file.
        first: position of the first file in the order of the source.
        paths: paths of the files in the folder, each with a NUL behind it.
        sample_paths: paths of the samples; empty if they are those of the files.
        sizes: ``uint64[n_files]``, size of each file in bytes.
        modified_ns: ``int64[n_files]``, time of the last change of each file.
        attributes: array of each attribute, by name.
    """

    name: bytes
    folder: bytes
    follows_links: bool
    buffer_bytes: Annotated[int, msgspec.Meta(gt=0, le=SAMPLE_BYTES_MAX)]
    first: Count
    paths: bytes
    sample_paths: bytes
    sizes: Array
    modified_ns: Array
    attributes: dict[bytes, Array]


class Object(msgspec.Struct, frozen=True, array_like=True):
    """An object as it was listed; see ``stores.RemoteObject``.

    Attributes:
        source: number of the URL that names it, or its folder.
        name: path in the folder; empty if the URL names the object.
        url: URL; empty if it is that of the folder, a slash and the name.
        path: path in its file system; empty likewise.
        size_bytes: size in bytes.
        version: version of the object.
        digests: its digests, by algorithm.
        has_ranges: True if the store reads ranges of it.
    """

    source: Count
    name: bytes
    url: bytes
    path: bytes
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=SAMPLE_BYTES_MAX)]
    version: bytes
    digests: dict[str, str]
    has_ranges: bool


class ObjectSource(msgspec.Struct, frozen=True, array_like=True):
    """A URL that names objects: as the user gave it, and without a slash at its end; and its path.

    Attributes:
        url: the URL.
        base_url: URL of the folder without a slash at its end.
        base_path: path of the folder in its file system.
    """

    url: bytes
    base_url: bytes
    base_path: bytes


class ObjectsPart(msgspec.Struct, frozen=True, tag=True):
    """Objects that are samples, in the order in which they are packed; see ``remote.objects``.

    Attributes:
        name: name of the source.
        sources: the URLs that name the objects.
        block_bytes: most bytes of a block of more than one object.
        first: position of the first object in the order of the source.
        objects: the objects.
        sample_paths: paths of the samples, each with a NUL behind it.
        attributes: array of each attribute, by name.
    """

    name: bytes
    sources: list[ObjectSource]
    block_bytes: Annotated[int, msgspec.Meta(gt=0, le=SAMPLE_BYTES_MAX)]
    first: Count
    objects: list[Object]
    sample_paths: bytes
    attributes: dict[bytes, Array]


class AttributedPart(msgspec.Struct, frozen=True, tag=True):
    """A part whose samples get further attributes; see ``ingest.attributes``.

    Attributes:
        part: the description of the part without them.
        rules: kind and parameters of each rule that gives attributes.
    """

    part: bytes
    rules: list[list[bytes]]


OptionValue = bytes | bool | int | float | list[bytes] | None
"""Value of an option of a format; texts are bytes."""


class FormatFiles(msgspec.Struct, frozen=True):
    """How files of a format are opened.

    Attributes:
        format_name: name of the format.
        options: options of the format, by name.
    """

    format_name: bytes
    options: dict[bytes, OptionValue]


class File(msgspec.Struct, frozen=True, array_like=True):
    """A file.

    Attributes:
        path: its absolute path.
        size_bytes: its size in bytes.
        modified_ns: time of its last change.
        facts: see ``Source.file_facts``.
    """

    path: bytes
    size_bytes: Count
    modified_ns: int
    facts: bytes


class FormatFilesPart(msgspec.Struct, frozen=True, tag=True):
    """Files of a format that is read file by file; see ``ingest.file_parts``.

    Attributes:
        opener: how the files are opened.
        number: number of the part.
        buffer_bytes: most bytes of a block of more than one sample.
        files: the files.
        shared: see ``Source.shared``.
        learns_from: file with the first sample of the source, if it is another one and the samples
            of the part are compared with it.
    """

    opener: FormatFiles
    number: Count
    buffer_bytes: Annotated[int, msgspec.Meta(gt=0, le=SAMPLE_BYTES_MAX)]
    files: list[File]
    shared: bytes
    learns_from: File | None


class IndexedPart(msgspec.Struct, frozen=True, tag=True):
    """Samples of an index of files, in the order in which they are packed; see ``file_parts``.

    Attributes:
        opener: how the files are opened.
        files: the files that have the samples.
        first: position of the first sample in the order of the source.
        buffer_bytes: most bytes of a block of more than one sample.
        sizes: ``uint64[n]``, bytes that each sample takes in a buffer.
        places: ``int64[n, 3]``, place of each sample; see ``records.IndexedSamples``.
        segments: ``int64[m, 5]``; see there.
        paths: path of each sample, with a NUL behind it; empty if the places tell the paths.
    """

    opener: FormatFiles
    files: list[File]
    first: Count
    buffer_bytes: Annotated[int, msgspec.Meta(gt=0, le=SAMPLE_BYTES_MAX)]
    sizes: Array
    places: Array
    segments: Array
    paths: bytes


class ObjectFilesPart(msgspec.Struct, frozen=True, tag=True):
    """Objects of a format that is read file by file; see ``remote.source``.

    Attributes:
        opener: how their copies are opened.
        sources: the URLs that name the objects.
        objects: the objects, in the order in which they are read.
        first: number of the first one in the order of the source.
        buffer_bytes: most bytes of a block of more than one sample.
    """

    opener: FormatFiles
    sources: list[ObjectSource]
    objects: list[Object]
    first: Count
    buffer_bytes: Annotated[int, msgspec.Meta(gt=0, le=SAMPLE_BYTES_MAX)]


def encode_columns(columns: Mapping[str, Any]) -> dict[bytes, Array]:
    """Return the messages of arrays by name."""
    return {to_bytes(name): Array.of(values) for name, values in columns.items()}


def decode_columns(columns: Mapping[bytes, Array], count: int) -> dict[str, Any]:
    """Return the arrays of messages by name.

    Raises:
        FormatError: an array does not have one value, or vector, for each of ``count`` samples.
    """
    found = {}
    for name, message in columns.items():
        values = decode_array(message, "an attribute")
        if values.shape[:1] != (count,):
            raise malformed(f"expected {count} values of attribute {to_text(name)!r}")
        found[to_text(name)] = values
    return found


def decode_array(message: Array, noun: str, kind: type[Any] | None = None) -> Any:
    """Return the array of a message.

    Args:
        message: the message.
        noun: what the array has, for the error.
        kind: type of its elements, in one dimension; None: any.

    Raises:
        FormatError: the message is none of such an array.
    """
    try:
        found = message.array()
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise malformed(f"expected an array of {noun}: {error}") from error
    if kind is not None and (found.dtype != np.dtype(kind) or found.ndim != 1):
        raise malformed(f"expected an array of {noun}, got one of {found.dtype}")
    return found


def decode_table(message: Array, noun: str, columns: int) -> Any:
    """Return an array of whole numbers, none negative, ``int64[n, columns]``.

    Raises:
        FormatError: the message is none of such an array.
    """
    found = decode_array(message, noun)
    is_table = found.dtype == np.int64 and found.ndim == 2 and found.shape[1] == columns
    if not is_table or bool((found < 0).any()):
        raise malformed(f"expected rows of {columns} whole numbers as {noun}")
    return found


def decode_sizes(message: Array) -> Any:
    """Return the sizes of samples, ``uint64[n]``.

    Raises:
        FormatError: the message has others, or sizes that no sample can have.
    """
    found = decode_array(message, "sizes", np.uint64)
    if len(found) and int(found.max()) > SAMPLE_BYTES_MAX:
        raise malformed(f"expected samples of at most {SAMPLE_BYTES_MAX} bytes, got {found.max()}")
    return found


def join_paths(paths: Iterable[bytes]) -> bytes:
    """Return paths in one byte string, each with a NUL behind it."""
    return b"".join(path + b"\0" for path in paths)


def split_paths(joined: bytes) -> list[bytes]:
    """Return the paths that ``join_paths`` has joined.

    Raises:
        FormatError: a path is empty, or has no NUL behind it.
    """
    *paths, rest = joined.split(b"\0")
    if rest or b"" in paths:
        raise malformed("expected paths with a NUL behind each")
    return paths


def malformed(problem: str) -> FormatError:
    """Return the error for a description that is none."""
    return FormatError(f"open a part of a source: {problem} in its description")
