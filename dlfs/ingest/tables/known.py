"""What the source of several tables knows of them, for sources of some of them.

That is the joined schema, by which the columns are chosen, the schema of each file, and the number
of its rows: JSON Lines have them only once they were read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dlfs.ingest.tables.arrow import pyarrow
from dlfs.ingest.tables.schemas import JoinedSchema

SCHEMAS_MAX = 1000
"""Most different schemas of files that are described."""


class _Shared(msgspec.Struct, frozen=True):
    """The joined schema and the different schemas of files, as Arrow writes them."""

    joined: bytes
    schemas: list[bytes]


_Facts = tuple[int, int | None]
"""Number of a file's schema, and of its rows if it is known."""


@dataclass(frozen=True, slots=True)
class KnownTables:
    """What is known of some files.

    Attributes:
        joined: the joined schema of all files.
        types: schema and number of rows of each of the files, by path; empty if they are unknown.
    """

    joined: JoinedSchema
    types: Mapping[str, tuple[Any, int | None]]

    @classmethod
    def of(cls, shared: bytes, paths: Sequence[str], facts: Sequence[bytes]) -> KnownTables:
        """Return what ``describe_tables`` has written of some files.

        Raises:
            Exception: the bytes are something else; the process that reads tables expects any.
        """
        found = msgspec.msgpack.decode(shared, type=_Shared)
        schemas = list(map(_read, found.schemas))
        types: dict[str, tuple[Any, int | None]] = {}
        for path, fact in zip(paths, filter(None, facts), strict=False):
            number, row_count = msgspec.msgpack.decode(fact, type=_Facts)
            types[path] = schemas[number], row_count
        return cls(JoinedSchema(_read(found.joined), (), {}), types)


def describe_tables(joined: JoinedSchema, types: Sequence[_Facts]) -> tuple[bytes, list[bytes]]:
    """Return what sources of some of the files need to know of all, and of each.

    Args:
        joined: the joined schema, whose files have the different schemas.
        types: the number of the schema, and of the rows, of each file.
    """
    has_few = len(joined.files) <= SCHEMAS_MAX
    schemas = [_write(one.schema) for one in joined.files] if has_few else []
    shared = msgspec.msgpack.encode(_Shared(_write(joined.schema), schemas))
    return shared, [msgspec.msgpack.encode(one) for one in types] if has_few else []


def _write(schema: Any) -> bytes:
    return bytes(schema.serialize())


def _read(data: bytes) -> Any:
    return pyarrow.ipc.read_schema(pyarrow.py_buffer(data))
