"""Loads the directories of datasets from the devices of a volume.

The entries are read at once, the names when they are first needed. By then the dataset may have
been moved to other chunks, or removed: names are read where the newest generation has them.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from dlfs.base.closing import Uses
from dlfs.block import open_device
from dlfs.connection.identity import DatasetIdentity
from dlfs.directory import DirectoryIdentity, DirectorySizes, FrozenDirectory, load_directory
from dlfs.directory.sharing import SHARED_ROOT
from dlfs.errors import DeviceError, DlfsError, FormatError, UsageError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import DataSpace
from dlfs.format.paths import display
from dlfs.store.chunk_reader import CopyOrder, copy_orders, read_into
from dlfs.store.members import Opener, describe_swapped
from dlfs.store.newest import is_moved, newest_generation
from dlfs.store.transaction import Generation


def _read_moved(
    opened: Generation,
    record: DatasetRecord,
    opener: Opener,
    read: Callable[[Generation, DatasetRecord], None],
) -> bool:
    """Read a directory where it is now, unless it is where it was when it was opened.

    Args:
        opened: generation at which the dataset was opened.
        record: record of the dataset in it.
        opener: function that opens further members.
        read: reads the directory of a record.

    Returns:
        True if the dataset was moved; the directory has been read.

    Raises:
        StaleError: the newest generation no longer has the dataset, or a device holds another
            volume now.
        DlfsError: the same errors as ``load_generation``.
    """
    identity = DatasetIdentity.of(record, opened.superblock.volume_uuid)
    try:
        with newest_generation(opened, opener) as newest:
            found = newest.catalog.find_uuid(record.uuid)
            if found is None:
                raise identity.missing_from(newest.devices)
            moved = is_moved(opened, record, newest, found)
            if moved:
                read(newest, found)
            return moved
    except UsageError:
        swapped = describe_swapped(opened.devices, opened.superblock.volume_uuid)
        if swapped is None:
            raise
        raise identity.stale(swapped) from None


def load_segment(
    generation: Generation,
    record: DatasetRecord,
    *,
    shared: bool = True,
    locked: bool = False,
    opener: Opener = open_device,
    uses: Uses | None = None,
) -> FrozenDirectory:
    """Load a dataset's directory.

    Args:
        generation: generation with the open devices.
        record: catalog record of the dataset.
        shared: use the copy of other processes of the node, if any; otherwise read the media.
        locked: True if no writer can remove or move the dataset meanwhile; then this is not
            checked.
        opener: function that opens members that the volume gets later.
        uses: calls under way that use the devices; reading the names becomes one of them.

    Raises:
        FormatError: the directory is malformed (ChecksumError if its checksum is wrong). The
            message names dataset, member and offset.
        StaleError: the dataset was removed meanwhile.
        DeviceError: a read failed.
    """
    space = DataSpace(generation.geometry, record.directory_runs)
    member, offset_bytes = space.resolve(0)
    label = (
        f"the directory of dataset {display(record.name)!r} version {record.version}, "
        f"on {generation.devices[member].uri} from byte {offset_bytes} on"
    )

    def read_part(choice: CopyOrder, address: int, memory: memoryview) -> None:
        part = np.frombuffer(memory, np.uint8)

        def read(source: Generation, found: DatasetRecord) -> None:
            space = DataSpace(source.geometry, found.directory_runs)
            read_into(source.sources, space, address, part, choice)

        if locked or not address:
            read(generation, record)
            return
        # Names are read on first use; by then another dataset may have the chunks.
        problem: DlfsError | None = None
        try:
            read(generation, record)
        except (DeviceError, FormatError) as error:
            problem = error
        moved = _read_moved(generation, record, opener, read)
        if problem is not None and not moved:
            raise problem

    readers = [partial(read_part, choice) for choice in copy_orders(generation.geometry)]
    try:
        directory = load_directory(
            DirectoryIdentity(generation.superblock.volume_uuid, record.uuid, label),
            DirectorySizes(record.entries_bytes, record.names_bytes),
            readers[0],
            others=readers[1:],
            root=SHARED_ROOT if shared else None,
            uses=uses,
        )
    except FormatError:
        if not locked and _read_moved(generation, record, opener, lambda _newest, _found: None):
            raise DatasetIdentity.of(record).moved() from None
        raise
    expected = record.sample_count, record.data_bytes, generation.geometry.chunk_bytes
    got = len(directory), directory.data_bytes, directory.chunk_bytes
    if got != expected:
        directory.close()
        raise FormatError(
            f"open {label}: expected {expected[0]} samples in {expected[1]} bytes in chunks of "
            f"{expected[2]}, got {got[0]} in {got[1]} in chunks of {got[2]}"
        )
    return directory
