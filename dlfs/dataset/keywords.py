"""Keywords of the functions that begin to write a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict
from uuid import UUID


class WriterKeywords(TypedDict, total=False):
    """Keywords of ``Volume.writer``, which describes them, and of ``Volume.append``."""

    seed: int
    source_shuffled: bool
    expected_bytes: int
    expected_samples: int
    stage_bytes: int | None
    defaults: Mapping[str, Any] | None
    uuid: UUID | None
