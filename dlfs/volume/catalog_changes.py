"""Changes of a volume's catalog alone: removes, prunes and renames datasets.

Each change is one commit without new data. ``Volume`` inherits these methods and gives them its
catalog and its write lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from uuid import UUID

from dlfs.base.arguments import check_integer
from dlfs.base.wording import quote
from dlfs.errors import StaleError, UsageError
from dlfs.format.catalog import Records
from dlfs.format.names import DatasetName, new_dataset_name
from dlfs.store.info import DatasetInfo, describe_datasets
from dlfs.store.records import no_such_dataset
from dlfs.store.renaming import rename_records
from dlfs.store.transaction import Generation, Transaction


class CatalogChanges(ABC):
    """Base class of ``Volume`` with the methods that change the list of datasets."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """URI that opens the volume again."""

    @abstractmethod
    def refresh(self) -> None:
        """See the newest generation."""

    @abstractmethod
    def versions(self, name: str | bytes) -> list[DatasetInfo]:
        """List the versions of a dataset."""

    @abstractmethod
    def _find(self, name: str | bytes | None, version: int | None) -> Records:
        """Return the records of a dataset, by version; at least one."""

    @abstractmethod
    def _parse_request(self, name: str | bytes, version: int | None) -> DatasetName:
        """Parse a name, which may contain a version if none is given separately."""

    @abstractmethod
    def _transaction(self, holder: str) -> Transaction:
        """Lock the volume for a writer."""

    def _choose(self, transaction: Transaction, requested: DatasetName) -> Records:
        """Return the records that a name refers to in the locked volume; at least one.

        Raises:
            NotFoundError: another writer removed or renamed them before the volume was locked.
        """
        catalog = transaction.base.catalog
        chosen = catalog.find(requested.name, requested.version)
        if not chosen:
            raise no_such_dataset(catalog, requested.name, requested.version, where=self.uri)
        return chosen

    @abstractmethod
    def _refresh_after(self, committed: Generation | None) -> None:
        """See the newest generation; an error of this says that the change was made, if it was."""

    def remove(self, name: str | bytes, version: int | None = None) -> None:
        """Remove a dataset. Its space becomes free for writers; its readers then get StaleError.

        Args:
            name: name of the dataset, or ``NAME@VERSION``.
            version: version to remove; all by default.

        Raises:
            NotFoundError: there is no such dataset or version.
            LockedError: a writer has locked the volume; the message names it.
            DeviceError: a device failed.
        """
        self.refresh()
        self._find(name, version)
        requested = self._parse_request(name, version)
        with self._transaction(f"dlfs removing dataset {requested}") as transaction:
            committed = transaction.commit(removed=self._choose(transaction, requested))
        self._refresh_after(committed)

    def prune(
        self, name: str | bytes, *, keep: int, expected: Collection[UUID] | None = None
    ) -> list[DatasetInfo]:
        """Remove the older versions of a dataset, all in one commit.

        Args:
            name: name of the dataset.
            keep: number of newest versions that stay, >= 1.
            expected: UUIDs of the versions that the caller expects to be removed; if others would
                be, nothing is removed. By default any versions.

        Returns:
            The removed versions, by number; none if there are at most ``keep``.

        Raises:
            UsageError: ``keep`` is below 1, or the name is ``NAME@VERSION``.
            StaleError: other versions than the expected ones would be removed.
            NotFoundError, LockedError, DeviceError: as ``remove``.
        """
        action = f"prune dataset {quote(name)}"
        count = check_integer(keep, 1, None, option="keep", action=action)
        self.refresh()
        self._find(name, None)
        requested = self._parse_request(name, None)
        if requested.version is not None:
            raise UsageError(f"{action}: expected the name of a dataset without a version")
        with self._transaction(f"dlfs pruning dataset {requested}") as transaction:
            committed = None
            doomed = self._choose(transaction, requested)[:-count]
            uuids = {record.uuid for record in doomed}
            if expected is not None and uuids != set(expected):
                versions = ", ".join(str(record.version) for record in doomed) or "none"
                raise StaleError(
                    f"{action}: its versions changed meanwhile: expected to remove others than "
                    f"these now: {versions}; nothing was removed"
                )
            if doomed:
                committed = transaction.commit(removed=doomed)
        self._refresh_after(committed)
        return describe_datasets(doomed, transaction.geometry)

    def rename(self, name: str | bytes, new_name: str | bytes) -> list[DatasetInfo]:
        """Give a dataset another name, atomically. Programs that have it open read on.

        Its versions keep their numbers, unless the new name had such a number before: then all are
        raised, because ``NAME@VERSION`` never means other samples.

        Args:
            name: name of the dataset with all its versions; ``NAME@VERSION`` renames that one.
            new_name: the new name, which no dataset has; the rules are those of ``writer``.

        Returns:
            The renamed versions, by number.

        Raises:
            ExistsError: a dataset has the new name.
            UsageError: the new name is not allowed.
            NotFoundError, LockedError, DeviceError: as ``remove``.
        """
        raw = new_dataset_name(new_name)
        self.refresh()
        self._find(name, None)
        requested = self._parse_request(name, None)
        with self._transaction(f"dlfs renaming dataset {requested}") as transaction:
            base = transaction.base
            chosen = self._choose(transaction, requested)
            renamed = rename_records(base.catalog, base.superblock, chosen, raw)
            committed = transaction.commit(removed=chosen, added=renamed)
        self._refresh_after(committed)
        return self.versions(raw)
