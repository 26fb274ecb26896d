"""Columns of a dataset: a value for each sample, stored with it and read by index.

``AttributesBuilder`` collects them while a dataset is written; ``AttributeTable`` has the columns
of a sealed dataset, each loaded on its first use.
"""

from __future__ import annotations

from dlfs.attributes.builder import Attributes, AttributesBuilder
from dlfs.attributes.loading import load_attributes, load_attributes_whole, read_attributes
from dlfs.attributes.names import AttributeNames
from dlfs.attributes.table import AttributesLater, AttributeTable

__all__ = [
    "AttributeNames",
    "AttributeTable",
    "Attributes",
    "AttributesBuilder",
    "AttributesLater",
    "load_attributes",
    "load_attributes_whole",
    "read_attributes",
]
