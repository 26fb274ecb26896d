"""File systems by what they promise to granted writers: one host, or several.

Only the kernel of one host can tell that a writer has gone. A file system that several hosts mount
is refused, because a coordinator on another host would not see the locks of the writers that still
run. A type that is in neither table is refused too: whether hosts share it is not known.

Source: Linux, include/uapi/linux/magic.h; GNU coreutils, src/stat.c (``human_fstype``).
"""

from __future__ import annotations

import errno
import os
import stat

from dlfs._native.file_systems import file_system_type
from dlfs.errors import UsageError

LOCAL = {
    0xEF53: "ext4",
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0xF2F52010: "F2FS",
    0x2FC12FC1: "ZFS",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlayfs",
    0x3153464A: "JFS",
    0x52654973: "ReiserFS",
    0x3434: "NILFS",
    0x4D44: "FAT",
    0x2011BAB0: "exFAT",
    0x7366746E: "NTFS",
}
"""Names of the file systems of one host, by ``f_type``."""

SHARED = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB 2",
    0x0BD00BD0: "Lustre",
    0x00C36400: "CephFS",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x65735546: "FUSE",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x01021997: "9P",
    0x5346414F: "OpenAFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS",
    0x786F4256: "VirtualBox shared folders",
    0xBACBACBC: "VMware shared folders",
    0x61636673: "ACFS",
    0xA501FCF5: "VxFS",
    0xBEEFDEAD: "StorNext",
}
"""Names of the file systems that several hosts may mount, by ``f_type``."""


def check_one_host(descriptor: int, action: str) -> None:
    """Check that an open file is a disk, or lies on a file system of this host alone.

    Args:
        descriptor: descriptor of the file.
        action: what needs it, for the error.

    Raises:
        UsageError: several hosts may mount the file system, or it is unknown whether they may.
        OSError: the system does not answer.
    """
    if stat.S_ISBLK(os.fstat(descriptor).st_mode):
        return
    kind = file_system_type(descriptor)
    if kind in SHARED:
        raise UsageError(
            f"{action}: expected a file system of one host, got {SHARED[kind]}, which other hosts "
            "may mount: a writer that was lost there could not be told from one that ended"
        )
    if kind not in LOCAL:
        raise UsageError(
            f"{action}: expected a file system of one host, got one of type 0x{kind:08x}, of which "
            "it is unknown whether other hosts may mount it"
        )


def check_free_space(descriptor: int, more_bytes: int) -> None:
    """Refuse what cannot fit before a file is given more space.

    The kernel reserves all that is free before it refuses the rest, and other programs find no
    space meanwhile.

    Raises:
        OSError: ENOSPC, with the bytes that are free.
    """
    room = os.fstatvfs(descriptor)
    free_blocks = room.f_bavail if os.geteuid() else room.f_bfree  # some are root's alone
    free_bytes = free_blocks * room.f_frsize
    if room.f_blocks > 0 and more_bytes > free_bytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {free_bytes} bytes are free")
