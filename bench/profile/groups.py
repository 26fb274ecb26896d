"""The purpose of a place in the code: the rows of a profile.

The source file decides for libdlfs, the functions on the stack for the kernel, and the object for
other code. The first rule that matches counts.
"""

from __future__ import annotations

import re

from bench.profile.costs import Place

LIBDLFS = "libdlfs.so"

_DLFS_FILES = (
    ("CRC32C", r"crc32c|crc32intrin|[ensw]mmintrin|avx\d*f?intrin|vpclmul"),
    ("NVMe/TCP", r"^(nvme|protocol|security)/"),
    ("channel to the service", r"^channel/"),
    ("submission and completion", r"^device/|liburing|setup\.c|queue\.c|syscall"),
    ("directory", r"^directory/"),
    ("order", r"^sequence/|mix\.h"),
    ("look-ahead", r"^stream/"),
    ("planning", r"^reader/plan"),
    ("cache and memory", r"^arena/|^platform/memory"),
    ("batches", r"^(reader|handle)/|barrier|atomic|^platform/thread"),
)
_DLFS = tuple((f"libdlfs: {name}", re.compile(pattern)) for name, pattern in _DLFS_FILES)

_KERNEL_STACKS = (
    ("interrupts", r"^(asm_)?(sysvec_|common_interrupt)|^__irq_exit|^do_softirq"),
    ("page faults", r"exc_page_fault|do_user_addr_fault|^handle_mm_fault"),
    (
        "sleeping and waking",
        r"^__schedule$|^schedule|futex|^try_to_wake_up|_wake_up|^ep_|^do_epoll",
    ),
    ("network", r"^(tcp|ip|inet6?|sock|skb|net|dev|loopback)_|^__(tcp|sys_send|sys_recv)"),
    ("block device", r"blk_|submit_bio|virtblk|virtqueue|vring|^bio_|^__?blkdev|nvme_|scsi_"),
    ("FUSE", r"^fuse_|^__fuse"),
    ("direct reads of the file", r"iomap|dio_|_direct_IO|ext4|xfs_|btrfs|get_user_pages|gup_"),
    ("page cache", r"filemap|folio|page_cache|copy_page_to_iter|shmem"),
    ("io_uring", r"^_?_?io_|io_uring"),
    (
        "open, close, path walk",
        r"path_|do_sys_open|do_filp|link_|lookup|^_?_?fput|_close|dput|vfs_",
    ),
)
_KERNEL = tuple((f"kernel: {name}", re.compile(pattern)) for name, pattern in _KERNEL_STACKS)

_OBJECTS = (
    ("Python: ctypes", r"_ctypes|libffi"),
    ("Python: NumPy", r"_multiarray|_umath|numpy|openblas"),
    ("Python: interpreter", r"^libpython|^python|\.cpython-|^_queue|^_struct"),
    ("pyfuse3 and libfuse", r"pyfuse3|^__init__|libfuse"),
    ("C library", r"^libc[.-]|^libm[.-]|^ld-linux|pthread|^\[vdso\]|libgcc"),
)
_OTHERS = tuple((name, re.compile(pattern)) for name, pattern in _OBJECTS)

_COPIES = re.compile(r"mem(cpy|move|pcpy)|^__?mem")
_LOCKS = re.compile(r"pthread_(mutex|cond|rwlock)|lll_lock|futex|sem_")
_ALLOCATION = re.compile(r"malloc|^free|calloc|realloc|^_int_|cfree|tcache|sysmalloc|unlink_chunk")


def group_of(place: Place) -> str:
    """Return the row that a place belongs to."""
    if place.object == "kernel":
        return _of_kernel(place)
    if place.object == LIBDLFS:
        return _first(_DLFS, place.file, "libdlfs: other")
    group = _first(_OTHERS, place.object, "other")
    if group == "C library":
        for kind, pattern in (("copies", _COPIES), ("locks", _LOCKS), ("malloc", _ALLOCATION)):
            if pattern.search(place.function):
                return f"C library: {kind}"
    return group


def _of_kernel(place: Place) -> str:
    stack = (place.function, *place.callers)
    for name, pattern in _KERNEL:
        if any(pattern.search(function) for function in stack):
            return name
    return "kernel: other"


def _first(rules: tuple[tuple[str, re.Pattern[str]], ...], text: str, otherwise: str) -> str:
    return next((name for name, pattern in rules if pattern.search(text)), otherwise)
