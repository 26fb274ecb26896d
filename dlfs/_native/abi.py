"""The headers of libdlfs in ctypes: structures, constants and prototypes, in the headers' order.

``tests/unit/_native/test_abi.py`` compares every structure, field, constant and prototype with the
headers and with the built library. That is why this file is written by hand: ctypesgen writes 1,726
lines for the headers that this module and ``channel_abi`` mirror in 660, without types for mypy
and without the error codes and flags, whose macros it cannot evaluate.
"""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

VERSION = (0, 1, 0)

E_CHECKSUM = -10001
E_FORMAT = -10002
E_TRUNCATED = -10003
E_LOST = -10004
E_TIMEOUT = -10005
E_CLOSED = -10006
E_LIMIT = -10007
E_NOT_FOUND = -10008
E_END = -10009
E_PROTOCOL = -10010
E_DIGEST = -10011
E_SERVICE = -10012
E_AUTH = -10013

OPEN_WRITE = 1
OPEN_BUFFERED = 2
ENGINE_AUTO, ENGINE_URING, ENGINE_THREADS = 0, 1, 2
OP_READ, OP_WRITE = 0, 1
NVME_PATHS_MAX = 4
NVME_TEXT_BYTES = 512
NVME_DATA_BYTES_MAX = 4096
NVME_HEADER_DIGEST, NVME_DATA_DIGEST = 1, 2
NVME_QUEUE_ADMIN, NVME_QUEUE_IO = 0, 1
NVME_DATA_NONE, NVME_DATA_IN, NVME_DATA_OUT = 0, 1, 2
WRITES_FREE = (1 << 63) - 1
NVME_EVENT_BYTES = 128
NVME_ANA_NONE, NVME_ANA_OPTIMIZED, NVME_ANA_NON_OPTIMIZED = 0, 1, 2
NVME_ANA_INACCESSIBLE, NVME_ANA_PERSISTENT_LOSS, NVME_ANA_CHANGE = 3, 4, 15
NVME_ID_NONE, NVME_ID_EUI64, NVME_ID_NGUID, NVME_ID_UUID = 0, 1, 2, 3
ORDER_STORAGE, ORDER_GLOBAL, ORDER_CHUNK = 0, 1, 2
ORDER_LIST, ORDER_SELECTED, ORDER_WEIGHTED = 3, 4, 5
PLAN_AUTO, PLAN_DIRECT, PLAN_CHUNKS, PLAN_CHUNK_COPY = 0, 1, 2, 3
GET_CACHED = 1
ARENA_SHARED = 1
READER_PARTS = 1
PERMUTATION_ROUNDS_MAX = 24
FILES_NOFOLLOW = 1
FILES_THREADS_MAX = 64


