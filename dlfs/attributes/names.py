"""The attributes that all samples of a dataset have.

The first samples of a writer determine the attributes. Later samples have the same ones: the
columns on media have no absent values, so a sample without a value would get one that means
something else, such as class 0. A caller may declare the value of such samples instead.

Reserved columns are left to their writers: for them the empty string means that a sample has none.

Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dlfs.attributes.builder import Attributes
from dlfs.attributes.vectors import component_column
from dlfs.base.wording import list_names
from dlfs.errors import UsageError
from dlfs.format.constants import RESERVED_PREFIX
from dlfs.format.paths import display


class AttributeNames:
    """Checks that samples have the attributes of those before them, or adds declared values.

    Args:
        defaults: value of each attribute for samples that are added without it.

    Attributes:
        names: attributes of the samples so far; None before the first ones.
    """

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        for name in defaults:
            if name.startswith(RESERVED_PREFIX):
                raise UsageError(
                    f"declare a default of attributes: expected no reserved name, got {name!r}"
                )
        self._defaults = {name: _as_value(name, value) for name, value in defaults.items()}
        self.names: frozenset[str] | None = None

    @property
    def stored_defaults(self) -> dict[str, Any]:
        """Declared value of each column as it is stored, by name: of each component of a vector."""
        found: dict[str, Any] = {}
        for name, value in self._defaults.items():
            if value.ndim:
                parts = enumerate(value.tolist())
                found |= {component_column(name, number): part for number, part in parts}
            else:
                found[name] = value.item()
        return found

    def complete(self, attributes: Attributes, count: int, path: bytes | None) -> Attributes:
        """Return the attributes of samples, with declared values for those that they lack.

        Args:
            attributes: values of each attribute that the samples have.
            count: number of the samples.
            path: path of the first one, for errors; None without samples.

        Raises:
            UsageError: they lack an attribute that the samples before have, or have another one.
        """
        filled = {
            name: np.broadcast_to(value, (count, *value.shape))
            for name, value in self._defaults.items()
            if name not in attributes
        }
        completed = {**attributes, **filled} if filled else attributes
        if self.names is not None and count:
            self._compare(_own_names(completed), path)
        return completed

    def _compare(self, given: frozenset[str], path: bytes | None) -> None:
        assert self.names is not None
        lacking, more = self.names - given, given - self.names
        if not lacking and not more:
            return
        got = f"none of {list_names(lacking)}" if lacking else f"{list_names(more)} as well"
        raise UsageError(
            f"add the sample {display(path or b'')!r}: expected the attributes of the samples "
            f"before, {list_names(self.names)}, got {got}; give all samples the same attributes, "
            "or declare a default for those without one"
        )

    def settle(self, attributes: Attributes) -> None:
        """Record the attributes of samples that were added."""
        self.names = _own_names(attributes) | (self.names or frozenset())


def _own_names(attributes: Attributes) -> frozenset[str]:
    return frozenset(name for name in attributes if not name.startswith(RESERVED_PREFIX))


def _as_value(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return a default as an array of no dimension, or of one for a vector.

    Raises:
        UsageError: it is neither.
    """
    array = np.array(value, object) if isinstance(value, str) else np.asarray(value)
    if array.ndim > 1:
        raise UsageError(
            f"declare the default of attribute {name!r}: expected a value or a vector, got an "
            f"array of shape {array.shape}"
        )
    return array
