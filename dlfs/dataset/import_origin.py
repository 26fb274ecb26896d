"""What the record of an unfinished import says of its source, by which an import goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dlfs.base.units import format_bytes, format_count
from dlfs.base.wording import quote
from dlfs.errors import UsageError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.constants import SOURCE_BYTES_MAX
from dlfs.store.fencing import COORDINATOR
from dlfs.store.info import read_origin

Origin = Mapping[str, Any]
"""Description of a source in the record of an unfinished import: ``source``, its name for users;
``fingerprint``, which differs for another source, and for other options that change the dataset;
and values of JSON that are left out if they have no room in the record."""
_NEEDED = ("fingerprint", "step_bytes", "one_pass", "append", COORDINATOR)
SOURCE_NAME_MAX = 1000
"""Most characters of a source's name in the record, if not all of the origin has room."""


def encode_origin(origin: Origin) -> bytes:
    """Return an origin as JSON, in ASCII: a path that is not UTF-8 has surrogates."""
    encoded = json.dumps(origin, sort_keys=True).encode()
    if len(encoded) <= SOURCE_BYTES_MAX:
        return encoded
    kept = {key: origin.get(key) for key in _NEEDED if key in origin}
    return json.dumps({**kept, "source": str(origin.get("source"))[:SOURCE_NAME_MAX]}).encode()


def note_kept(error: BaseException, name: bytes, imported: tuple[int, int]) -> None:
    """Note in an error which samples of an import are kept.

    Args:
        error: the error that has ended the import.
        name: name of the dataset.
        imported: number of samples of the committed steps, and sum of their lengths.
    """
    samples, size = imported
    error.add_note(
        f"{format_count(samples, 'sample')}, {format_bytes(size)}, are kept as an unfinished "
        f"import of {quote(name)}: the same command goes on with it, and 'dlfs import --abandon' "
        "frees it"
    )


def check_origin(found: DatasetRecord, origin: Origin) -> None:
    """Check that an import may go on with the steps of an unfinished one.

    Raises:
        UsageError: its source, or options of it, are others.
    """
    before = read_origin(found)
    if before.get("fingerprint") != origin.get("fingerprint"):
        size = format_bytes(found.sample_bytes)
        raise UsageError(
            f"import {quote(found.name)}: an unfinished import of {before.get('source')} with "
            f"{size} has this name, and its source, or options of it, are not those of now; go "
            "on with it by the same command, or free it with 'dlfs import --abandon'"
        )

    labels = origin.get("labels")
    if labels != before.get("labels", labels):
        raise UsageError(
            f"import {quote(found.name)}: another writer has changed the classes or labels of "
            "the dataset since the import began; free it with 'dlfs import --abandon', and "
            "import all classes anew"
        )
