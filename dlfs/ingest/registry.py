"""The formats that samples come in: one table, and how a format takes its options.

A row of ``FORMATS`` says what a format is called, how it is recognised, which class opens it, and
which extra of the package it needs. To add one, write its source as a ``Source`` in a module of its
own and add a row; ``open_source``, ``dlfs import --format`` and ``dlfs import --formats`` need
nothing else.

Recognition asks the rows in order. A folder is of the first format whose ``marks`` (patterns of
names) each match an entry of it, and a plain folder of files otherwise. A file is of the first
format that one of whose ``names`` matches, upper and lower case alike; when no name does, of the
first whose ``magic`` stands in it. Formats without any of these are only taken when asked for.

Options are the fields of a frozen dataclass beside the source, each ``name: Annotated[type, "a line
of help"] = default``. The class has a method ``open(paths)``, which returns the source; a
``__post_init__`` checks what types cannot, with UsageError. Values come typed from Python
or as text from ``--option NAME=VALUE``; text is read by the field's type: ``str``, ``int``,
``float``, ``bool`` (yes or no), ``Literal`` of strings, ``tuple[str, ...]`` (separated by commas;
given again, values add up), each also ``| None``. Options that mean the same are called the same in
every format:

- ``select``: a pattern (as ``fnmatch``) of what to take: datasets, variables, members.
- ``column``: the one field, column or feature whose bytes are the sample.
- ``attributes``: the fields, columns or features to keep as attributes.
- ``path``: the field or column that holds each sample's path.
- ``links``: what becomes of symbolic links.

Optional packages are imported by the source, when it is opened, through ``load_package``.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dlfs.errors import DeviceError, NotFoundError, UsageError
from dlfs.extras import install_command

if TYPE_CHECKING:
    from dlfs.ingest.source import Source

AUTO = "auto"
"""The name that asks for recognition."""

_MAGIC_BYTES = 512
"""What is read of a file to recognise it."""


class FormatOptions(Protocol):
    """What a row's class is: a dataclass of options that opens sources."""

    def open(self, paths: Sequence[str]) -> Source:
        """Open files or folders, which exist, as one source.

        Raises:
            DlfsError: they cannot be opened.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One row of the table."""

    name: str
    summary: str
    """What it takes, in a few words."""
    opener: str
    """The class of its options: ``module:class``."""
    names: tuple[str, ...] = ()
    """Patterns of file names, in lower case."""
    magic: tuple[tuple[int, bytes], ...] = ()
    """(offset in bytes, what stands there), of which one is enough."""
    marks: tuple[str, ...] = ()
    """Patterns of names that a folder of this format has in it, all of them; ``a|b`` is either."""
    extra: str | None = None
    """The extra of the package to install; None where dlfs alone is enough."""


