"""``Schema``: what all samples of a dataset have in common, which the first of them decide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlfs.attributes.merging import check_columns
from dlfs.base.wording import list_names
from dlfs.connection.previous_version import PreviousVersion
from dlfs.connection.unfinished import UnfinishedSteps
from dlfs.errors import UsageError
from dlfs.fields import FieldEncoder
from dlfs.format.constants import RESERVED_PREFIX


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns and the fields of samples.

    Attributes:
        columns: dtype of each column as it is stored, by name; ``object`` for strings.
        names: names of the attributes, each vector once.
        fields: types of the fields as JSON; "" for samples of bytes; None without samples.
    """

    columns: Mapping[str, np.dtype[Any]]
    names: frozenset[str]
    fields: str | None

    @classmethod
    def of_version(cls, previous: PreviousVersion) -> Schema | None:
        """Return the schema of a version; None if it has neither samples nor columns."""
        fields = None if previous.encoder is None else previous.encoder.text
        if fields is None and previous.record.sample_count:
            fields = ""
        if fields is None and not previous.columns:
            return None
        return cls(previous.columns, previous.names, fields)

    @classmethod
    def of_steps(cls, steps: UnfinishedSteps) -> Schema | None:
        """Return the schema of an unfinished import; None if it has neither samples nor columns."""
        fields = None if steps.encoder is None else steps.encoder.text
        if fields is None and steps.record.sample_count:
            fields = ""
        if fields is None and not steps.columns:
            return None
        return cls(steps.columns, steps.names, fields)

    @property
    def encoder(self) -> FieldEncoder | None:
        """Encoder of the fields; None for samples of bytes."""
        return FieldEncoder(json.loads(self.fields)) if self.fields else None

    def union(self, other: Schema) -> Schema:
        """Return the schema of these samples and others, which ``check`` has compared."""
        fields = self.fields if self.fields is not None else other.fields
        return Schema({**self.columns, **other.columns}, self.names | other.names, fields)

    def check(self, other: Schema, action: str) -> None:
        """Check that other samples can be in one dataset with these.

        A reserved column, whose name begins with ``dlfs:``, may be missing in some samples.

        Args:
            other: schema of the other samples.
            action: what is done with them, for errors.

        Raises:
            UsageError: they cannot: they have other attributes, types of columns, or fields.
        """
        check_columns(action, self.columns, other.columns)
        mine, theirs = (
            {name for name in names if not name.startswith(RESERVED_PREFIX)}
            for names in (self.names, other.names)
        )
        if mine != theirs:
            raise UsageError(
                f"{action}: expected the attributes {list_names(sorted(mine))}, got "
                f"{list_names(sorted(theirs))}"
            )
        if None not in (self.fields, other.fields) and self.fields != other.fields:
            expected, got = (
                f"the fields {one}" if one else "bytes" for one in (self.fields, other.fields)
            )
            raise UsageError(f"{action}: expected samples of {expected}, got {got}")
