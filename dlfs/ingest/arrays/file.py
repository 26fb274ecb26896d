"""The interface of the array formats: HDF5, NetCDF, Zarr, ADIOS2, NPY and NPZ.

Each format is an ``ArrayFile``: it lists its arrays and reads rows of one. A row is the part of an
array at one index of its first axis. ``dlfs.ingest.arrays.rows`` makes samples of rows. ``reading``
turns the exceptions of all the formats' libraries into typed errors.
"""

from __future__ import annotations

import errno
import math
import posixpath
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dlfs.base.wording import quote
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    LimitError,
    NotFoundError,
    TruncatedError,
    UsageError,
)
from dlfs.ingest.bad_records import BadRecords
from dlfs.ingest.isolation.confines import note_location

Samples = Literal["rows", "arrays", "groups"]

Kind = Literal["fixed", "ragged", "text", "other"]
"""Kind of an array's rows: of one size, vectors of any length, strings, or values without bytes."""

_CAUSE_CHARACTERS_MAX = 300
_VALUE_CHARACTERS_MAX = 40
_PACKING = {"scale_factor": ("1", "1.0"), "add_offset": ("0", "0.0"), "_Unsigned": ("false",)}
"""Attributes of packed numbers, and the values by which they change nothing."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The parts of an array that no file has: never written, or lost."""

    count: int
    """Number of these parts."""
    total: int
    """Number of all parts of the array."""
    noun: str
    """Name of a part, such as ``chunk``."""
    first: str
    """Name and place of the first of them."""


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Description of an array, known without reading its elements."""

    name: str
    """Names of its groups and its own name, joined by ``/``; empty for the only array of a file."""
    dtype: np.dtype[Any]
    """Type of the elements; ``uint8`` for text."""
    shape: tuple[int, ...]
    chunk_rows: int = 1
    """Number of rows that the file stores, and decompresses, together."""
    kind: Kind = "fixed"
    missing: Missing | None = None
    problem: str = ""
    """Reason why the array cannot be read; empty if it can."""
    packing: str = ""
    """Attributes that say how numbers are packed, which are not applied; see ``packing_of``."""
    in_order: bool = False
    """True if reading rows before others that were read, or a few of them, takes long."""

    @property
    def count(self) -> int:
        """Number of rows; 1 if the array has no first axis."""
        return self.shape[0] if self.shape else 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.shape[1:]

    @property
    def row_bytes(self) -> int:
        """Size of a row of a fixed array, in bytes."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Size of the whole array, in bytes."""
        return self.count * self.row_bytes


def packing_of(attributes: Mapping[str, Any]) -> str:
    """Return the attributes of an array by which its readers compute other numbers, as text.

    Source: CF conventions, packed data (``scale_factor``, ``add_offset``); NetCDF users guide,
    appendix of attribute conventions (``_Unsigned``).
    """
    found = {name: str(attributes[name]) for name in _PACKING if name in attributes}
    return ", ".join(
        f"{name}={quote(value[:_VALUE_CHARACTERS_MAX])}"
        for name, value in found.items()
        if value.strip("[]").lower() not in _PACKING[name]
    )


class ArrayFile(Protocol):
    """A file, or a folder of files, that is open for reading. One thread uses it at a time.

    Attributes:
        arrays: the arrays in the file, by name.
        skipped: number of entries left out, by reason.
        members: members of the arrays of a compound type, by ``ARRAY/MEMBER``.
    """

    arrays: Mapping[str, ArrayInfo]
    skipped: Mapping[str, int]
    members: Mapping[str, ArrayInfo] = {}

    def find(self, reference: str, group: str) -> ArrayInfo:
        """Find the array that a reference in a group names.

        A reference that begins with ``/`` starts at the top of the file, any other at the group.

        Raises:
            KeyError: there is no such array.
        """
        is_from_top = reference.startswith("/")
        name = reference.strip("/") if is_from_top else posixpath.join(group, reference)
        return self.arrays[name] if name in self.arrays else self.members[name]

    def members_of(self, name: str) -> list[ArrayInfo]:
        """Return the members of an array of a compound type; none for another array."""
        return [array for array in self.members.values() if posixpath.dirname(array.name) == name]

    def leave_out_damaged(self, bad: BadRecords) -> None:
        """Remove arrays of which only a whole read tells that they are damaged; note them."""
        del bad

    @abstractmethod
    def read(self, array: ArrayInfo, first: int, out: npt.NDArray[Any]) -> None:
        """Read rows of a fixed array.

        Args:
            array: an array of this file.
            first: number of the first row.
            out: ``dtype[count, *row_shape]``, contiguous and not empty; an array without a first
                axis is one row. It is zeroed before.

        Raises:
            Exception: the format's library raises what it likes; ``reading`` translates it.
        """
        ...

    def read_values(self, array: ArrayInfo, first: int, count: int) -> Sequence[object]:
        """Read rows of a ragged array (vectors) or one of text (``str`` or ``bytes``).

        Raises:
            NotImplementedError: the format has no such arrays.
            Exception: as for ``read``.
        """
        raise NotImplementedError(array.name)

    @abstractmethod
    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        ...


