"""Columns of vectors: each component is a column of its own, with a reserved name.

Component I of the column NAME is the column ``dlfs:vector:NAME:I``, a number or bool for every
sample. Readers that know no vectors give the components. All components of a vector have one type.

Source: FORMAT.md, section 6.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dlfs.format.attributes import ColumnForm
from dlfs.format.constants import RESERVED_PREFIX

VECTOR_PREFIX = f"{RESERVED_PREFIX}vector:"


def component_column(name: str, number: int) -> str:
    """Return the name of the column with one component of a vector."""
    return f"{VECTOR_PREFIX}{name}:{number}"


def component_of(column: str) -> tuple[str, int] | None:
    """Return the name of a vector and the number of the component that a column has; or None."""
    name, colon, number = column.removeprefix(VECTOR_PREFIX).rpartition(":")
    is_component = column.startswith(VECTOR_PREFIX) and name and colon
    if not is_component or not (number.isascii() and number.isdigit()) or len(number) > 4:
        return None
    return (name, int(number)) if str(int(number)) == number else None


def vector_dtype(dtype: np.dtype[Any], length: int) -> np.dtype[Any]:
    """Return the dtype of a column of vectors: ``dtype.base`` and ``dtype.shape`` describe it."""
    return np.dtype((dtype, (length,)))


def find_vectors(columns: Iterable[ColumnForm]) -> dict[str, list[str]]:
    """Return the columns of each vector in the order of its components, by the vector's name.

    Columns that are no complete vector of one type, or whose name is reserved or that of another
    column, are not among them.
    """
    forms = {column.name: column for column in columns}
    found: dict[str, dict[int, str]] = {}
    for name, form in forms.items():
        component = component_of(name)
        if component is not None and form.dtype != np.dtype(object):
            found.setdefault(component[0], {})[component[1]] = name
    return {
        name: [parts[number] for number in range(len(parts))]
        for name, parts in found.items()
        if name not in forms
        and not name.startswith(RESERVED_PREFIX)
        and parts.keys() == set(range(len(parts)))
        and len({forms[part].dtype for part in parts.values()}) == 1
    }