FORMATS: tuple[Format, ...] = (
    Format(
        name="tar",
        summary="tar archives and WebDataset shards, every member a sample",
        opener="dlfs.ingest.formats.tar:TarOptions",
        names=tuple(
            f"*{suffix}"
            for suffix in (
                ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst",
                ".tzst",
            )
        ),
    ),
    Format(
        name="tfrecord",
        summary="TFRecord files, also of tf.train.Examples",
        opener="dlfs.ingest.formats.tfrecord.source:TfRecordOptions",
        names=(
            *(
                f"*.{stem}{ending}"
                for stem in ("tfrecord", "tfrecords", "tfrec")
                for ending in ("", ".gz", ".zlib")
            ),
            "*.tfrecord-*-of-*",
            "*.tfrecords-*-of-*",
        ),
    ),
    Format(
        name="parquet",
        summary="Parquet files, a row a sample",
        opener="dlfs.ingest.formats.arrow:ParquetOptions",
        names=("*.parquet", "*.parq", "*.pq"),
        magic=((0, b"PAR1"), (0, b"PARE")),
        extra="arrow",
    ),
    Format(
        name="arrow",
        summary="Arrow IPC files and streams, Feather, a row a sample",
        opener="dlfs.ingest.formats.arrow:ArrowOptions",
        names=("*.arrow", "*.arrows", "*.ipc", "*.feather"),
        magic=((0, b"ARROW1"),),
        extra="arrow",
    ),
    Format(
        name="huggingface",
        summary="a dataset or its splits, as Hugging Face's save_to_disk writes them",
        opener="dlfs.ingest.formats.arrow:HuggingFaceOptions",
        marks=("dataset_dict.json|state.json", "dataset_dict.json|dataset_info.json"),
        extra="arrow",
    ),
    Format(
        name="hdf5",
        summary="HDF5 files",
        opener="dlfs.ingest.formats.hdf5:Hdf5Options",
        names=("*.h5", "*.hdf5", "*.he5"),
        magic=((0, b"\x89HDF\r\n\x1a\n"),),
        extra="hdf5",
    ),
    Format(
        name="netcdf",
        summary="NetCDF files, classic and 4",
        opener="dlfs.ingest.formats.netcdf.source:NetcdfOptions",
        names=("*.nc", "*.nc4", "*.cdf", "*.netcdf"),
        magic=((0, b"CDF\1"), (0, b"CDF\2"), (0, b"CDF\5")),
        extra="netcdf",
    ),
    Format(
        name="zarr",
        summary="Zarr stores, formats 2 and 3",
        opener="dlfs.ingest.formats.zarr:ZarrOptions",
        names=("*.zarr.zip",),
        marks=("zarr.json|.zgroup|.zarray",),
        extra="zarr",
    ),
    Format(
        name="adios2",
        summary="ADIOS2 BP files and folders",
        opener="dlfs.ingest.formats.adios:AdiosOptions",
        names=("*.bp",),
        marks=("md.idx", "data.0"),
        extra="adios2",
    ),
    Format(
        name="npy",
        summary="NumPy's NPY files",
        opener="dlfs.ingest.formats.npy:NpyOptions",
        names=("*.npy",),
        magic=((0, b"\x93NUMPY"),),
    ),
    Format(
        name="npz",
        summary="NumPy's NPZ archives",
        opener="dlfs.ingest.formats.npy:NpzOptions",
        names=("*.npz",),
    ),
    Format(
        name="lmdb",
        summary="an LMDB environment, a key a sample",
        opener="dlfs.ingest.formats.lmdb.source:LmdbOptions",
        names=("*.lmdb", "*.mdb"),
        magic=((16, b"\xde\xc0\xef\xbe"),),
        marks=("data.mdb",),
    ),
    Format(
        name="mds",
        summary="MosaicML MDS shards, in the folder of their index.json",
        opener="dlfs.ingest.formats.mds:MdsOptions",
        marks=("index.json", "*.mds|*.mds.*"),
    ),
    Format(
        name="webdataset",
        summary="WebDataset shards, with members as attributes of others of their key",
        opener="dlfs.ingest.formats.webdataset:WebDatasetOptions",
    ),
    Format(
        name="list",
        summary="a list of files: text with a path a line, or CSV or TSV with attributes",
        opener="dlfs.ingest.formats.file_list:ListOptions",
        names=("*.txt", "*.csv", "*.tsv"),
    ),
    Format(
        name="imagefolder",
        summary="a folder of class folders, the class as label",
        opener="dlfs.ingest.formats.image_folder:ImageFolderOptions",
    ),
    Format(
        name="folder",
        summary="every file under a folder",
        opener="dlfs.ingest.formats.folder:FolderOptions",
    ),
)  # fmt: skip


# ---- which format --------------------------------------------------------------------------------


def find_format(name: str) -> Format:
    """The row of that name.

    Raises:
        UsageError: there is none.
    """
    for row in FORMATS:
        if row.name == name:
            return row
    known = ", ".join([AUTO, *(row.name for row in FORMATS)])
    raise UsageError(f"import: expected a format of {known}, got {name!r}")


def recognise(paths: Sequence[str]) -> Format:
    """The format that all of some files or folders are of.

    Raises:
        NotFoundError: one of them is not there.
        UsageError: one is of no known format, or they are of several.
        DeviceError: one cannot be read.
    """
    first = _recognise_one(paths[0])
    for path in paths[1:]:
        other = _recognise_one(path)
        if other is not first:
            raise UsageError(
                f"import {path}: expected the format of {paths[0]}, {first.name}, got {other.name}"
            )
    return first


