"""The table of formats that can be imported, and the options of each format.

A row of ``FORMATS`` gives a format's name, how to recognise it, the class that opens it, and the
extra of this package that it needs. To add a format, write its ``Source`` in a module of
``formats`` and add a row; ``open_source``, ``dlfs import --format`` and ``--formats`` use the row.

Rows are tried in order. A folder has the first format whose ``marks`` (patterns of names) all match
an entry in it; any other folder is a plain folder of files. A file has the first format one of
whose ``names`` matches, in upper or lower case. If no name matches, it has the first format whose
``magic`` is in its first bytes. A format without any of these has to be named by the caller.

The options of a format are the fields of a frozen dataclass next to its source, each
``name: Annotated[type, "a line of help"] = default``. Its method ``open(paths)`` returns the
source; its ``__post_init__`` checks what types cannot express, and raises UsageError. Values are
Python objects, or text from ``--option NAME=VALUE``. Text is converted by the field's type:
``str``, ``int``, ``float``, ``bool`` (yes or no), ``Literal`` of strings, ``tuple[str, ...]``
(separated by commas; a repeated option adds values), each also ``| None``. An option of one name
means the same in every format:

- ``select``: a pattern (as ``fnmatch``) of the datasets, variables or members to import.
- ``column``: the one field, column or feature whose bytes are the sample.
- ``attributes``: the fields, columns or features to store as attributes.
- ``fields``: the members, columns, features or arrays that are the fields of one sample; see
  ``ingest.fields``.
- ``path``: the field or column that has each sample's path.
- ``links``: the treatment of symbolic links.

A source imports its optional packages when it is opened, through ``load_package``.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dlfs.errors import DeviceError, NotFoundError, UsageError
from dlfs.ingest.foreign import say_what_to_do

if TYPE_CHECKING:
    from dlfs.ingest.records import IndexedSamples
    from dlfs.ingest.source import Source

AUTO = "auto"
"""Format name that asks for recognition."""

STDIN = "-"
"""Path that stands for standard input."""

_BOOLS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}

_COMMA = re.compile(r",(?![0-9?,]*\])")
"""A comma between names; those in the shape of a type, such as ``mask:u1[?,3]``, are none."""

_MAGIC_BYTES = 512
"""Bytes read from the start of a file to recognise it."""


class FormatOptions(Protocol):
    """The interface of a format's options: a dataclass that opens sources."""

    def open(self, paths: Sequence[str]) -> Source:
        """Open existing files or folders as one source.

        Raises:
            DlfsError: a file or folder cannot be opened.
        """
        ...


@dataclass(frozen=True, slots=True)
class Format:
    """One row of the table of formats."""

    name: str
    summary: str
    """Short description of the files that it takes."""
    opener: str
    """Class of the format's options, as ``module:class``; ``.tar`` is a module of ``formats``."""
    names: tuple[str, ...] = ()
    """Patterns of file names, in lower case."""
    magic: tuple[tuple[int, bytes], ...] = ()
    """Pairs of an offset in bytes and the bytes there; one match is enough."""
    marks: tuple[str, ...] = ()
    """Patterns of entry names that a folder of this format has, all of them; ``a|b`` is either."""
    extra: str | None = None
    """Extra of this package that the format needs; None if dlfs alone is enough."""
    streams: bool = False
    """True if standard input, ``-``, can be a source of it."""
    by_file: bool = False
    """True if each file can be opened alone, and has the same samples as among others."""
    isolated: bool = False
    """True if it is read in a separate process, because damaged files can crash its library."""

    @property
    def suffixes(self) -> list[str]:
        """Endings of the names of files, in lower case."""
        return [pattern.removeprefix("*") for pattern in self.names]


class SharedOptions(FormatOptions, Protocol):
    """Options of a format whose files have to be opened with what is known of others."""

    def open_known(self, paths: Sequence[str], shared: bytes, facts: Sequence[bytes]) -> Source:
        """Open some files of a source.

        Args:
            paths: the files.
            shared: ``Source.shared`` of the source of all files.
            facts: its ``Source.file_facts`` of these.

        Raises:
            DlfsError: a file cannot be opened.
        """
        ...


