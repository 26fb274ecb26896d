"""Named fields of samples: their types, how they lie in a sample's bytes, and their columns.

A dataset with fields has samples of several parts, such as an image, its mask and a caption. A
``FieldType`` describes a field. A ``FieldEncoder`` makes the bytes of a sample and the values of
its reserved columns; the dataset writer calls it. ``place_fields`` finds the fields of the samples
of a batch by these columns, and ``FieldType.decode`` makes a value of the bytes of one field.
``locate_span`` finds the part of each sample that has some of its fields, for reading it alone.

Threads: any; all objects but the encoder are immutable.

Source: FORMAT.md, section 6.3.
"""

from __future__ import annotations

from dlfs.fields.encoding import FieldEncoder
from dlfs.fields.layout import (
    FieldColumns,
    FieldPlaces,
    FieldSpan,
    find_fields,
    measure_field,
    place_fields,
)
from dlfs.fields.spans import find_span, has_checksums, locate_span
from dlfs.fields.types import (
    FIELDS_COLUMN,
    FIELDS_MAX,
    Fields,
    FieldType,
    fields_of_json,
    fields_to_json,
    parse_fields,
)

__all__ = [
    "FIELDS_COLUMN",
    "FIELDS_MAX",
    "FieldColumns",
    "FieldEncoder",
    "FieldPlaces",
    "FieldSpan",
    "FieldType",
    "Fields",
    "fields_of_json",
    "fields_to_json",
    "find_fields",
    "find_span",
    "has_checksums",
    "locate_span",
    "measure_field",
    "parse_fields",
    "place_fields",
]