Opener = Callable[[str], ArrayFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayOptions:
    """Options that all array formats have."""

    select: Annotated[tuple[str, ...], "patterns of the arrays to import"] = ()
    samples: Annotated[Samples, "what makes a sample: each row, array or group of arrays"] = "rows"
    fields: Annotated[
        tuple[str, ...],
        "arrays of a group that are the fields of its samples: NAME[=ARRAY], or patterns; needs "
        "samples=rows or groups",
    ] = ()
    attributes: Annotated[
        tuple[str, ...],
        "NAME=ARRAY: the array of an attribute; /ARRAY starts at the top of its file",
    ] = ()
    missing: Annotated[
        Literal["error", "fill"],
        "parts of arrays that were never written or are lost: an error, or the fill value",
    ] = "error"

    def __post_init__(self) -> None:
        if self.fields and self.samples == "arrays":
            raise UsageError("import: expected samples of rows or groups for fields, got arrays")


def parse_references(entries: Sequence[str], noun: str) -> dict[str, str]:
    """Read ``NAME=ARRAY``; ``ARRAY`` alone gets the last component of the array's name.

    Args:
        entries: the entries of an option.
        noun: noun for an entry in errors, such as ``attribute``.

    Raises:
        UsageError: a name is missing, or given twice.
    """
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, reference = entry.partition("=")
        if not equals:
            name, reference = posixpath.basename(entry), entry
        if not name or not reference:
            article = "an" if noun[0] in "aeiou" else "a"
            raise UsageError(f"import: expected {article} {noun} NAME=ARRAY, got {entry!r}")
        if name in found:
            raise UsageError(f"import: expected each {noun} once, got {name!r} twice")
        found[name] = reference
    return found


def describe(array: ArrayInfo) -> str:
    """Return the name, type and shape of an array for an error."""
    shape = "x".join(map(str, array.shape)) or "scalar"
    kind = array.dtype if array.kind == "fixed" else array.kind
    return f"{array.name or 'an array'} ({kind}, {shape})"


def describe_missing(missing: Missing) -> str:
    """Return what an array lacks, for an error."""
    others = f" and {missing.count - 1} more" if missing.count > 1 else ""
    hint = "--option missing=fill takes the fill value"
    if missing.noun == "chunk":
        hint = f"writers may leave out chunks of nothing but the fill value, as Zarr's do: {hint}"
    return (
        f"expected {missing.total} {missing.noun}{'s' if missing.total > 1 else ''}, got "
        f"{missing.total - missing.count}: {missing.first}{others} was never written, or is lost; "
        f"{hint}"
    )


@contextmanager
def reading(where: str) -> Generator[None, None, None]:
    """Turn the exceptions of a format's library into typed errors with a location.

    Args:
        where: the file, and the array and rows in it.

    Raises:
        NotFoundError: a file does not exist.
        DeviceError: a file cannot be read.
        TruncatedError: a file ends too early, if the library reports that.
        LimitError: the library asks for more memory than it may have.
        FormatError: any other exception: the file violates its format.
    """
    note_location(f"import {where}")
    try:
        yield
    except DlfsError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError(f"import {where}: there is no such file or folder") from error
    except MemoryError as error:
        raise LimitError(f"import {where}: more memory than allowed: {_cause(error)}") from error
    except Exception as error:
        code = (isinstance(error, OSError) and error.errno) or 0
        message = f"import {where}: expected a readable file, got: {_cause(error)}"
        if code <= 0 or code == errno.EINVAL:  # libraries have negative codes of their own
            kind = TruncatedError if isinstance(error, EOFError) else FormatError
            raise kind(message) from error
        raise DeviceError(message, code) from error


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _CAUSE_CHARACTERS_MAX else text[:_CAUSE_CHARACTERS_MAX] + " ..."