class IndexedOptions(FormatOptions, Protocol):
    """Options of a format whose samples have an index, parts of which can be read."""

    def open_described(self, paths: Sequence[str], samples: IndexedSamples) -> Source:
        """Open files of which some samples are known.

        Args:
            paths: the files.
            samples: the samples, in the order in which they are read.

        Raises:
            DlfsError: a file cannot be opened.
        """
        ...


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """What the source of all files knows of some of them, for a source of these.

    Attributes:
        shared: its ``Source.shared``.
        facts: its ``Source.file_facts`` of these.
        options: options of the format.
    """

    shared: bytes = b""
    facts: Sequence[bytes] = ()
    options: Any = None

    def open(self, paths: Sequence[str]) -> Source:
        """Open the files."""
        options: SharedOptions = self.options
        return options.open_known(paths, self.shared, self.facts)


FORMATS = (
    Format(
        "tar", "tar archives and WebDataset shards, every member a sample", ".tar:TarOptions",
        names=(
            "*.tar", "*.tar.gz", "*.tgz", "*.tar.bz2", "*.tbz2", "*.tar.xz", "*.txz", "*.tar.zst",
            "*.tzst",
        ),
        streams=True, by_file=True,
    ),
    Format(
        "tfrecord", "TFRecord files, also of tf.train.Examples", ".tfrecord.source:TfRecordOptions",
        names=(
            "*.tfrecord", "*.tfrecord.gz", "*.tfrecord.zlib", "*.tfrecord-*-of-*",
            "*.tfrecords", "*.tfrecords.gz", "*.tfrecords.zlib", "*.tfrecords-*-of-*",
            "*.tfrec", "*.tfrec.gz", "*.tfrec.zlib",
        ),
        by_file=True,
    ),
    Format(
        "arrayrecord", "ArrayRecord files, also of tf.train.Examples",
        ".array_record:ArrayRecordOptions", extra="arrayrecord", isolated=True, by_file=True,
        names=("*.array_record", "*.array_record-*-of-*", "*.arrayrecord"),
    ),
    Format(
        "parquet", "Parquet files, a row a sample", ".arrow:ParquetOptions", extra="arrow",
        isolated=True, by_file=True,
        names=("*.parquet", "*.parq", "*.pq"), magic=((0, b"PAR1"), (0, b"PARE")),
    ),
    Format(
        "arrow", "Arrow IPC files and streams, Feather, a row a sample", ".arrow:ArrowOptions",
        names=("*.arrow", "*.arrows", "*.ipc", "*.feather"), magic=((0, b"ARROW1"),), extra="arrow",
        isolated=True, by_file=True,
    ),
    Format(
        "jsonl", "JSON Lines, an object a sample", ".arrow:JsonLinesOptions", extra="arrow",
        isolated=True, by_file=True,
        names=(
            "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.ndjson", "*.ndjson.gz", "*.ndjson.zst",
        ),
    ),
    Format(
        "huggingface", "a dataset that Hugging Face's save_to_disk wrote, or load_dataset cached",
        ".arrow:HuggingFaceOptions", extra="arrow", isolated=True,
        marks=("dataset_dict.json|dataset_info.json", "dataset_dict.json|state.json|*.arrow"),
    ),
    Format(
        "hdf5", "HDF5 files", ".hdf5.source:Hdf5Options", extra="hdf5", isolated=True,
        names=("*.h5", "*.hdf5", "*.he5"), magic=((0, b"\x89HDF\r\n\x1a\n"),),
    ),
    Format(
        "netcdf", "NetCDF files, classic and 4", ".netcdf:NetcdfOptions", extra="netcdf",
        isolated=True,
        names=("*.nc", "*.nc4", "*.cdf", "*.netcdf"),
        magic=((0, b"CDF\1"), (0, b"CDF\2"), (0, b"CDF\5")),
    ),
    Format(
        "zarr", "Zarr stores, formats 2 and 3", ".zarr.source:ZarrOptions", extra="zarr",
        isolated=True,
        names=("*.zarr.zip",), marks=("zarr.json|.zgroup|.zarray",),
    ),
    Format(
        "adios2", "ADIOS2 BP files and folders", ".adios:AdiosOptions", extra="adios2",
        isolated=True,
        names=("*.bp",), marks=("md.idx", "data.0"),
    ),
    Format(
        "npy", "NumPy's NPY files", ".npy:NpyOptions",
        names=("*.npy",), magic=((0, b"\x93NUMPY"),),
    ),
    Format("npz", "NumPy's NPZ archives", ".npy:NpzOptions", names=("*.npz",)),
    Format(
        "zip", "ZIP archives, every member a sample", ".zip:ZipOptions", names=("*.zip",),
        by_file=True,
    ),
    Format(
        "lmdb", "an LMDB environment, a key a sample", ".lmdb:LmdbOptions",
        names=("*.lmdb", "*.mdb"), magic=((16, b"\xde\xc0\xef\xbe"),), marks=("data.mdb",),
    ),
    Format(
        "mds", "MosaicML MDS shards, in the folder of their index.json", ".mds:MdsOptions",
        marks=("index.json", "*.mds|*.mds.*"),
    ),
    Format(
        "webdataset", "WebDataset shards, with members as attributes of others of their key",
        ".webdataset:WebDatasetOptions", streams=True, by_file=True,
    ),
    Format(
        "list", "a list of files: text with a path a line, or CSV or TSV with attributes",
        ".file_list:ListOptions", names=("*.txt", "*.csv", "*.tsv"), streams=True,
    ),
    Format(
        "imagefolder", "a folder of class folders, the class as label",
        ".folder:ImageFolderOptions",
    ),
    Format("folder", "every file under folders, and single files", ".folder:FolderOptions"),
)  # fmt: skip


