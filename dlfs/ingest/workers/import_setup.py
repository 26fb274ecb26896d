"""``ImportSetup`` and ``Before``: what the coordinator tells a worker of the import and of a part.

MessagePack, as the messages that they travel in; texts are bytes, because paths may be no UTF-8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast
from uuid import UUID

import msgspec
import numpy as np

from dlfs.base.arguments import Layout
from dlfs.connection.unfinished import PartProgress
from dlfs.dataset.part_writer import ImportOptions
from dlfs.dataset.schema import Schema
from dlfs.errors import FormatError
from dlfs.ingest.isolation.messages import Array, to_bytes, to_text
from dlfs.ingest.workers.messages import Count, read_cursor

EMPTY = "empty_directories"
"""Key for the number of directories without samples, among the entries that a part leaves out."""


class ImportSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all parts of an import have in common.

    Attributes:
        volume_uri: URIs of the members of the volume.
        volume_uuid: UUID of the volume.
        name: name of the dataset.
        uuid: UUID of the dataset.
        layout: order in which samples are packed.
        seed: seed of the shuffled order.
        source_shuffled: True if samples arrive in a shuffled order and are packed in it.
        step_bytes: bytes of samples after which a step ends.
        stage_bytes: size of a window of the shuffle.
        defaults: value of each attribute for samples without it.
        skips_bad: True if bad records are left out; the coordinator counts those of all workers.
        labels: label of each class of the version that is appended to.
        spool: directory for local copies of objects; None for that of the worker's user.
        spool_bytes: most bytes of these copies; None for the default.
    """

    volume_uri: bytes
    volume_uuid: UUID
    name: bytes
    uuid: UUID
    layout: str
    seed: int
    source_shuffled: bool
    step_bytes: Count
    stage_bytes: Count
    defaults: dict[bytes, Array]
    skips_bad: bool
    labels: dict[bytes, int]
    spool: bytes | None
    spool_bytes: Count | None

    @classmethod
    def of(
        cls,
        options: ImportOptions,
        *,
        volume_uri: str,
        volume_uuid: UUID,
        skips_bad: bool,
        labels: Mapping[str, int],
        spool: str | None,
        spool_bytes: int | None,
    ) -> Self:
        """Return the setup of an import; see the attributes."""
        return cls(
            to_bytes(volume_uri),
            volume_uuid,
            options.name,
            options.uuid,
            options.layout,
            options.seed,
            options.source_shuffled,
            options.step_bytes,
            options.stage_bytes,
            {to_bytes(name): Array.of(np.asarray(v)) for name, v in options.defaults.items()},
            skips_bad,
            {to_bytes(name): label for name, label in labels.items()},
            None if spool is None else to_bytes(spool),
            spool_bytes,
        )

    def options(self) -> ImportOptions:
        """Return what ``PartWriter`` needs.

        Raises:
            FormatError: a default is malformed.
        """
        try:
            defaults: dict[str, Any] = {
                to_text(name): value.array()[()] for name, value in self.defaults.items()
            }
        except (ValueError, TypeError) as error:
            raise FormatError(f"join an import: expected defaults: {error}") from error
        return ImportOptions(
            name=self.name,
            uuid=self.uuid,
            layout=cast(Layout, self.layout),
            seed=self.seed,
            source_shuffled=self.source_shuffled,
            step_bytes=self.step_bytes,
            stage_bytes=self.stage_bytes,
            defaults=defaults,
        )


class SchemaText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``Schema``: dtype of each column, names of attributes, and types of fields."""

    columns: dict[bytes, str]
    names: list[bytes]
    fields: bytes | None


class Before(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a part's steps so far have, and what the samples of all parts so far have.

    Attributes:
        step_count: see ``PartProgress``.
        source_count: see ``PartProgress``.
        window_count: see ``PartProgress``.
        cursor: the cursor as JSON; empty without one.
        cursor_count: samples of the part before it.
        schema: what the samples have; None without any.
    """

    step_count: Count
    source_count: Count
    window_count: Count
    cursor: bytes
    cursor_count: Count
    schema: SchemaText | None

    @classmethod
    def of(cls, progress: PartProgress, schema: Schema | None) -> Self:
        """Return the message."""
        cursor = progress.cursor
        return cls(
            progress.step_count,
            progress.source_count,
            progress.window_count,
            b"" if cursor is None else cursor.json,
            0 if cursor is None else cursor.count,
            None if schema is None else _schema_text(schema),
        )

    def progress(self) -> PartProgress:
        """Return the progress of the part."""
        cursor = read_cursor(self.cursor, self.cursor_count)
        counts = self.step_count, self.source_count, self.window_count
        return PartProgress(*counts, cursor)

    def known_schema(self) -> Schema | None:
        """Return what the samples so far have; None without any.

        Raises:
            FormatError: a dtype is none.
        """
        if self.schema is None:
            return None
        try:
            columns = {to_text(name): np.dtype(text) for name, text in self.schema.columns.items()}
        except TypeError as error:
            raise FormatError(f"begin a part: expected dtypes of columns: {error}") from error
        fields = None if self.schema.fields is None else to_text(self.schema.fields)
        return Schema(columns, frozenset(map(to_text, self.schema.names)), fields)


def _schema_text(schema: Schema) -> SchemaText:
    columns = {to_bytes(name): dtype.str for name, dtype in schema.columns.items()}
    fields = None if schema.fields is None else to_bytes(schema.fields)
    return SchemaText(columns, [to_bytes(name) for name in sorted(schema.names)], fields)


_setups = msgspec.msgpack.Decoder(ImportSetup)
_befores = msgspec.msgpack.Decoder(Before)


def encode(value: ImportSetup | Before) -> bytes:
    """Return the bytes of a setup, or of what is before a part."""
    return msgspec.msgpack.encode(value)


def decode_setup(data: bytes) -> ImportSetup:
    """Return the setup that ``encode`` encoded.

    Raises:
        FormatError: the bytes are none.
    """
    try:
        return _setups.decode(data)
    except msgspec.MsgspecError as error:
        raise FormatError(f"join an import: expected its setup: {error}") from error


def decode_before(data: bytes) -> Before:
    """Return what ``encode`` encoded of a part.

    Raises:
        FormatError: the bytes are none.
    """
    try:
        return _befores.decode(data)
    except msgspec.MsgspecError as error:
        raise FormatError(f"begin a part: expected what is before it: {error}") from error
