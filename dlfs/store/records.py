"""Describes datasets that are not in a catalog."""

from __future__ import annotations

from dlfs.base.wording import list_names, list_numbers, quote
from dlfs.errors import NotFoundError
from dlfs.format.catalog import Catalog
from dlfs.format.paths import display

NO_DATASETS = "the volume has none yet; 'dlfs import' makes one"


def no_such_dataset(
    catalog: Catalog, name: bytes, version: int | None, *, where: str
) -> NotFoundError:
    """Return the error for a dataset or version that does not exist; it lists existing ones.

    Args:
        catalog: catalog of the volume.
        name: name of the dataset that was requested.
        version: version that was requested; None: any.
        where: name of the volume for users.
    """
    number = "" if version is None else f" version {version}"
    what = f"find dataset {quote(name)}{number} on {where}"
    versions = [record.version for record in catalog.find(name)]
    if versions:
        return NotFoundError(f"{what}: no such version; there are: {list_numbers(versions)}")
    if not catalog.datasets:
        return NotFoundError(f"{what}: {NO_DATASETS}")
    names = [display(name) for name in catalog.dataset_names()]
    there = list_names(names, wanted=display(name))
    return NotFoundError(f"{what}: no such dataset; there are: {there}")
