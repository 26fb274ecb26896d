"""Makes samples of records without names: whole records, or features of tf.train.Examples.

TFRecord and ArrayRecord files have such records. A sample's path is ``FILE/NUMBER`` (see
``ingest.records``), or the value of the feature ``path``. By default the sample is the whole
record. With ``column``, records are tf.train.Examples: the sample is the single value of that
feature. The features named in ``attributes`` are its attributes, each with one value in every
record: a whole number, a float, or text in UTF-8.

With ``fields``, the features that it names are the fields of a sample; a pattern takes features of
the first record, and a later record with others is an error. A feature of bytes has one value, and
is a field of bytes. One of numbers is a vector of any length, ``<i8[?]`` or ``<f4[?]``. As a
feature has no shape, the entry may give one: ``label:i8[]``, ``boxes:f4[?,4]``, or
``volume:i2[64,64,64]`` for raw bytes. A list of steps in a tf.train.SequenceExample is an array
``[?,?]``, of steps and their values; ``NAME:text`` takes any as JSON. Features that are neither
field nor attribute are counted with their names. ``nulls`` says what happens if a record lacks a
feature, or the feature has no value; ``default`` takes the type from the first record that has it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from dlfs.errors import FormatError, UsageError
from dlfs.ingest.bad_records import BadRecords, RecordError
from dlfs.ingest.fields import (
    HINT,
    AbsentOption,
    NamedRecords,
    default_like,
    default_of_type,
    parse_choices,
)
from dlfs.ingest.formats.tfrecord.example import (
    AbsentFeatureError,
    ExampleError,
    ExampleReader,
    bytes_value,
    field_value,
    scalar,
)
from dlfs.ingest.records import (
    Record,
    Records,
    ShardSource,
    Value,
    number_path,
    shard_prefixes,
    text_path,
)
from dlfs.ingest.registry import find_format
from dlfs.ingest.source import SampleBlock, check_attribute_names


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Options of files of records without names, which may be tf.train.Examples."""

    column: Annotated[
        str | None, "feature of the sample (extra [tfrecord]); none: whole records"
    ] = None
    fields: Annotated[
        tuple[str, ...],
        "features to make the fields of a sample, NAME[:TYPE] or patterns: image, label:i8[]",
    ] = ()
    attributes: Annotated[
        tuple[str, ...], "features to store as attributes (needs column or fields)"
    ] = ()
    path: Annotated[str | None, "feature of the sample's path (needs column or fields)"] = None
    nulls: AbsentOption = "error"

    def __post_init__(self) -> None:
        if self.column is not None and self.fields:
            raise UsageError("import: expected a column or fields, got both")
        if self.column is None and not self.fields and (self.attributes or self.path):
            raise UsageError(
                "import: expected a column or fields along with attributes or path, since only a "
                "tf.train.Example has features"
            )