# ---- which format --------------------------------------------------------------------------------


def find_format(name: str) -> Format:
    """Return the format of a name.

    Raises:
        UsageError: no format has this name.
    """
    for row in FORMATS:
        if row.name == name:
            return row
    known = ", ".join([AUTO, *(row.name for row in FORMATS)])
    raise UsageError(f"import: expected a format of {known}, got {name!r}")


def recognise(
    paths: Sequence[str], listed: Mapping[str, Sequence[str] | None] | None = None
) -> Format:
    """Recognise the one format of some files or folders. Standard input counts as a tar archive.

    Files of no known format go with plain folders; each is a sample.

    Args:
        paths: paths of the files and folders.
        listed: the names in those of them that are folders of remote objects, and None for objects,
            which are recognised by their names alone.

    Raises:
        NotFoundError: a path does not exist.
        UsageError: a file is of no known format, or the files are of several formats.
        DeviceError: a file cannot be read.
    """
    known = listed or {}
    found = [
        _recognise_listed(path, known[path]) if path in known else _recognise_one(path)
        for path in paths
    ]
    folder = find_format("folder")
    if None in found and folder not in found:
        path = paths[found.index(None)]
        advice = say_what_to_do(path)
        raise UsageError(
            f"import {path}: expected a folder, or a file of a known format"
            + (f", {advice}" if advice else "")
            + "; 'dlfs import --formats' lists them, --format names one, --format folder takes any "
            "file as a sample"
        )
    rows = [row or folder for row in found]
    for path, row in zip(paths, rows, strict=True):
        if row is not rows[0]:
            hint = "; --format folder makes each file a sample" if folder in rows else ""
            raise UsageError(
                f"import {path}: expected the format of {paths[0]}, {rows[0].name}, got "
                f"{row.name}{hint}"
            )
    return rows[0]


def _recognise_one(path: str) -> Format | None:
    """Return the format of a file or folder; None for a file of no known format."""
    if path == STDIN:
        return find_format("tar")
    try:
        if Path(path).is_dir():
            return _recognise_folder(os.listdir(path))
        if (named := _recognise_name(path)) is not None:
            return named
        with open(path, "rb") as file:
            head = file.read(_MAGIC_BYTES)
    except FileNotFoundError as error:
        raise NotFoundError(f"import {path}: there is no such file or folder") from error
    except OSError as error:
        raise DeviceError(f"import {path}: {error.strerror}", error.errno or 0) from error
    for row in FORMATS:
        if any(head[offset:].startswith(magic) for offset, magic in row.magic):
            return row
    return None


