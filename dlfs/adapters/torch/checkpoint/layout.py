"""Checkpoints as datasets of a volume: names, references, listing, removal.

The checkpoints of one training run have one name. A checkpoint ``STEP`` of the name ``NAME`` is:

- ``NAME:STEP:shards``, a dataset with one version for each rank that wrote something. Its samples
  are pieces of the state: up to ``PIECE_BYTES`` of one tensor or of one pickled object.
- ``NAME:STEP``, a dataset that is written last. Its sample ``metadata`` is torch's ``Metadata``
  with the ``Piece`` list of each tensor (``metadata``). Its sample ``references`` is JSON: the
  versions that hold those pieces, here or in datasets of earlier checkpoints.

Pieces name a version by its UUID. So they stay valid when datasets are renamed, and a dataset of
the same name on another volume, with tensors of the same shapes, is never taken for theirs.

A checkpoint exists as soon as ``NAME:STEP`` is sealed, and not before. A version of a ``:shards``
dataset to which no checkpoint refers is unused: a save was killed, or its checkpoints were removed.
``remove_unused`` frees it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from torch.distributed.checkpoint.metadata import Metadata

import dlfs
from dlfs.adapters.torch.checkpoint.metadata import Piece, decode, encode
from dlfs.base.json_records import to_json
from dlfs.base.units import MIB
from dlfs.base.wording import quote
from dlfs.errors import DlfsError, FormatError, LockedError, NotFoundError, UsageError
from dlfs.ingest.references import (
    CHECKPOINT_FORMAT,
    REFERENCES_PATH,
    References,
    find_references,
    read_references,
)
from dlfs.store.locking import when_unlocked

PIECE_BYTES = 16 * MIB
"""Most bytes of a tensor that one sample holds, and thus the unit of sharing, in bytes."""

METADATA_PATH = "metadata"
CHECKPOINT_SAMPLES = 2
"""Samples of a dataset ``NAME:STEP``."""

_PART = re.compile(r"[^:@/\s-][^:@/\s]*")
_SHARDS = ":shards"

_log = logging.getLogger("dlfs.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        name: name of the run.
        step: name of the checkpoint within the run.
        sequence: number that grows with each save of the run.
        sample_bytes: size of the state, in bytes.
        written_bytes: bytes that this save wrote; the others are shared with earlier checkpoints.
        created: time of the commit, UTC.
        sources: UUIDs of the versions of ``:shards`` datasets that hold the state.
        version: version of the dataset ``NAME:STEP``.
    """

    name: str
    step: str
    sequence: int
    sample_bytes: int
    written_bytes: int
    created: datetime
    sources: frozenset[UUID]
    version: int

    @property
    def dataset(self) -> str:
        """Dataset of the metadata, with its version."""
        return f"{self.name}:{self.step}@{self.version}"


def check_part(text: object, option: str) -> str:
    """Check a name or a step and return it as text.

    Raises:
        UsageError: it is empty, begins with ``-``, or has a colon, ``@``, ``/`` or space in it.
    """
    part = str(text)
    if not _PART.fullmatch(part):
        raise UsageError(
            f"name a checkpoint: expected {option} without ':', '@', '/' and spaces, and without "
            f"'-' at its beginning, got {part!r}"
        )
    return part