def _recognise_one(path: str) -> Format:
    try:
        if Path(path).is_dir():
            return _recognise_folder(os.listdir(path))
        found = _recognise_name(Path(path).name.lower())
        if found is None:
            with open(path, "rb") as file:
                found = _recognise_magic(file.read(_MAGIC_BYTES))
    except FileNotFoundError as error:
        raise NotFoundError(f"import {path}: there is no such file or folder") from error
    except OSError as error:
        raise DeviceError(f"import {path}: {error.strerror}", error.errno or 0) from error
    if found is None:
        raise UsageError(
            f"import {path}: expected a folder, or a file of a known format; "
            "'dlfs import --formats' lists them, --format names one"
        )
    return found


def _recognise_folder(entries: Sequence[str]) -> Format:
    for row in FORMATS:
        if row.marks and all(
            any(fnmatchcase(entry, either) for entry in entries for either in mark.split("|"))
            for mark in row.marks
        ):
            return row
    return find_format("folder")


def _recognise_name(name: str) -> Format | None:
    for row in FORMATS:
        if any(fnmatchcase(name, pattern) for pattern in row.names):
            return row
    return None


def _recognise_magic(head: bytes) -> Format | None:
    for row in FORMATS:
        if any(head[offset:].startswith(magic) for offset, magic in row.magic):
            return row
    return None


# ---- options -------------------------------------------------------------------------------------


def options_class(row: Format) -> type[FormatOptions]:
    """The class of a format's options; imports its module, not the packages that it needs."""
    module, _, name = row.opener.partition(":")
    found: type[FormatOptions] = getattr(importlib.import_module(module), name)
    return found


def make_options(row: Format, values: Mapping[str, object]) -> FormatOptions:
    """The options of a format, checked.

    Args:
        row: of the table.
        values: by name; text is read by the type of its option.

    Raises:
        UsageError: the format takes no such option, or not this value.
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
    """Read ``NAME=VALUE`` as the command line gives them; a name given again adds to its list.

    Raises:
        UsageError: one has no name or no ``=``.
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
    """A value as its option's type has it.

    Raises:
        ValueError: it is no value of that type; the message says what was expected.
    """
    if isinstance(kind, types.UnionType):
        if value is None or value == "none":
            return None
        (kind,) = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is tuple:
        items = value.split(",") if isinstance(value, str) else value
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


def _read_text(text: str, kind: type) -> object:
    try:
        if kind is bool:
            return {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}[
                text.lower()
            ]
        return kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"expected {show_type(kind)}, got {text!r}") from None


def show_type(kind: Any) -> str:
    """What an option's type is called in help and errors."""
    if isinstance(kind, types.UnionType):
        (kind,) = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is tuple:
        return "NAME,..."
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    names = {str: "TEXT", int: "a whole number", float: "a number", bool: "yes or no"}
    return names.get(kind, str(kind))


@dataclass(frozen=True, slots=True)
class OptionHelp:
    """What the help says of one option."""

    name: str
    type: str
    default: object
    text: str


def describe_options(row: Format) -> list[OptionHelp]:
    """The options of a format, for the help."""
    kind = options_class(row)
    hints = typing.get_type_hints(kind, include_extras=True)
    types_and_texts = {name: typing.get_args(hint) for name, hint in hints.items()}
    return [
        OptionHelp(
            field.name,
            show_type(types_and_texts[field.name][0]),
            field.default,
            types_and_texts[field.name][1],
        )
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
    ]


# ---- packages ------------------------------------------------------------------------------------


def load_package(name: str, *, extra: str, what: str) -> Any:
    """Import an optional package.

    Args:
        name: of the module.
        extra: of dlfs that installs it.
        what: is to be done with it, for the error: ``import x.parquet``.

    Raises:
        UsageError: it is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{what}: expected {name.partition('.')[0]} to be installed ({error}): "
            f"{install_command(extra)}"
        ) from error