def _recognise_listed(path: str, entries: Sequence[str] | None) -> Format | None:
    return _recognise_name(path) if entries is None else _recognise_folder(entries)


def _recognise_name(path: str) -> Format | None:
    name = Path(path).name.lower()
    for row in FORMATS:
        if any(fnmatchcase(name, pattern) for pattern in row.names):
            return row
    return None


def _recognise_folder(entries: Sequence[str]) -> Format:
    for row in FORMATS:
        if row.marks and all(
            any(fnmatchcase(entry, either) for entry in entries for either in mark.split("|"))
            for mark in row.marks
        ):
            return row
    return find_format("folder")


# ---- options -------------------------------------------------------------------------------------


def options_class(row: Format) -> type[FormatOptions]:
    """Return the class of a format's options; imports its module, not the packages it needs."""
    module, _, name = row.opener.partition(":")
    loaded = importlib.import_module(module, "dlfs.ingest.formats")
    found: type[FormatOptions] = getattr(loaded, name)
    return found


def make_options(row: Format, values: Mapping[str, object]) -> FormatOptions:
    """Convert and check the options of a format.

    Args:
        row: row of the format.
        values: values by option name; text is converted to the option's type.

    Raises:
        UsageError: the format has no such option, or the value does not fit.
    """
    kind = options_class(row)
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    read: dict[str, object] = {}
    for name, value in values.items():
        if name not in known:
            raise UsageError(
                f"import: format {row.name} takes no option {name!r}; "
                f"it takes {', '.join(known) or 'none'}"
            )
        try:
            read[name] = read_value(value, hints[name])
        except ValueError as error:
            raise UsageError(f"import: option {name} of format {row.name}: {error}") from error
    return kind(**read)


def parse_settings(texts: Sequence[str]) -> dict[str, object]:
    """Read ``NAME=VALUE`` texts of the command line; a repeated name adds to its list.

    Raises:
        UsageError: a text has no name or no ``=``.
    """
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise UsageError(f"import: expected an option NAME=VALUE, got {text!r}")
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


def read_value(value: object, kind: Any) -> object:
    """Convert a value to the type of its option.

    Raises:
        ValueError: the value does not fit the type; the message says what was expected.
    """
    if isinstance(kind, types.UnionType):
        if value is None or value == "none":
            return None
        kind = _without_none(kind)
    if typing.get_origin(kind) is tuple:
        items = _COMMA.split(value) if isinstance(value, str) else value
        if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"expected names, got {value!r}")
        return tuple(item.strip() for item in items)
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            choices = ", ".join(map(str, typing.get_args(kind)))
            raise ValueError(f"expected one of {choices}, got {value!r}")
        return value
    if isinstance(value, str) and kind is not str:
        return _read_text(value, kind)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"expected {show_type(kind)}, got {value!r}")
    return value


def _without_none(kind: Any) -> Any:
    """Return the type ``T`` of ``T | None``; any other type unchanged."""
    if not isinstance(kind, types.UnionType):
        return kind
    (found,) = [part for part in typing.get_args(kind) if part is not type(None)]
    return found


def _read_text(text: str, kind: type) -> object:
    try:
        return _BOOLS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"expected {show_type(kind)}, got {text!r}") from None


def show_type(kind: Any) -> str:
    """Return the name of an option's type for help and errors."""
    kind = _without_none(kind)
    if typing.get_origin(kind) is tuple:
        return "NAME,..."
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    names = {str: "TEXT", int: "a whole number", float: "a number", bool: "yes or no"}
    return names.get(kind, str(kind))


@dataclass(frozen=True, slots=True)
class OptionHelp:
    """Help on one option of a format."""

    name: str
    type: str
    default: object
    text: str


def describe_options(row: Format) -> list[OptionHelp]:
    """Return the options of a format, for the help."""
    kind = options_class(row)
    hints = typing.get_type_hints(kind, include_extras=True)
    options = []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        option_type, text = typing.get_args(hints[field.name])
        options.append(OptionHelp(field.name, show_type(option_type), field.default, text))
    return options