class RecordSource(ShardSource):
    """The records of some files, each a sample, or an Example of which a sample is made.

    Args:
        shards: paths of the files.
        options: options of the format.
        noun: name of a file in the error for an empty list, such as ``a TFRecord file``.
        format_name: name of the format, whose endings the paths of samples do not have.

    Raises:
        UsageError: the list of files is empty, or two files have one name.
    """

    def __init__(
        self, shards: Sequence[str], options: RecordOptions, *, noun: str, format_name: str
    ) -> None:
        super().__init__(shards, noun=noun)
        self._options = options
        self._prefixes = shard_prefixes(self.shards, find_format(format_name).suffixes)
        self._maker = NamedRecords(parse_choices(options.fields, f"import {self.name}"))
        check_attribute_names(options.attributes, f"import {self.name}")
        self.skipped: Counter[str] = Counter()
        self._defaults: dict[str, Any] | None = None
        has_examples = options.column is not None or bool(options.fields)
        self._examples = ExampleReader(f"import {self.name}") if has_examples else None
        self.is_exact, self.shards_are_independent = not has_examples, True

    def divide_by_file(self) -> None:
        """Let the files be read apart, if the options allow it."""
        if self._options.nulls == "default":
            self.undivided = "nulls=default takes the types of defaults from all files"
        else:
            self.separate_files = self.shards
            self.learns = bool(self._options.fields)

    @abstractmethod
    def stream(self, number: int, bad: BadRecords) -> Generator[tuple[int, bytes], None, None]:
        """Yield the numbers and data of the records of one file, from its start to its end.

        Args:
            number: number of the file.
            bad: bad records, to which those that are left out are added.
        """

    def read_shard(self, number: int) -> Iterator[SampleBlock]:
        """Stream one file; see ``ShardSource``."""
        return self.gather(number, self.samples(number, self.stream(number, self.bad)))

    def samples(self, number: int, records: Generator[tuple[int, bytes], None, None]) -> Records:
        """Yield the samples of some records of a file, which ``stream`` yields."""
        with closing(records):
            for count, data in records:
                record = self.sample(number, count, memoryview(data))
                if record is not None:
                    yield record

    def sample(self, shard: int, number: int, record: memoryview) -> Record | None:
        """Return the sample of a record; None if it is left out."""
        try:
            return self._sample(shard, number, record)
        except RecordError as error:
            self.bad.note(self.shards[shard], f"record {number}", error)
            return None

    def _sample(self, shard: int, number: int, record: memoryview) -> Record | None:
        """Return the sample of a record; None if it lacks a feature and is left out."""
        path = number_path(self._prefixes[shard], number)
        if self._examples is None:
            return Record(path, record)
        where = f"import {self.shards[shard]}: record {number}"
        try:
            found = self._examples.features(record)
            if self._options.nulls == "default" and self._defaults is None:
                self._defaults = self._find_defaults()
            return self._make(found, path, where)
        except AbsentFeatureError as error:
            if self._options.nulls == "skip":
                self.skipped["record that lacks a feature"] += 1
                return None
            hint = f"; {HINT}" if self._options.nulls == "error" else ""
            raise FormatError(f"{where}: {error}{hint}") from error
        except ExampleError as error:
            raise FormatError(f"{where}: {error}") from error

    def _free(self, found: Mapping[str, Any]) -> list[str]:
        """Return the features of a record that can be fields."""
        others = (self._options.column, *self._options.attributes, self._options.path)
        return [name for name in sorted(found) if name not in others]

    def _make(self, found: Mapping[str, Any], path: bytes, where: str) -> Record:
        """Return the sample of a record with some features; count those that are not used.

        Raises:
            FormatError: it has others than the first, which a pattern would take.
        """
        options = self._options
        unused = self._maker.find_unused(self._free(found), where, "features of the first record")
        self.skipped.update(f"feature that is not used: {name}" for name in unused)
        if options.path is not None:
            path = text_path(_read(found, options.path, bytes_value), where)
        attributes: dict[str, Value] = {
            name: self._value(found, name, scalar) for name in options.attributes
        }
        if options.column is not None:
            return Record(path, self._value(found, options.column, bytes_value), attributes)
        fields = {
            name: self._value(found, name, partial(field_value, declared=kind))
            for name, kind in self._maker.fields.items()
        }
        return self._maker.make(path, fields, where, attributes)

    def _value(self, found: Mapping[str, Any], name: str, read: _Reader) -> Any:
        """Return the value of a feature, or its default if the record lacks it."""
        try:
            return _read(found, name, read)
        except AbsentFeatureError:
            if self._defaults is None:
                raise
            return self._defaults[name]

    def _find_defaults(self) -> dict[str, Any]:
        """Return the default of each feature that is used: of its type in the first that has it.

        Raises:
            ExampleError: no record has it.
        """
        options, found = self._options, {}
        for number, shard in enumerate(self.shards):
            bad = self.bad.unreported()
            with closing(self.stream(number, bad)) as stream:
                for count, data in bad.salvage(stream, shard):
                    assert self._examples is not None
                    try:
                        features = self._examples.features(data)
                    except ExampleError as error:
                        bad.note(shard, f"record {count}", error)
                        continue
                    self._maker.choose(self._free(features))
                    readers: dict[str, _Reader] = dict.fromkeys(options.attributes, scalar)
                    if options.column is not None:
                        readers[options.column] = bytes_value
                    for name, kind in self._maker.fields.items():
                        readers[name] = partial(field_value, declared=kind)
                        if kind is not None:
                            found[name] = default_of_type(kind)
                    for name in readers.keys() - found.keys():
                        with suppress(AbsentFeatureError):
                            found[name] = default_like(_read(features, name, readers[name]))
                    if readers.keys() <= found.keys():
                        return found
        missing = ", ".join(sorted(readers.keys() - found.keys()))
        raise ExampleError(f"expected feature {missing} in a record, got none in all of them")


_Reader = Callable[[Any, str], Any]
"""Function that returns the value of a feature of a name."""


def _read(found: Mapping[str, Any], name: str, read: _Reader) -> Any:
    """Return the value of a feature.

    Raises:
        AbsentFeatureError: the record lacks the feature, or it has no value.
    """
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise AbsentFeatureError(f"expected feature {name}, got {known}")
    return read(found[name], name)
