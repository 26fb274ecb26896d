"""``DatasetIdentity``: which version of which dataset is meant, whatever happens to its volume.

The UUID identifies a version on its volume: a connection, a service's cache of datasets and memory
that processes share find it by volume and UUID, because they need its chunks. A state of an epoch
knows a version by its digests, which equal copies have as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from dlfs.base.wording import quote
from dlfs.block import BlockDevice
from dlfs.errors import StaleError, UsageError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.digests import Digests
from dlfs.format.paths import display
from dlfs.reader import MovedError
from dlfs.store.members import describe_swapped


@dataclass(frozen=True, slots=True)
class DatasetIdentity:
    """Identity of one version of a dataset, with its name for error messages."""

    uuid: UUID
    name: str
    version: int
    volume_uuid: UUID | None = None
    """UUID of the dataset's volume; None if it is unknown and must not be checked."""
    digests: Digests = field(default_factory=Digests)
    """Digests of the version, by which states of epochs know it and its copies."""

    @classmethod
    def of(cls, record: DatasetRecord, volume_uuid: UUID | None = None) -> DatasetIdentity:
        """Return the identity of a dataset in a catalog."""
        return cls(record.uuid, display(record.name), record.version, volume_uuid, record.digests)

    def stale(self, reason: str = "it was removed") -> StaleError:
        """Return the error for a dataset that no longer exists."""
        return StaleError(
            f"read dataset {self.name!r} version {self.version} ({self.uuid}): {reason}"
        )

    def moved(self) -> MovedError:
        """Return the error for a dataset that must be read from other chunks."""
        return MovedError(
            f"read dataset {quote(self.name)} version {self.version}: it was moved to other "
            "chunks of its volume; open it again"
        )

    def other_checkpoint(self, content: str, other: DatasetIdentity | None, uri: str) -> UsageError:
        """Return the error for a checkpoint of another dataset.

        Args:
            content: content digest in the checkpoint.
            other: a dataset that has it; None if the volume has no such dataset.
            uri: URI of the volume.
        """
        expected = (
            f"expected dataset {quote(self.name)} version {self.version} (content digest "
            f"{self.digests.content})"
        )
        if other is None:
            return UsageError(
                f"resume an epoch: this checkpoint is of another version or dataset: {expected}, "
                f"got {quote(content)}, which is not on {uri}"
            )
        what = "version" if other.name == self.name else "dataset"
        return UsageError(
            f"resume an epoch: this checkpoint is of another {what}: {expected}, got dataset "
            f"{quote(other.name)} version {other.version} (content digest {content}); open that "
            f"{what} to go on from it"
        )

    def missing_from(self, devices: Sequence[BlockDevice]) -> StaleError:
        """Return the error, with its cause, for a dataset that the devices do not have."""
        other = None if self.volume_uuid is None else describe_swapped(devices, self.volume_uuid)
        return self.stale() if other is None else self.stale(other)
