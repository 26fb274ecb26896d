"""Makes a new volume on files, disks and memory devices.

Existing data is protected. A device with a volume, or with bytes other than zero where a volume
would begin or end, is refused unless ``force`` is given. A device that the system uses (mounted,
swap, part of a RAID) is always refused, and so is one that a process has open, such as a mount or a
reader. The old superblocks are overwritten first. Then generation 1 is committed like any other.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np

from dlfs._native.checksums import crc32c
from dlfs.base.units import MIB
from dlfs.base.wording import quote
from dlfs.block import (
    BlockDevice,
    FileDevice,
    FileUri,
    NvmeTcpDiscoverUri,
    is_lock_record,
    parse_uri,
)
from dlfs.errors import DeviceError, DlfsError, ExistsError, LockedError, UsageError
from dlfs.format.catalog import Catalog, encode_catalog
from dlfs.format.constants import (
    BLOCK_BYTES_DEFAULT,
    CHUNK_BYTES_DEFAULT,
    DATA_OFFSET_BYTES_MIN,
    JOINING_BYTES,
    JOINING_OFFSET_BYTES,
    LEASE_BYTES,
    LEASE_OFFSET_BYTES,
    LOCATION_RECORD_BYTES_MAX,
    LOCATION_RECORD_OFFSET_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_MAGIC,
)
from dlfs.format.geometry import ChunkRun, Geometry, superblock_offsets
from dlfs.format.superblock import Superblock
from dlfs.store.chunk_writer import ChunkWriter
from dlfs.store.fencing import imports_by_workers
from dlfs.store.info import VolumeInfo, describe_volume
from dlfs.store.locking import lock_members
from dlfs.store.members import (
    Member,
    Members,
    check_superblock_fits,
    close_devices,
    open_devices,
    read_copies,
    split_uris,
)
from dlfs.store.open_files import refuse_open
from dlfs.store.transaction import flush_all, load_generation, now_ns, write_superblocks

PROBED_BYTES = 1 * MIB
"""Length over which an empty device has zeros at its beginning and its end, in bytes."""
SECTOR_BYTES = 512
"""Bytes that every device writes completely or not at all."""
_HOW_TO_OVERWRITE = "force=True overwrites it"


def format_volume(
    members: Members,
    *,
    size_bytes: int | None = None,
    chunk_bytes: int = CHUNK_BYTES_DEFAULT,
    block_bytes: int = BLOCK_BYTES_DEFAULT,
    label: str = "",
    replicas: int = 1,
    force: bool = False,
) -> VolumeInfo:
    """Make a volume.

    Args:
        members: URIs of 1 to 64 block devices, in the order of their numbers, or one text with
            commas.
        size_bytes: size of each member that is a new or empty file.
        chunk_bytes: unit of layout and of large reads: a power of two, 4 KiB to 64 MiB.
        block_bytes: unit of I/O: a power of two, 512 B to 64 KiB, a multiple of every device's
            block.
        label: human-readable name, up to 64 bytes of UTF-8.
        replicas: copies of each chunk on different members, 1 to 4, at most the number of members.
            With 2, any one member can be lost and all samples can still be read.
        force: True to overwrite a volume or other data on the devices.

    Returns:
        The new volume.

    Raises:
        ExistsError: a device holds data, and ``force`` was not given.
        UsageError: sizes or members are not possible, or the system uses a device.
        LockedError: a writer has locked a member, or a process of this machine has it open.
        SpaceError: too little space for a new file.
        DeviceError: a device failed.
    """
    uris = split_uris(members)
    _check_replicas(uris, replicas)
    made: list[Path] = []
    devices: list[BlockDevice] = []
    try:
        for uri in uris:
            parsed = parse_uri(uri)
            if force and isinstance(parsed, FileUri) and Path(parsed.path).exists():
                refuse_open(Path(parsed.path), f"format {uri}")
            prepare_file(uri, size_bytes, force=force, made=made)
        devices = open_devices(uris, writable=True)
        checked = [] if force else devices
        for device in checked:  # before the lock leaves a record where data may be
            check_empty(device, "format")
        lock_members(devices, "dlfs format")
        for device in checked:
            check_empty(device, "format")
        if force:
            _check_no_workers(devices)
        sizes = [device.size_bytes for device in devices]
        geometry = Geometry.for_members(sizes, chunk_bytes, block_bytes, replicas)
        info = _format_devices(devices, geometry, label)
    except BaseException:
        close_devices(devices)
        for path in made:
            path.unlink(missing_ok=True)
        raise
    close_devices(devices)
    return info


def _check_no_workers(devices: Sequence[BlockDevice]) -> None:
    """Refuse shared devices to which workers of an import may be writing, without the lock.

    Raises:
        LockedError: there are some, as far as the devices are a volume that can be read.
    """
    if not all(device.grants_expire for device in devices):
        return  # on files, programs that have them open are refused
    try:
        catalog = load_generation(devices).catalog
    except DlfsError:
        return
    for record in imports_by_workers(catalog.unfinished):
        if record.granted_runs:
            raise LockedError(
                f"format {devices[0].uri}: expected no workers of an import that may write to it, "
                f"got those of {quote(record.name)}: end it, and then free it with 'dlfs import "
                "--abandon'"
            )


def _check_replicas(uris: Sequence[str], replicas: int) -> None:
    """Refuse more copies than there are devices, before any file is made.

    Raises:
        UsageError: there are too few devices.
    """
    if replicas > len(uris):
        devices = "1 device" if len(uris) == 1 else f"{len(uris)} devices"
        raise UsageError(
            f"format {','.join(uris)}: {replicas} replicas need {replicas} devices or more, got "
            f"{devices}; name them with commas between: a.img,b.img"
        )


def prepare_file(uri: str, size_bytes: int | None, *, force: bool, made: list[Path]) -> None:
    """Create the file that a URI names, or resize an empty one; refuse disks in use.

    Args:
        uri: URI of the device; other devices than files and disks are ignored.
        size_bytes: size of a new or empty file.
        force: True to resize a file that is not empty.
        made: list to which a new file is appended.

    Raises:
        UsageError: there is no such file, and no size to create it with; or the system uses the
            disk.
        ExistsError: the file has another size, and is not empty.
        SpaceError: too little space.
        DeviceError: the disk cannot be inspected.
    """
    parsed = parse_uri(uri)
    if isinstance(parsed, NvmeTcpDiscoverUri):
        raise UsageError(
            f"format {uri}: expected the URI of each member, of those that 'dlfs discover' lists, "
            "got one that means all of them"
        )
    if not isinstance(parsed, FileUri):
        return
    path = Path(parsed.path)
    if not path.exists():
        if size_bytes is None:
            raise UsageError(
                f"format {uri}: there is no such file; with a size it is made, such as "
                "size_bytes=2**30"
            )
        FileDevice.create(parsed.path, size_bytes).close()
        made.append(path)
        return
    status = path.stat()
    if stat.S_ISBLK(status.st_mode):
        _check_unused(uri, path, status.st_rdev)
    elif stat.S_ISREG(status.st_mode) and size_bytes is not None:
        _resize(uri, path, status.st_size, size_bytes, force=force)


def _resize(uri: str, path: Path, size_now: int, size_bytes: int, *, force: bool) -> None:
    size_bytes -= size_bytes % SUPERBLOCK_BYTES
    if size_now == size_bytes:
        return
    if size_now and not force:
        raise ExistsError(
            f"format {uri}: expected a new file or one of {size_bytes} bytes, got {size_now}; "
            f"{_HOW_TO_OVERWRITE}"
        )
    os.truncate(path, size_bytes)


def _check_unused(uri: str, path: Path, number: int) -> None:
    """Refuse a disk that is mounted, or for which open(2) with O_EXCL fails."""
    name = f"{os.major(number)}:{os.minor(number)}"
    partitions = Path(f"/sys/dev/block/{name}").glob("*/dev")
    own = {name, *(path.read_text().strip() for path in partitions)}
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    mounted = own & {line.split()[2] for line in mounts}
    if mounted:
        raise UsageError(
            f"format {uri}: the system uses it: {', '.join(sorted(mounted))} is mounted"
        )
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise UsageError(
                f"format {uri}: the system uses it, as swap or part of another device"
            ) from error
        raise DeviceError(f"format {uri}: {error.strerror}", error.errno or errno.EIO) from error


def check_empty(device: BlockDevice, action: str) -> None:
    """Check that a device has no data where a volume would begin or end.

    Args:
        device: device to be overwritten.
        action: action for error messages.

    Raises:
        ExistsError: it has a volume, or bytes other than zero.
    """
    for copy in read_copies(device):
        if copy.superblock is not None:
            raise ExistsError(
                f"{action} {device.uri}: it is a member of volume {copy.superblock.volume_uuid} "
                f"already; {_HOW_TO_OVERWRITE}"
            )
    length = min(PROBED_BYTES, device.size_bytes)
    for offset in (0, device.size_bytes - length):
        data = _without_record(device.read(offset, length), offset)
        if data != bytes(len(data)):
            raise ExistsError(
                f"{action} {device.uri}: expected an empty device, got data between bytes {offset} "
                f"and {offset + length}; {_HOW_TO_OVERWRITE}"
            )


def _without_record(data: bytes, offset_bytes: int) -> bytes:
    """Remove a lock's record from some bytes; locking itself checks that record."""
    start = LEASE_OFFSET_BYTES - offset_bytes
    if start < 0 or not is_lock_record(data[start : start + LEASE_BYTES]):
        return data
    return data[:start] + data[start + LEASE_BYTES :]


