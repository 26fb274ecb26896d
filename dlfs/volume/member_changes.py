"""Changes of a volume's members: ``Volume`` inherits these methods and gives them its write lock.

``store.growing`` and ``store.shrinking`` do the work. Datasets stay as they are; programs that have
them open read on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from dlfs.connection.connection import LocalVolume
from dlfs.store.balancing import RebalanceReport, rebalance_volume
from dlfs.store.growing import grow_volume
from dlfs.store.info import VolumeInfo
from dlfs.store.members import Members, split_uris
from dlfs.store.shrinking import ShrinkReport, shrink_volume
from dlfs.store.transaction import Transaction


class MemberChanges(ABC):
    """Base class of ``Volume`` with the methods that change its members."""

    @abstractmethod
    def info(self) -> VolumeInfo:
        """Describe the volume."""

    @abstractmethod
    def _local(self, action: str) -> LocalVolume:
        """Return the session with the devices."""

    @abstractmethod
    def _transaction(self, holder: str) -> Transaction:
        """Lock the volume for a writer."""

    @abstractmethod
    def refresh(self) -> None:
        """See the newest generation."""

    def grow(
        self, members: Members, *, size_bytes: int | None = None, force: bool = False
    ) -> VolumeInfo:
        """Add devices to the volume, whose space new datasets then use. No data is moved.

        ``rebalance`` spreads the existing datasets over all devices.

        The devices become one group of members. Their URIs are recorded on the volume, so programs
        that are given only its earlier members find the new ones.

        Args:
            members: URIs of the new devices, at least as many as the volume has replicas, or one
                text with commas.
            size_bytes: size of each that is a new or empty file.
            force: True to overwrite data on the devices.

        Returns:
            The grown volume.

        Raises:
            ExistsError: a device holds data, and ``force`` was not given.
            UsageError: a device is a member already, or there are too few, or they are too small.
            LimitError: the volume would have more than 64 members or 20 groups of them.
            LockedError: a writer has locked the volume or a device.
            SpaceError: the volume has no room for another catalog.
            DeviceError: a device failed.
        """
        options = self._local("change").options
        with self._transaction("dlfs grow") as transaction:
            grow_volume(
                transaction,
                members,
                size_bytes=size_bytes,
                force=force,
                opener=options.opener,
            )
        self.refresh()
        return self.info()

    def rebalance(
        self, *, progress: Callable[[int, int], None] = lambda _done, _total: None
    ) -> RebalanceReport:
        """Move data so that each dataset lies on all devices. Readers go on.

        If this is interrupted, the volume can be read and written, and rebalancing it again
        continues. On a volume that is balanced it moves nothing.

        Args:
            progress: called with the bytes moved and the total bytes.

        Returns:
            The number of bytes that were moved.

        Raises:
            SpaceError: the devices that should get data are full; nothing was changed.
            LockedError: a writer has locked the volume.
            DeviceError: a device failed.
        """
        self._local("change")
        with self._transaction("dlfs rebalance") as transaction:
            report = rebalance_volume(transaction, progress)
        self.refresh()
        return report

    def shrink(
        self,
        members: Sequence[int | str],
        *,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> ShrinkReport:
        """Move all data off some members, and remove them from the volume. Readers go on.

        Members leave as they came: all devices of one ``grow`` together. If this is interrupted,
        the volume can be read and written, and shrinking it again continues. Two seconds after it
        has returned, the removed devices may be detached: programs have opened the others.

        Args:
            members: numbers or URIs of members; all members of their groups are removed.
            progress: called with the bytes moved and the total bytes.

        Returns:
            The removed devices, which no longer belong to a volume.

        Raises:
            UsageError: there is no such member, or no member would be left.
            SpaceError: the data does not fit on the other members; nothing was changed.
            LockedError: a writer has locked the volume.
            DeviceError: a device failed.
        """
        chosen = [
            member if isinstance(member, int) else split_uris(member)[0] for member in members
        ]
        self._local("change")
        with self._transaction("dlfs shrink") as transaction:
            report = shrink_volume(transaction, chosen, progress)
        self.refresh()
        return report