class HasCheckpointId:
    """The ``checkpoint_id`` of a reader or a writer, as torch asks for it."""

    _step: str | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """Name of the checkpoint that is saved or loaded; None for the newest one."""
        return self._step

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if a checkpoint may have this id."""
        try:
            check_id(checkpoint_id)
        except UsageError:
            return False
        return True


def check_id(checkpoint_id: str | os.PathLike[str] | int | None) -> str | None:
    """Return a checkpoint_id as text; None stays None.

    Raises:
        UsageError: as ``check_part``.
    """
    return None if checkpoint_id is None else check_part(checkpoint_id, "a checkpoint_id")


def open_volume(volume: str | Sequence[str]) -> dlfs.Volume:
    """Open a volume by the URIs of its members, or through a service (``unix:PATH``)."""
    if isinstance(volume, str) and volume.startswith("unix:"):
        return dlfs.connect(volume)
    return dlfs.open(volume)


def shards_dataset(name: str, step: str) -> str:
    """Return the name of the dataset that holds the shards of a checkpoint."""
    return f"{name}:{step}{_SHARDS}"


# ---- reading -------------------------------------------------------------------------------------


def list_checkpoints(volume: dlfs.Volume, name: str) -> list[Checkpoint]:
    """List the complete checkpoints of a run, the oldest first; the newest version of each step.

    Raises:
        FormatError: a dataset with the name of a checkpoint is none.
        DlfsError: as ``Dataset.get``.
    """
    found = [_describe(volume, name, step, info) for step, info in _newest(volume, name).items()]
    return sorted(found, key=lambda one: one.sequence)


def _list_readable(volume: dlfs.Volume, name: str) -> tuple[list[Checkpoint], dict[str, DlfsError]]:
    """List the checkpoints that can be read, the oldest first, and the errors of the others.

    Returns:
        The checkpoints, and the error of each other one by its dataset, with the version.
    """
    found: list[Checkpoint] = []
    errors: dict[str, DlfsError] = {}
    for step, info in _newest(volume, name).items():
        try:
            found.append(_describe(volume, name, step, info))
        except DlfsError as error:
            errors[f"{info.name}@{info.version}"] = error
    return sorted(found, key=lambda one: one.sequence), errors


def _newest(volume: dlfs.Volume, name: str) -> dict[str, dlfs.DatasetInfo]:
    """Return the newest dataset of metadata of each step."""
    newest: dict[str, dlfs.DatasetInfo] = {}
    for info in volume.datasets():
        run, colon, step = info.name.partition(":")
        if run == name and colon and ":" not in step:
            newest[step] = info  # versions come in rising order
    return newest


def _describe(volume: dlfs.Volume, name: str, step: str, info: dlfs.DatasetInfo) -> Checkpoint:
    with volume.dataset(info.name, info.version) as dataset:
        record = read_references(dataset)
    return Checkpoint(
        name=name,
        step=step,
        sequence=record.sequence,
        sample_bytes=record.sample_bytes,
        written_bytes=record.written_bytes,
        created=info.created,
        sources=frozenset(record.sources),
        version=info.version,
    )


def find_checkpoint(volume: dlfs.Volume, name: str, step: str | None) -> Checkpoint:
    """Return a checkpoint of a run, by default the newest that can be read.

    Raises:
        NotFoundError: there is no complete checkpoint of that step.
        DlfsError: as ``list_checkpoints``; the checkpoint, or each of the run, cannot be read.
    """
    newest = _newest(volume, name)
    if step in newest:
        return _describe(volume, name, step, newest[step])
    if step is None and newest:
        found, errors = _list_readable(volume, name)
        if not found:
            raise list(errors.values())[-1]
        for dataset, error in errors.items():
            _log.warning("checkpoint %s cannot be read and is skipped: %s", dataset, error)
        return found[-1]
    what = "a checkpoint" if step is None else f"checkpoint {step!r}"
    steps = ", ".join(sorted(newest, key=lambda one: newest[one].created)) or "none"
    raise NotFoundError(
        f"find {what} of {name!r} on {volume.uri}: no complete one; complete are: {steps}"
    )


def find_last_metadata(volume: dlfs.Volume, name: str) -> str | None:
    """Return the dataset of the checkpoint that was committed last, or None; opens none of them."""
    found = max(_newest(volume, name).values(), key=lambda info: info.created, default=None)
    return None if found is None else f"{found.name}@{found.version}"


def read_metadata(volume: dlfs.Volume, dataset: str) -> Metadata:
    """Read torch's ``Metadata`` of a checkpoint.

    Raises:
        FormatError: the dataset is no checkpoint of this format.
        DlfsError: as ``Dataset.get``.
    """
    with volume.dataset(dataset) as opened:
        if METADATA_PATH not in opened:
            raise FormatError(
                f"read checkpoint {dataset!r}: it is none: expected a sample {quote(METADATA_PATH)}"
            )
        return decode(opened.get(METADATA_PATH), dataset)


def open_source(volume: dlfs.Volume, source: UUID) -> dlfs.Dataset:
    """Open the dataset that a piece names, whatever its present name is.

    Raises:
        NotFoundError: the volume has no such dataset.
        DlfsError: as ``Volume.dataset``.
    """
    for info in volume.datasets():
        if info.uuid == source:
            dataset = volume.dataset(info.name, info.version)
            if dataset.uuid == source:
                return dataset
            dataset.close()  # it was renamed meanwhile
    raise no_source(f"read a checkpoint on {volume.uri}", source)


def no_source(action: str, source: UUID) -> NotFoundError:
    """Return the error for a piece whose dataset is not on the volume."""
    return NotFoundError(
        f"{action}: expected the dataset of its tensors with the UUID {source}, got none: it was "
        "removed, or the checkpoint was copied or imported without it"
    )


def check_stored(dataset: dlfs.Dataset, pieces: Sequence[Piece]) -> None:
    """Check that a dataset holds pieces, by their lengths and CRC32C.

    Raises:
        FormatError: it holds other samples.
    """
    samples = [piece.sample for piece in pieces]
    if max(samples, default=0) >= len(dataset):
        raise FormatError(
            f"read a checkpoint's piece of {dataset.name}@{dataset.version}: expected a sample "
            f"below {len(dataset)}, got {max(samples)}"
        )
    lengths = dataset.lengths(samples).tolist()
    crcs = dataset.directory.crcs(samples).tolist()
    for piece, length, crc in zip(pieces, lengths, crcs, strict=True):
        if (length, crc) != (piece.length_bytes, piece.crc32c):
            raise FormatError(
                f"read sample {piece.sample} of {dataset.name}@{dataset.version}: expected the "
                f"checkpoint's piece of {piece.length_bytes} bytes with CRC32C "
                f"{piece.crc32c:#010x}, got {length} bytes with {crc:#010x}"
            )


# ---- changing ------------------------------------------------------------------------------------


def commit(
    volume: dlfs.Volume, name: str, step: str, metadata: Metadata, *, timeout_s: float
) -> Checkpoint:
    """Write the metadata of a checkpoint. With the seal, the checkpoint exists.

    Args:
        volume: volume to write to.
        name: name of the run.
        step: name of the checkpoint.
        metadata: torch's ``Metadata``; its ``storage_data`` has the pieces of each item.
        timeout_s: time to wait while another writer has the volume, in seconds.

    Raises:
        NotFoundError: a dataset that holds shards was removed meanwhile.
        LockedError: the volume stayed locked.
        DlfsError: as ``DatasetWriter.seal``; there is no new checkpoint.
    """
    content = encode(metadata)
    pieces = [piece for item in metadata.storage_data.values() for piece in item]
    writer = when_unlocked(lambda: volume.writer(f"{name}:{step}", layout="path"), timeout_s)
    with writer:
        volume.refresh()  # the lock excludes all other changes from here on
        references = _refer(volume, name, step, pieces)
        writer.add(METADATA_PATH, content)
        writer.add(REFERENCES_PATH, to_json(references))
        info = writer.seal()
    return _describe(volume, name, step, info)


def _refer(volume: dlfs.Volume, name: str, step: str, pieces: Sequence[Piece]) -> References:
    """Return the references of a new checkpoint.

    Raises:
        NotFoundError: a dataset that holds shards was removed.
    """
    there = {info.uuid: info for info in volume.datasets()}
    sources = {piece.source for piece in pieces}
    missing = sources - there.keys()
    if missing:
        raise NotFoundError(
            f"save checkpoint {step!r} of {name!r}: the shards {', '.join(map(str, missing))} "
            f"were removed by another save of the same name"
        )
    known, _ = _list_readable(volume, name)
    own = shards_dataset(name, step)
    stored = {(p.source, p.sample): p.length_bytes for p in pieces}
    return References(
        checkpoint_format=CHECKPOINT_FORMAT,
        sequence=1 + max((one.sequence for one in known), default=0),
        sample_bytes=sum(piece.length_bytes for piece in pieces),
        written_bytes=sum(n for (source, _), n in stored.items() if there[source].name == own),
        sources={
            source: f"{there[source].name}@{there[source].version}" for source in sorted(sources)
        },
    )


def _shard_versions(volume: dlfs.Volume, name: str) -> dict[UUID, dlfs.DatasetInfo]:
    """Return all versions of ``:shards`` datasets of a run, by UUID."""
    return {
        info.uuid: info
        for info in volume.datasets()
        if info.name.startswith(name + ":")
        and info.name.endswith(_SHARDS)
        and info.name.count(":") == 2  # ``NAME:shards`` is a checkpoint with that id
    }


def remove_outdated(volume: dlfs.Volume, name: str, keep: int, *, timeout_s: float) -> None:
    """Remove all but the newest checkpoints of a run, and the shards that none of them needs.

    Args:
        volume: volume to change.
        name: name of the run.
        keep: number of checkpoints that stay, >= 1.
        timeout_s: time to wait while another writer has the volume, in seconds.

    Raises:
        DlfsError: as ``Volume.remove``.
    """
    for old in _list_readable(volume, name)[0][:-keep]:
        _remove(volume, f"{name}:{old.step}", None, timeout_s)
    remove_unused(volume, name, timeout_s=timeout_s)


def remove_unused(volume: dlfs.Volume, name: str, *, timeout_s: float) -> None:
    """Remove what no complete checkpoint needs: replaced metadata, and shards of killed saves.

    No shards are removed while a checkpoint that may need them cannot be read, such as one in the
    format of another release; a warning says how to go on.

    Raises:
        DlfsError: as ``Volume.remove``.
    """
    volume.refresh()
    complete, unreadable = _list_readable(volume, name)
    for one in complete:
        for info in volume.versions(f"{name}:{one.step}")[:-1]:
            _remove(volume, info.name, info.version, timeout_s)
    versions = _shard_versions(volume, name)
    used = {source for one in complete for source in one.sources}
    if not unreadable and versions.keys() - used:
        elsewhere, unreadable = _find_used_elsewhere(volume)
        used |= elsewhere
    if unreadable:
        dataset, error = next(iter(unreadable.items()))
        _log.warning(
            "shards of %s that no checkpoint needs stay on the volume, because %d datasets cannot "
            "be read that may need them, such as %s: %s; remove it if it is of no use any more: "
            "dlfs rm %s %s",
            quote(name),
            len(unreadable),
            dataset,
            error,
            volume.uri,
            dataset,
        )
        return
    partly_used = {info.name for uuid, info in versions.items() if uuid in used}
    for dataset in {info.name for info in versions.values()} - partly_used:
        _remove(volume, dataset, None, timeout_s)
    for uuid, info in versions.items():
        if uuid not in used and info.name in partly_used:
            _remove(volume, info.name, info.version, timeout_s)


def _find_used_elsewhere(volume: dlfs.Volume) -> tuple[set[UUID], dict[str, DlfsError]]:
    """Return the sources of the checkpoints of all runs: datasets may have been renamed.

    Returns:
        The UUIDs of the sources, and the errors of datasets that cannot be read.
    """
    used: set[UUID] = set()
    errors: dict[str, DlfsError] = {}
    for info in volume.datasets():
        if info.sample_count == CHECKPOINT_SAMPLES:
            try:
                with volume.dataset(info.name, info.version) as dataset:
                    references = find_references(dataset)
            except DlfsError as error:
                errors[f"{info.name}@{info.version}"] = error
                continue
            used.update(references.sources if references is not None else ())
    return used, errors


def _remove(volume: dlfs.Volume, dataset: str, version: int | None, timeout_s: float) -> None:
    """Remove a dataset, or leave it to the next save if another writer has the volume."""
    try:
        when_unlocked(lambda: volume.remove(dataset, version), timeout_s)
    except LockedError as error:
        _log.warning("%s is removed by the next save: %s", dataset, error)