def has_other_data(device: BlockDevice, *, joining: bool) -> bool:
    """Return True if a device has data before its chunks that no DLFS volume has there.

    Superblocks may be zeros, or damaged as a crash leaves them.

    Args:
        device: the device.
        joining: True if the device was being added when it was left. Its first superblocks are
            written over zeros then, so the first sector of one may still be zeros.
    """
    data = bytearray(device.read(0, min(DATA_OFFSET_BYTES_MIN, device.size_bytes)))
    for offset in superblock_offsets(device.size_bytes)[:2]:
        sector = data[offset : offset + SECTOR_BYTES]
        if sector.startswith(SUPERBLOCK_MAGIC) or (joining and not any(sector)):
            data[offset : offset + SUPERBLOCK_BYTES] = bytes(SUPERBLOCK_BYTES)
    for offset, length in (
        (LEASE_OFFSET_BYTES, LEASE_BYTES),
        (JOINING_OFFSET_BYTES, JOINING_BYTES),
        (LOCATION_RECORD_OFFSET_BYTES, LOCATION_RECORD_BYTES_MAX),
    ):
        data[offset : offset + length] = bytes(length)
    return data != bytes(len(data))


def check_blocks(device: BlockDevice, block_bytes: int, action: str) -> None:
    """Check that a device can be a member of a volume with blocks of this size.

    Raises:
        UsageError: the block size of the device does not divide it, or that of a superblock.
    """
    check_superblock_fits(device, action)
    if block_bytes % device.block_bytes:
        raise UsageError(
            f"{action} {device.uri}: expected a device block that divides {block_bytes} bytes, "
            f"got {device.block_bytes}"
        )


