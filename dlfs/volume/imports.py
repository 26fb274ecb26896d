"""What a volume gives its writers in steps: how they lock it, read it and find the base version."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.names import DatasetName, new_dataset_name
from dlfs.format.paths import display
from dlfs.store.newest import newest_generation
from dlfs.store.transaction import Generation

if TYPE_CHECKING:
    from dlfs.volume.volume import Volume


def step_arguments(volume: Volume, name: str | bytes, *, append: bool) -> dict[str, Any]:
    """Return arguments of ``StepWriter`` and ``PartsWriter``: those that are of the volume.

    Args:
        volume: the volume.
        name: name of the dataset.
        append: True if the version has all samples of the newest version as well.

    Raises:
        UsageError: the name is not allowed for a new dataset.
    """
    raw = new_dataset_name(name)

    def read() -> AbstractContextManager[Generation]:
        session = volume._local("write")
        return newest_generation(session.generation, session.connection.options.opener)

    def choose(catalog: Catalog) -> DatasetRecord:
        return volume._choose(catalog, DatasetName(raw, None))[-1]

    return {
        "begin": partial(volume._transaction, f"dlfs writing dataset {display(raw)!r}"),
        "read": read,
        "name": raw,
        "choose_base": choose if append else None,
        "on_end": volume._written,
    }
