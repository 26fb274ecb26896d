"""Gives datasets of a catalog another name.

A rename is a commit without new data: the records get the new name and keep their UUIDs. A program
that has a dataset open finds it by its UUID and is not affected.

Versions keep their numbers, unless the new name had such a number before. Then all are raised by
the same amount, because ``NAME@VERSION`` never means other samples.

Plain values without I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlfs.base.wording import list_numbers, quote
from dlfs.errors import ExistsError, LimitError
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.constants import DATASET_VERSION_MAX
from dlfs.format.paths import display
from dlfs.format.superblock import Superblock


def rename_records(
    catalog: Catalog, superblock: Superblock, chosen: Sequence[DatasetRecord], name: bytes
) -> list[DatasetRecord]:
    """Return some records of a catalog with another name.

    Args:
        catalog: catalog of the current generation.
        superblock: superblock of the current generation, which records removed versions.
        chosen: records of the catalog to rename, at least one.
        name: the new name.

    Raises:
        ExistsError: a dataset has the new name already.
        LimitError: a version would get a number above the format's limit.
    """
    action = f"rename dataset {quote(display(chosen[0].name))} to {quote(display(name))}"
    taken = [record.version for record in catalog.find(name)]
    if taken:
        raise ExistsError(
            f"{action}: expected a name that no dataset has, got one with version "
            f"{list_numbers(taken)}"
        )
    versions = [record.version for record in chosen]
    more = max(0, superblock.last_removed(name) + 1 - min(versions))
    if max(versions) + more > DATASET_VERSION_MAX:
        raise LimitError(f"{action}: expected at most {DATASET_VERSION_MAX} versions")
    return [replace(record, name=name, version=record.version + more) for record in chosen]