def _format_devices(devices: Sequence[BlockDevice], geometry: Geometry, label: str) -> VolumeInfo:
    for device in devices:
        check_blocks(device, geometry.block_bytes, "format")
    superblock, catalog = _first_generation(geometry, devices[0].size_bytes, label)
    fresh = [
        Member(i, superblock.member_uuids[i], device, device.size_bytes, ())
        for i, device in enumerate(devices)
    ]
    for device in devices:
        wipe(device)
    flush_all(devices)
    runs = list(superblock.catalog_runs)
    with ChunkWriter(devices, geometry, lambda _: runs.pop(0)) as writer:
        writer.write_parts([np.frombuffer(catalog, np.uint8)])
        writer.drain()
    flush_all(devices)
    write_superblocks(fresh, superblock)
    return describe_volume(load_generation(devices))


def _first_generation(
    geometry: Geometry, member_bytes: int, label: str
) -> tuple[Superblock, bytes]:
    volume_uuid = uuid4()
    free = ChunkRun(1, geometry.chunk_total - 1)
    catalog = encode_catalog(Catalog.of(1, volume_uuid, (), (free,)))
    superblock = Superblock(
        volume_uuid=volume_uuid,
        member_uuids=tuple(uuid4() for _ in range(geometry.member_count)),
        member_number=0,
        member_bytes=member_bytes,
        geometry=geometry,
        generation=1,
        created_ns=now_ns(),
        catalog_runs=(ChunkRun(0, 1),),
        catalog_bytes=len(catalog),
        catalog_crc32c=crc32c(catalog),
        label=label,
    )
    return superblock, catalog


def wipe(device: BlockDevice) -> None:
    """Overwrite old superblocks with zeros; unlocking removes the lock's record."""
    for offset in superblock_offsets(device.size_bytes):
        device.write(offset, bytes(SUPERBLOCK_BYTES))