def fields(*groups: tuple[Any, str]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a structure from groups of one type: the type, and names by spaces."""
    return tuple((name, kind) for kind, names in groups for name in names.split())


class Permutation(Structure):
    """``dlfs_permutation``."""

    _fields_ = fields(
        (c_uint64, "size left right"),
        (c_uint32, "rounds reserved"),
        (c_uint64 * PERMUTATION_ROUNDS_MAX, "keys"),
    )


class Operation(Structure):
    """``dlfs_operation``."""

    _fields_ = (
        ("buffer", c_void_p),
        ("offset_bytes", c_uint64),
        ("length_bytes", c_uint32),
        ("kind", c_uint32),
        ("tag", c_uint64),
    )


class Completion(Structure):
    """``dlfs_completion``."""

    _fields_ = (("tag", c_uint64), ("result", c_int64))


class NvmeConfig(Structure):
    """``dlfs_nvme_config``."""

    _fields_ = fields(
        (c_char_p * NVME_PATHS_MAX, "hosts"),
        (c_uint32 * NVME_PATHS_MAX, "ports"),
        (c_uint32, "path_count nsid"),
        (c_char_p, "subsystem_nqn host_nqn"),
        (c_uint8 * 16, "host_id"),
        (c_uint32, "digests timeout_ms connect_ms keepalive_ms reconnect_ms busy_poll_us flags"),
        (c_uint32, "reauth_s concat reserved"),
        (c_char_p, "dhchap_key dhchap_ctrl_key tls_psk"),
    )


class NvmeCommand(Structure):
    """``dlfs_nvme_command``."""

    _fields_ = fields(
        (c_uint32, "opcode nsid cdw10 cdw11 cdw12 cdw13 cdw14 cdw15"),
    )


class NvmeResult(Structure):
    """``dlfs_nvme_result``."""

    _fields_ = (("value", c_uint64), ("status", c_uint32), ("reserved", c_uint32))


class NvmeStatus(Structure):
    """``dlfs_nvme_status``."""

    _fields_ = fields(
        (c_uint64, "reconnects retries timeouts digest_errors protocol_errors"),
        (c_uint32, "connected path transfer_bytes_max queue_count_max write_cache controller_id"),
        (c_uint32, "id_kind reserved"),
        (c_uint8 * 16, "id"),
        (c_char * NVME_TEXT_BYTES, "last_error"),
        (c_uint64, "path_moves events namespace_events ana_events discovery_events health_events"),
        (c_uint64, "namespace_bytes"),
        (c_uint32, "write_protected ana_state ana_group health_warnings"),
        (c_char * NVME_EVENT_BYTES, "last_event"),
    )


class DirectoryContent(Structure):
    """``dlfs_directory_content``."""

    _fields_ = fields(
        (c_uint64, "count"),
        (c_void_p, "names offsets locations parts"),
        (c_uint64, "part_count data_bytes"),
        (c_void_p, "empty_names empty_offsets"),
        (c_uint64, "empty_count"),
        (c_uint32, "chunk_bytes"),
        (c_uint8 * 16, "dataset_uuid"),
    )


class DirectoryPlan(Structure):
    """``dlfs_directory_plan``."""

    _fields_ = fields(
        (c_uint64, "sample_count entries_bytes names_bytes hash_seed"),
    )


class Packing(Structure):
    """``dlfs_packing``."""

    _fields_ = fields(
        (c_uint32, "chunk_bytes block_bytes"),
        (c_uint64, "address start done_bytes"),
        (c_uint32, "crc32c under_way"),
    )


class Szip(Structure):
    """``dlfs_szip``."""

    _fields_ = fields(
        (c_uint32, "sample_bits block_samples interval_blocks has_references"),
    )


class Extent(Structure):
    """``dlfs_extent``."""

    _fields_ = (("first_chunk", c_uint64), ("chunk_count", c_uint64))


class ChunkGroup(Structure):
    """``dlfs_chunk_group``."""

    _fields_ = fields(
        (c_uint64, "first_chunk band_rows"),
        (c_uint32, "first_member member_count"),
    )


class ArenaConfig(Structure):
    """``dlfs_arena_config``."""

    _fields_ = fields((c_uint64, "memory_bytes"), (c_uint32, "chunk_bytes flags"))


class ArenaStats(Structure):
    """``dlfs_arena_stats``."""

    _fields_ = fields((c_uint64, "memory_bytes held_bytes readers"))


class ReaderConfig(Structure):
    """``dlfs_reader_config``."""

    _fields_ = fields(
        (POINTER(c_void_p), "devices"),
        (c_uint32, "member_count chunk_bytes block_bytes depth"),
        (c_uint64, "data_offset_bytes"),
        (POINTER(Extent), "extents"),
        (c_uint64, "extent_count"),
        (c_void_p, "directory arena"),
        (c_uint64, "memory_bytes gap_bytes"),
        (c_uint32, "retry_count timeout_ms flags replicas"),
        (c_uint64, "band_rows"),
        (POINTER(ChunkGroup), "groups"),
        (c_uint32, "group_count reserved"),
    )


class Failure(Structure):
    """``dlfs_failure``."""

    _fields_ = (
        ("position", c_uint64),
        ("index", c_uint64),
        ("code", c_int32),
        ("member", c_uint32),
        ("offset_bytes", c_uint64),
        ("crc_expected", c_uint32),
        ("crc_got", c_uint32),
        ("part_offset_bytes", c_uint64),
        ("part_length_bytes", c_uint64),
    )


class Part(Structure):
    """``dlfs_part``."""

    _fields_ = fields(
        (c_uint64, "index offset_bytes length_bytes"),
    )


class Batch(Structure):
    """``dlfs_batch``."""

    _fields_ = fields(
        (c_void_p, "base"),
        (c_uint64, "base_bytes count"),
        (c_void_p, "offsets lengths indices"),
        (POINTER(Failure), "failures"),
        (c_uint64, "failure_count lost_members"),
    )


class ReaderStats(Structure):
    """``dlfs_reader_stats``."""

    _fields_ = fields(
        (c_uint64, "samples sample_bytes cache_hits reads read_bytes checksum_errors read_errors"),
        (c_uint64, "retries private_batches held_bytes wait_ns failovers plan_ns device_ns"),
        (c_uint64, "verify_ns rest_ns copy_ns"),
    )


LATENCY_BUCKETS = 24


class MemberStats(Structure):
    """``dlfs_member_stats``."""

    _fields_ = fields(
        (c_uint64, "reads read_bytes errors queue_pairs queue_pairs_max latency_ns"),
        (c_uint64 * LATENCY_BUCKETS, "latency"),
    )


class Choice(Structure):
    """``dlfs_choice``."""

    _fields_ = fields(
        (c_uint32, "kind reserved"),
        (c_uint64, "seed epoch"),
        (c_void_p, "indices weights"),
        (c_uint64, "count draws"),
    )


class StreamConfig(Structure):
    """``dlfs_stream_config``."""

    _fields_ = fields(
        (c_void_p, "sequence"),
        (c_uint64, "first stride count group group_stride"),
        (c_uint32, "plan reserved"),
    )


class File(Structure):
    """``dlfs_file``."""

    _fields_ = fields(
        (c_uint64, "position buffer_offset length_bytes"),
        (c_int64, "modified_ns"),
        (c_int32, "descriptor code"),
    )


_OUT = POINTER(c_void_p)
_U64S = c_void_p  # uint64_t arrays are passed by address: numpy's .ctypes.data

# name: (restype, argtypes). Opaque objects and byte buffers are c_void_p.
PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dlfs_version": (c_uint32, ()),
    "dlfs_strerror": (c_char_p, (c_int,)),
    "dlfs_memory_map": (c_int, (c_size_t, _OUT, POINTER(c_uint32))),
    "dlfs_memory_unmap": (None, (c_void_p, c_size_t)),
    "dlfs_crc32c": (c_uint32, (c_uint32, c_void_p, c_size_t)),
    "dlfs_crc32c_portable": (c_uint32, (c_uint32, c_void_p, c_size_t)),
    "dlfs_crc32c_copy": (c_uint32, (c_uint32, c_void_p, c_void_p, c_size_t)),
    "dlfs_crc32c_kind": (c_char_p, ()),
    "dlfs_crc32c_blocks": (None, (c_void_p, c_size_t, c_size_t, c_void_p)),
    "dlfs_crc32c_combine": (None, (c_void_p, c_void_p, _U64S, c_uint64)),
    "dlfs_path_hash": (c_uint64, (c_void_p, c_size_t, c_uint64)),
    "dlfs_permutation_init": (c_int, (POINTER(Permutation), c_uint64, c_uint64, c_uint64)),
    "dlfs_permutation_map": (
        c_int,
        (POINTER(Permutation), c_uint64, c_uint64, c_size_t, _U64S),
    ),
    "dlfs_permutation_invert": (c_int, (POINTER(Permutation), _U64S, c_size_t, _U64S)),
    "dlfs_device_open_file": (c_int, (c_char_p, c_uint32, c_uint32, _OUT)),
    "dlfs_device_create_memory": (c_int, (c_uint64, c_uint32, _OUT)),
    "dlfs_device_create_external": (c_int, (c_void_p, _OUT)),
    "dlfs_device_destroy": (c_int, (c_void_p,)),
    "dlfs_device_size_bytes": (c_uint64, (c_void_p,)),
    "dlfs_device_block_bytes": (c_uint32, (c_void_p,)),
    "dlfs_device_kind": (c_char_p, (c_void_p,)),
    "dlfs_device_flush": (c_int, (c_void_p,)),
    "dlfs_queue_create": (c_int, (c_void_p, c_uint32, _OUT)),
    "dlfs_queue_destroy": (None, (c_void_p,)),
    "dlfs_queue_release": (None, (c_void_p,)),
    "dlfs_queue_depth": (c_uint32, (c_void_p,)),
    "dlfs_queue_in_flight": (c_uint32, (c_void_p,)),
    "dlfs_queue_register": (c_int, (c_void_p, c_void_p, c_size_t)),
    "dlfs_queue_submit": (c_int, (c_void_p, POINTER(Operation), c_uint32)),
    "dlfs_queue_poll": (c_int, (c_void_p, POINTER(Completion), c_uint32, c_int)),
    "dlfs_queue_descriptor": (c_int, (c_void_p,)),
    "dlfs_queue_transfer": (
        c_int,
        (c_void_p, c_uint32, c_void_p, c_uint64, c_uint64, c_uint32),
    ),
    "dlfs_device_open_nvme": (c_int, (POINTER(NvmeConfig), c_char_p, c_uint32, _OUT)),
    "dlfs_nvme_run": (
        c_int,
        (
            c_void_p,
            c_uint32,
            POINTER(NvmeCommand),
            c_void_p,
            c_uint32,
            c_uint32,
            POINTER(NvmeResult),
        ),
    ),
    "dlfs_nvme_set_paths": (
        c_int,
        (c_void_p, POINTER(c_char_p), POINTER(c_uint32), c_uint32),
    ),
    "dlfs_nvme_authenticate": (c_int, (c_void_p,)),
    "dlfs_device_incarnation": (c_int, (c_void_p, POINTER(c_uint64))),
    "dlfs_device_limit_writes": (c_int, (c_void_p, c_uint64, c_uint64)),
    "dlfs_nvme_get_status": (c_int, (c_void_p, POINTER(NvmeStatus))),
    "dlfs_directory_plan_build": (c_int, (POINTER(DirectoryContent), POINTER(DirectoryPlan))),
    "dlfs_directory_build": (
        c_int,
        (POINTER(DirectoryPlan), POINTER(DirectoryContent), c_void_p, c_void_p),
    ),
    "dlfs_directory_open": (c_int, (c_void_p, c_uint64, _OUT)),
    "dlfs_directory_open_parts": (c_int, (c_void_p, c_void_p, c_void_p, _OUT)),
    "dlfs_directory_close": (None, (c_void_p,)),
    "dlfs_directory_attach_names": (c_int, (c_void_p, c_void_p, c_uint64)),
    "dlfs_directory_verify": (
        c_int,
        (c_void_p, c_uint32, c_void_p, c_uint64, POINTER(c_uint64)),
    ),
    "dlfs_directory_count": (c_uint64, (c_void_p,)),
    "dlfs_directory_data_bytes": (c_uint64, (c_void_p,)),
    "dlfs_directory_names_bytes": (c_uint64, (c_void_p,)),
    "dlfs_directory_locations": (c_void_p, (c_void_p,)),
    "dlfs_directory_chunk_bytes": (c_uint64, (c_void_p,)),
    "dlfs_directory_parts": (c_void_p, (c_void_p, POINTER(c_uint64))),
    "dlfs_directory_verify_parts": (c_int, (c_void_p, POINTER(c_uint64))),
    "dlfs_directory_order": (c_int, (c_void_p, c_uint64, c_uint64, _U64S)),
    "dlfs_directory_rank_at": (c_uint64, (c_void_p, c_uint64)),
    "dlfs_directory_find": (c_int, (c_void_p, c_void_p, _U64S, c_uint64, _U64S)),
    "dlfs_directory_lower_bound": (
        c_int,
        (c_void_p, c_void_p, c_uint64, POINTER(c_uint64)),
    ),
    "dlfs_directory_names": (
        c_int64,
        (c_void_p, c_uint64, c_uint64, c_void_p, c_uint64, _U64S),
    ),
    "dlfs_directory_empty_count": (c_uint64, (c_void_p,)),
    "dlfs_directory_empty_names": (
        c_int64,
        (c_void_p, c_uint64, c_uint64, c_void_p, c_uint64, _U64S),
    ),
    "dlfs_directory_empty_lower_bound": (
        c_int,
        (c_void_p, c_void_p, c_uint64, POINTER(c_uint64)),
    ),
    "dlfs_directory_names_of": (
        c_int64,
        (c_void_p, c_void_p, c_uint64, c_void_p, c_uint64, _U64S),
    ),
    "dlfs_paths_sort": (c_int, (c_void_p, _U64S, c_uint64, _U64S)),
    "dlfs_pack_order": (c_int, (POINTER(Packing), c_void_p, c_uint64, _U64S, c_uint64)),
    "dlfs_pack": (
        c_int64,
        (
            POINTER(Packing),
            c_void_p,
            c_uint64,
            c_void_p,
            c_void_p,
            _U64S,
            c_uint64,
            c_void_p,
            c_uint64,
            c_uint64,
            c_void_p,
            c_void_p,
        ),
    ),
    "dlfs_pack_verify": (
        c_int64,
        (c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_void_p),
    ),
    "dlfs_arena_create": (c_int, (POINTER(ArenaConfig), _OUT)),
    "dlfs_arena_destroy": (None, (c_void_p,)),
    "dlfs_arena_get_stats": (None, (c_void_p, POINTER(ArenaStats))),
    "dlfs_reader_create": (c_int, (POINTER(ReaderConfig), _OUT)),
    "dlfs_reader_destroy": (c_int, (c_void_p,)),
    "dlfs_reader_share_bytes": (c_uint64, (c_void_p,)),
    "dlfs_reader_memory": (c_int, (c_void_p, _OUT, POINTER(c_uint64))),
    "dlfs_reader_read": (c_int, (c_void_p, _U64S, c_uint64, _OUT)),
    "dlfs_batch_release": (None, (c_void_p,)),
    "dlfs_batch_gather": (c_int, (c_void_p, c_void_p, c_uint64, _U64S)),
    "dlfs_reader_read_polling": (
        c_int,
        (c_void_p, _U64S, c_uint64, c_uint32, c_void_p, c_void_p, _OUT),
    ),
    "dlfs_reader_begin": (c_int, (c_void_p, c_uint64, _OUT)),
    "dlfs_pending_read_finish": (
        c_int,
        (c_void_p, c_uint32, c_void_p, c_void_p, _OUT),
    ),
    "dlfs_pending_read_cancel": (None, (c_void_p,)),
    "dlfs_reader_get": (c_int64, (c_void_p, c_uint64, c_void_p, c_uint64, c_uint32)),
    "dlfs_reader_load_part": (
        c_int,
        (c_void_p, POINTER(Part), POINTER(c_bool), POINTER(Failure)),
    ),
    "dlfs_reader_read_part": (c_int, (c_void_p, POINTER(Part), c_void_p, POINTER(Failure))),
    "dlfs_reader_send_part": (
        c_int,
        (c_void_p, POINTER(Part), c_void_p, c_void_p, POINTER(Failure)),
    ),
    "dlfs_reader_get_stats": (None, (c_void_p, POINTER(ReaderStats))),
    "dlfs_reader_get_member_stats": (c_int, (c_void_p, c_uint32, POINTER(MemberStats))),
    "dlfs_reader_lost_members": (c_uint64, (c_void_p,)),
    "dlfs_reader_member_code": (c_int, (c_void_p, c_uint32)),
    "dlfs_sequence_create": (
        c_int,
        (c_void_p, c_uint32, c_uint32, c_uint64, c_uint64, c_uint32, _OUT),
    ),
    "dlfs_sequence_choose": (c_int, (c_void_p, POINTER(Choice), _OUT)),
    "dlfs_sequence_destroy": (None, (c_void_p,)),
    "dlfs_sequence_fill": (c_int, (c_void_p, c_uint64, c_uint64, c_uint64, _U64S)),
    "dlfs_stream_create": (c_int, (c_void_p, POINTER(StreamConfig), _OUT)),
    "dlfs_stream_next": (c_int, (c_void_p, c_uint64, c_int, _OUT)),
    "dlfs_stream_destroy": (None, (c_void_p,)),
    "dlfs_stream_plan": (c_uint32, (c_void_p,)),
    "dlfs_files_read": (
        c_int,
        (
            c_int,
            c_void_p,
            c_uint64,
            c_void_p,
            c_uint64,
            c_void_p,
            c_uint64,
            c_uint32,
            c_uint32,
        ),
    ),
    "dlfs_files_stat": (
        c_int,
        (c_int, c_void_p, c_uint64, c_void_p, c_uint64, c_uint32, c_uint32),
    ),
    "dlfs_handle_process": (c_uint32, ()),
    "dlfs_handle_free": (None, (c_void_p, c_void_p, c_uint32)),
    "dlfs_handle_close": (None, (c_void_p,)),
    "dlfs_handle_receive": (
        c_int64,
        (c_int, c_void_p, c_size_t, POINTER(POINTER(c_int)), c_uint32),
    ),
    "dlfs_ranges_read": (c_int, (c_void_p, c_uint64, c_void_p, c_uint64, c_uint32)),
    "dlfs_lzf_decompress": (c_int64, (c_char_p, c_uint64, c_void_p, c_uint64)),
    "dlfs_szip_count": (c_int64, (c_char_p, c_uint64, POINTER(Szip), c_uint64)),
}
