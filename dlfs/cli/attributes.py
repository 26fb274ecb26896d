"""Options of ``dlfs import`` that give samples attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlfs.errors import UsageError

if TYPE_CHECKING:
    from dlfs.ingest.source import Source


def parse_defaults(texts: list[str] | None) -> dict[str, int | float | str]:
    """Read the values of ``--default`` by name.

    Raises:
        UsageError: one has another form, or is no value of its type.
    """
    from dlfs.ingest.attributes import parse_named

    found = {}
    for text in texts or []:
        name, convert, value = parse_named(text)
        try:
            found[name] = convert(value)
        except ValueError as error:
            raise UsageError(f"import: read --default {text!r}: {error}") from error
    return found


def with_attributes(
    source: Source,
    *,
    label_from_path: bool,
    patterns: list[str] | None,
    files: list[str] | None,
    path_column: str | None,
    array_dtype: str | None,
    array_shape: str | None,
) -> Source:
    """Return a source with the attributes that the options ask for.

    Raises:
        UsageError: options are wrong, or exclude each other.
        DlfsError: a file of attributes cannot be read.
    """
    from dlfs.ingest.attributes import (
        ArrayRule,
        AttributedSource,
        PathRule,
        Rule,
        TableRule,
        label_rule,
    )

    if (array_dtype is None) != (array_shape is None):
        raise UsageError("import: expected --array-dtype and --array-shape, got only one of them")
    if path_column is not None and not files:
        raise UsageError("import: expected --attributes for --path-column, got none")
    rules: list[Rule] = [label_rule()] if label_from_path else []
    rules += [PathRule.parse(pattern) for pattern in patterns or []]
    rules += [TableRule(file, path_column) for file in files or []]
    if array_dtype is not None and array_shape is not None:
        rules.append(ArrayRule(array_dtype, array_shape))
    return AttributedSource(source, rules) if rules else source
