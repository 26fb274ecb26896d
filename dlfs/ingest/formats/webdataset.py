"""Imports WebDataset shards by keys: some members become attributes of the others.

A WebDataset stores the parts of one example as consecutive members with one key: ``a/0001.jpg``,
``a/0001.cls``, ``a/0001.json``. The key is the path up to the first dot of the file's name; the
rest is the extension, in upper or lower case. The format ``tar`` makes a sample of every member.
This format gives the members that ``attributes`` names as attributes to all other members of the
key, which are the samples. ``column`` selects the samples of one extension, and the other members
are left out. A sample's path is its member's name.

With ``fields``, the members of a key that it names are the fields of one sample, whose path is the
key. A pattern takes the members of the first key; later keys with others are an error. A field has
the name of its extension. Its type is the one in ``fields``, else a whole number as for attributes,
text for ``txt``, ``text``, ``transcript`` and ``json``, an array for ``npy``, else bytes. The other
members are left out, unless they are attributes.

The name of an attribute gives its type: ``cls``, ``cls2``, ``class``, ``count``, ``index``, ``inx``
and ``id`` are whole numbers. ``json.NAME`` is a field of the member ``json``; ``json.a.b`` is a
field in another. Any other attribute is text in UTF-8. A key that lacks one, or has null in its
JSON, is an error, unless ``nulls`` says otherwise; and so are two members of one extension. As in
webdataset's own reader, members without a key are left out: a name without a dot, or that begins
with one (``README``, ``._0001.jpg``), and names such as ``__meta__``. They are counted with their
names.

Archives are streamed, in an order drawn from the seed for ``shuffled``. Members that are no files
are left out. Archives are read as strictly as by ``tar``.

Memory: the members of one key, and the blocks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np

from dlfs.errors import FormatError, UsageError
from dlfs.fields import FieldType
from dlfs.ingest.archives.archive import AbsoluteOption
from dlfs.ingest.bad_records import RecordError
from dlfs.ingest.fields import (
    HINT,
    AbsentError,
    AbsentOption,
    NamedRecords,
    default_like,
    default_of_type,
    parse_choices,
    read_npy,
)
from dlfs.ingest.formats.tar import ArchiveShards
from dlfs.ingest.records import Record, Records, Value, files_of
from dlfs.ingest.source import SampleBlock, check_attribute_names, show

_NUMBERS = frozenset(["cls", "cls2", "class", "count", "index", "inx", "id"])
"""Extensions whose members are whole numbers. Source: WebDataset's own decoders."""


_TEXTS = frozenset(["txt", "text", "transcript", "json"])
"""Extensions whose members are fields of text."""


