"""The record by which a checkpoint names the datasets that hold its tensors.

A checkpoint's dataset has it as the sample ``references`` (``dlfs.adapters.torch.checkpoint``). A
copy of such a dataset alone would name samples that its new volume does not have, so it is refused.
"""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import msgspec

from dlfs.base.json_records import from_json
from dlfs.base.units import MIB
from dlfs.base.wording import list_names, quote
from dlfs.dataset.dataset import Dataset
from dlfs.errors import FormatError, UsageError
from dlfs.volume.volume import Volume

CHECKPOINT_FORMAT = 2
"""Revision of the samples ``metadata`` and ``references`` of a checkpoint."""

REFERENCES_PATH = "references"

_REFERENCES_BYTES_MAX = 16 * MIB

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class References(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sample ``references`` of a checkpoint.

    Attributes:
        checkpoint_format: revision of the samples.
        sequence: number that grows with each save of the run.
        sample_bytes: size of the state, in bytes.
        written_bytes: bytes that this save wrote; the others are shared with earlier checkpoints.
        sources: UUIDs of the datasets that hold the state, with the name and version of each at the
            time of the save.
    """

    checkpoint_format: int
    sequence: Count
    sample_bytes: Count
    written_bytes: Count
    sources: dict[UUID, str]


def find_references(dataset: Dataset) -> References | None:
    """Read the references of a dataset; None if it is no checkpoint of any format.

    Raises:
        FormatError: it is a checkpoint of another format, or the sample is damaged.
        DlfsError: as ``Dataset.get``.
    """
    if REFERENCES_PATH not in dataset:
        return None
    if int(dataset.lengths([dataset.index(REFERENCES_PATH)])[0]) > _REFERENCES_BYTES_MAX:
        return None
    content = dataset.get(REFERENCES_PATH)
    try:
        found = from_json(content, References)
    except FormatError:
        return None
    if found.checkpoint_format != CHECKPOINT_FORMAT:
        raise FormatError(
            f"read checkpoint {dataset.name!r}: expected format {CHECKPOINT_FORMAT}, got format "
            f"{found.checkpoint_format}, which another release of DLFS loads"
        )
    return found


def read_references(dataset: Dataset) -> References:
    """Read the references of a checkpoint.

    Raises:
        FormatError: the dataset is no checkpoint of this format.
        DlfsError: as ``Dataset.get``.
    """
    found = find_references(dataset)
    if found is None:
        raise FormatError(
            f"read checkpoint {dataset.name!r}: it is none, or one of another release of DLFS: "
            f"expected a record of format {CHECKPOINT_FORMAT} as the sample "
            f"{quote(REFERENCES_PATH)}"
        )
    return found


def check_copyable(dataset: Dataset, volume: Volume) -> None:
    """Refuse to copy a checkpoint to a volume that does not hold its tensors.

    Raises:
        UsageError: the dataset is a checkpoint, and the volume lacks a dataset that it refers to.
        DlfsError: as ``find_references``.
    """
    references = find_references(dataset)
    missing = set(references.sources if references is not None else ())
    missing -= {info.uuid for info in volume.datasets()}
    if references is not None and missing:
        names = list_names(references.sources[uuid] for uuid in missing)
        raise UsageError(
            f"copy {dataset.name}@{dataset.version} to {volume.uri}: it is a checkpoint, and its "
            f"tensors are in {names}, which a copy does not take; load the checkpoint, and save "
            "it to that volume"
        )