_KEY = re.compile(rb"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
"""Key and extension of a member. Source: webdataset, base_plus_ext."""

_META = re.compile(rb"__[^/]*__($|/)")
"""Start of the names of members that describe a shard. Source: webdataset, tar_file_iterator."""

_RULE = "a key ends at the first dot of a file's name, where its extension begins"

_NO_TYPE = "no key before it has one, whose type the default would have: nulls=skip leaves it out"

_NO_KEY = "member without a key"

_NAMES_SHOWN_MAX = 20
"""Most names of members without a key that a report has."""


@dataclass(frozen=True, slots=True)
class WebDatasetOptions:
    """Options of WebDataset shards."""

    attributes: Annotated[
        tuple[str, ...], "extensions to store as attributes: cls, txt, json.NAME"
    ] = ()
    column: Annotated[str | None, "extension of the samples; by default all others"] = None
    fields: Annotated[
        tuple[str, ...],
        "extensions to make the fields of one sample for each key: jpg, raw:f4[?,3]",
    ] = ()
    prefix_shards: Annotated[bool, "begin paths with the archive's name"] = False
    absolute: AbsoluteOption = "error"
    nulls: AbsentOption = "error"

    def open(self, paths: Sequence[str]) -> WebDatasetSource:
        """Open archives, or folders of them; see ``WebDatasetSource``."""
        return WebDatasetSource(files_of(paths, "tar", noun="an archive"), self)


@dataclass(slots=True)
class _Group:
    """The members of one key: their paths and bytes, by extension.

    Attributes:
        twice: extension and path of a member whose extension another one has; None without.
    """

    key: bytes
    members: dict[str, tuple[bytes, memoryview]]
    twice: tuple[str, bytes] | None = None


class WebDatasetSource(ArchiveShards):
    """The samples of some archives, by keys.

    Args:
        archives: paths of the archives; their names say how they are compressed.
        options: options of the format.

    Raises:
        UsageError: the list of archives is empty, a name is not an archive's, or fields are given
            with a column or twice.
    """

    def __init__(self, archives: Sequence[str], options: WebDatasetOptions) -> None:
        super().__init__(archives, prefix_shards=options.prefix_shards, absolute=options.absolute)
        self._options = options
        check_attribute_names(options.attributes, f"import {self.name}")
        self._used = {name.partition(".")[0].lower() for name in options.attributes}
        self._column = None if options.column is None else options.column.lower().lstrip(".")
        choices = parse_choices(options.fields, f"import {self.name}")
        fields = {name.lower().lstrip("."): kind for name, kind in choices.items()}
        if fields and (self._column or len(fields) < len(choices)):
            raise UsageError(
                f"import {self.name}: expected fields of different extensions and no column, got "
                f"{', '.join(options.fields)}"
            )
        self._maker = NamedRecords(fields)
        self.is_exact, self.shards_are_independent = not fields, options.nulls != "default"
        self._defaults: dict[str, Any] = {}
        self.skipped: Counter[str] = Counter()
        self.learns = bool(fields)
        if self.shards_are_independent:
            self.separate_files = self.shards
        else:
            self.undivided = "nulls=default takes the types of defaults from the samples before"

    def read_shard(self, number: int) -> Iterator[SampleBlock]:
        """Stream one archive; see ``ShardSource``.

        Raises:
            DlfsError: the archive is damaged, ends early, or cannot be read; a key lacks an
                attribute.
        """
        yield from self.gather(number, self._records(number))

    def _records(self, number: int) -> Records:
        shard = self.shards[number]
        with closing(self._groups(number)) as groups:
            for group in groups:
                try:
                    records = self._samples(group, self.prefixes[number], f"import {shard}")
                except RecordError as error:
                    self.bad.note(shard, f"key {show(group.key)}", error)
                else:
                    yield from (record for record in records if not self.passes())

    def _samples(self, group: _Group, prefix: bytes, where: str) -> list[Record]:
        """Return the samples of a key; none if it lacks a member and is left out."""
        where = f"{where}: key {show(group.key)}"
        if group.twice is not None:
            extension, path = group.twice
            raise FormatError(
                f"{where}: expected one member of extension {extension!r}, got {show(path)} too; "
                f"{_RULE}"
            )
        try:
            values = {name: self._value(group, name, where) for name in self._options.attributes}
            if self._maker.fields:
                return [self._join(group, prefix, values, where)]
        except AbsentError as error:
            if self._options.nulls != "skip":
                hint = HINT if self._options.nulls == "error" else _NO_TYPE
                raise FormatError(f"{error}; {hint}") from error
            self.skipped["key that lacks a member"] += 1
            return []
        found: list[Record] = []
        for extension, (path, data) in group.members.items():
            if extension in self._used:
                continue
            if self._column not in (None, extension):
                self.skipped[f"member of extension {extension!r}"] += 1
                continue
            found.append(Record(prefix + path, data, values))
        return found

    def _value(self, group: _Group, name: str, where: str) -> Value:
        """Return the value of an attribute, or its default if the key lacks it."""
        default = None if "." in name else 0 if name.lower() in _NUMBERS else ""
        found: Value = self._or_default(
            f"attribute {name}", partial(_value, group, name, where), default
        )
        return found

    def _field(self, group: _Group, name: str, declared: FieldType | None, where: str) -> Any:
        """Return the value of a field, or its default if the key lacks it."""
        read = partial(_field_value, group, name, declared, where)
        kind = name.rpartition(".")[2]
        default: Any = None
        if declared is not None:
            default = default_of_type(declared)
        elif kind in _NUMBERS:
            default = np.int64(0)
        elif kind != "npy":
            default = "" if kind in _TEXTS else b""
        return self._or_default(f"field {name}", read, default)

    def _or_default(self, name: str, read: Callable[[], Any], default: Any) -> Any:
        """Return a value, or a default if the key lacks it.

        Args:
            name: name of the attribute or field.
            read: function that returns the value.
            default: its default; None if the first value gives its type.

        Raises:
            AbsentError: the key lacks it, and the option or the lack of a type forbids a default.
        """
        try:
            value = read()
        except AbsentError:
            if default is None:
                default = self._defaults.get(name)
            if default is None or self._options.nulls != "default":
                raise
            return default
        if default is None and name not in self._defaults:
            self._defaults[name] = default_like(value)
        return value

    def _join(
        self, group: _Group, prefix: bytes, attributes: dict[str, Value], where: str
    ) -> Record:
        """Return the record of a key whose members are the fields of one sample."""
        free = [name for name in group.members if name not in self._used]
        others = self._maker.find_unused(free, where, "members of the first key")
        self.skipped.update(f"member of extension {name!r}, which is no field" for name in others)
        values = {
            name: self._field(group, name, kind, where) for name, kind in self._maker.fields.items()
        }
        return self._maker.make(prefix + group.key, values, where, attributes)

    def _is_passed(self, group: _Group, extension: str) -> bool:
        """Return True if the next member of a key is no more than a sample of an earlier import."""
        if not self.to_pass or extension in self._used:
            return False
        if self._maker.fields or self._options.nulls != "error":  # the bytes decide on more
            return False
        samples = [name for name in group.members if self._is_sample(name)]
        return len(samples) < self.to_pass

    def _is_sample(self, extension: str) -> bool:
        return extension not in self._used and self._column in (None, extension)

    def _groups(self, number: int) -> Generator[_Group, None, None]:
        group: _Group | None = None
        with self.open_shard(number) as archive:
            for member in archive.members():
                if member.kind != "file":
                    if member.kind != "folder":
                        self.skipped["member that is no file"] += 1
                    continue
                found = split_key(member.path)
                if found is None:
                    known = sum(reason.startswith(_NO_KEY) for reason in self.skipped)
                    name = f": {show(member.path)}" if known < _NAMES_SHOWN_MAX else ", others"
                    self.skipped[_NO_KEY + name] += 1
                    continue
                key, extension = found
                if group is not None and group.key != key:
                    yield group
                    group = None
                group = group or _Group(key, {})
                if extension in group.members:
                    group.twice = extension, member.path
                else:
                    is_passed = self._is_passed(group, extension)
                    data = memoryview(b"") if is_passed else archive.read(member)
                    group.members[extension] = member.path, data
        if group is not None:
            yield group


def split_key(path: bytes) -> tuple[bytes, str] | None:
    """Return a member's key, and its extension in lower case; None if it has no key."""
    found = _KEY.fullmatch(path)
    if found is None or _META.match(path):
        return None
    return found[1], found[2].decode("utf-8", "backslashreplace").lower()


def _value(group: _Group, name: str, where: str) -> Value:
    """Return the value of an attribute for the members of a key."""
    extension, _, field = name.partition(".")
    extension = extension.lower()
    if extension not in group.members:
        raise _lacking(group, extension, where)
    try:
        text = str(group.members[extension][1], "utf-8")
        if field:
            return _field(json.loads(text), field)
        return int(text) if extension in _NUMBERS else text
    except LookupError as error:
        raise AbsentError(
            f"{where}: attribute {name}: expected a field of JSON: {error}"
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        kind = "a whole number" if extension in _NUMBERS else "text"
        raise FormatError(
            f"{where}: attribute {name}: expected {'a field of JSON' if field else kind}: {error}"
        ) from error


def _lacking(group: _Group, extension: str, where: str) -> AbsentError:
    """Return the error for a key that has no member of an extension."""
    return AbsentError(
        f"{where}: expected a member of extension {extension!r}, got "
        f"{', '.join(show(path) for path, _ in group.members.values())}; {_RULE}"
    )


def _field_value(group: _Group, extension: str, declared: FieldType | None, where: str) -> Any:
    """Return the value of a field of a key: a number, text, an array or bytes."""
    if extension not in group.members:
        raise _lacking(group, extension, where)
    data, kind = group.members[extension][1], extension.rpartition(".")[2]
    if declared is not None and declared.kind != "array":
        return data
    try:
        if kind == "npy":
            return read_npy(data)
        if kind in _TEXTS or kind in _NUMBERS:
            text = str(data, "utf-8")
            return np.int64(int(text)) if kind in _NUMBERS else text
    except (ValueError, OverflowError) as error:
        raise FormatError(f"{where}: field {extension}: {error}") from error
    return data


def _field(value: Any, name: str) -> Value:
    """Return a number, bool or text in a JSON object, by names joined by dots."""
    for part in name.split("."):
        value = value[part]
    if value is None:
        raise KeyError(name)
    if not isinstance(value, (int, float, str)):
        raise TypeError(f"got {type(value).__name__}")
    return value
