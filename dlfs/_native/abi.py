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

OPEN_WRITE = 1
OPEN_BUFFERED = 2
ENGINE_AUTO, ENGINE_URING, ENGINE_THREADS = 0, 1, 2
OP_READ, OP_WRITE = 0, 1
NVME_PATHS_MAX = 4
NVME_NQN_BYTES_MAX = 223
NVME_DATA_BYTES_MAX = 4096
NVME_TEXT_BYTES = 512
NVME_HEADER_DIGEST, NVME_DATA_DIGEST = 1, 2
NVME_QUEUE_ADMIN, NVME_QUEUE_IO = 0, 1
NVME_DATA_NONE, NVME_DATA_IN, NVME_DATA_OUT = 0, 1, 2
NVME_WRITES_FREE = (1 << 63) - 1
NVME_ID_NONE, NVME_ID_EUI64, NVME_ID_NGUID, NVME_ID_UUID = 0, 1, 2, 3
ORDER_STORAGE, ORDER_GLOBAL, ORDER_CHUNK = 0, 1, 2
ORDER_LIST, ORDER_SELECTED, ORDER_WEIGHTED = 3, 4, 5
PLAN_AUTO, PLAN_DIRECT, PLAN_CHUNKS, PLAN_CHUNK_COPY = 0, 1, 2, 3
GET_CACHED = 1
MEMBER_ANY = (1 << 32) - 1
READER_SHARED = 1
PERMUTATION_ROUNDS_MAX = 24
FILES_NOFOLLOW = 1
FILES_THREADS_MAX = 64


class Permutation(Structure):
    """``dlfs_permutation``."""

    _fields_ = (
        ("size", c_uint64),
        ("left", c_uint64),
        ("right", c_uint64),
        ("rounds", c_uint32),
        ("reserved", c_uint32),
        ("keys", c_uint64 * PERMUTATION_ROUNDS_MAX),
    )


class FaultConfig(Structure):
    """``dlfs_fault_config``."""

    _fields_ = (
        ("seed", c_uint64),
        ("error_per_million", c_uint32),
        ("short_per_million", c_uint32),
        ("flip_per_million", c_uint32),
        ("stall_per_million", c_uint32),
        ("stall_ms", c_uint32),
        ("reorder", c_uint32),
        ("bad_first_bytes", c_uint64),
        ("bad_length_bytes", c_uint64),
        ("lost_from", c_uint64),
        ("lost_polls", c_uint32),
        ("reserved", c_uint32),
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

    _fields_ = (
        ("hosts", c_char_p * NVME_PATHS_MAX),
        ("ports", c_uint32 * NVME_PATHS_MAX),
        ("path_count", c_uint32),
        ("nsid", c_uint32),
        ("subsystem_nqn", c_char_p),
        ("host_nqn", c_char_p),
        ("host_id", c_uint8 * 16),
        ("digests", c_uint32),
        ("timeout_ms", c_uint32),
        ("connect_ms", c_uint32),
        ("keepalive_ms", c_uint32),
        ("reconnect_ms", c_uint32),
        ("busy_poll_us", c_uint32),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    )


class NvmeCommand(Structure):
    """``dlfs_nvme_command``."""

    _fields_ = (
        ("opcode", c_uint32),
        ("nsid", c_uint32),
        ("cdw10", c_uint32),
        ("cdw11", c_uint32),
        ("cdw12", c_uint32),
        ("cdw13", c_uint32),
        ("cdw14", c_uint32),
        ("cdw15", c_uint32),
    )


class NvmeResult(Structure):
    """``dlfs_nvme_result``."""

    _fields_ = (("value", c_uint64), ("status", c_uint32), ("reserved", c_uint32))


class NvmeStatus(Structure):
    """``dlfs_nvme_status``."""

    _fields_ = (
        ("reconnects", c_uint64),
        ("retries", c_uint64),
        ("timeouts", c_uint64),
        ("digest_errors", c_uint64),
        ("protocol_errors", c_uint64),
        ("connected", c_uint32),
        ("path", c_uint32),
        ("transfer_bytes_max", c_uint32),
        ("queue_count_max", c_uint32),
        ("write_cache", c_uint32),
        ("controller_id", c_uint32),
        ("id_kind", c_uint32),
        ("reserved", c_uint32),
        ("id", c_uint8 * 16),
        ("last_error", c_char * NVME_TEXT_BYTES),
    )


class DirectoryPlan(Structure):
    """``dlfs_directory_plan``."""

    _fields_ = (
        ("sample_count", c_uint64),
        ("entries_bytes", c_uint64),
        ("names_bytes", c_uint64),
        ("hash_seed", c_uint64),
    )


class Packing(Structure):
    """``dlfs_packing``."""

    _fields_ = (
        ("chunk_bytes", c_uint32),
        ("block_bytes", c_uint32),
        ("address", c_uint64),
        ("start", c_uint64),
        ("done_bytes", c_uint64),
        ("crc32c", c_uint32),
        ("under_way", c_uint32),
    )


class Extent(Structure):
    """``dlfs_extent``."""

    _fields_ = (("first_chunk", c_uint64), ("chunk_count", c_uint64))


class ReaderConfig(Structure):
    """``dlfs_reader_config``."""

    _fields_ = (
        ("devices", POINTER(c_void_p)),
        ("member_count", c_uint32),
        ("chunk_bytes", c_uint32),
        ("block_bytes", c_uint32),
        ("depth", c_uint32),
        ("data_offset_bytes", c_uint64),
        ("extents", POINTER(Extent)),
        ("extent_count", c_uint64),
        ("directory", c_void_p),
        ("memory_bytes", c_uint64),
        ("gap_bytes", c_uint64),
        ("retry_count", c_uint32),
        ("timeout_ms", c_uint32),
        ("flags", c_uint32),
        ("replicas", c_uint32),
        ("band_rows", c_uint64),
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
    )


class Part(Structure):
    """``dlfs_part``."""

    _fields_ = (
        ("index", c_uint64),
        ("offset_bytes", c_uint64),
        ("length_bytes", c_uint64),
        ("avoided_member", c_uint32),
        ("reserved", c_uint32),
    )


class Batch(Structure):
    """``dlfs_batch``."""

    _fields_ = (
        ("base", c_void_p),
        ("base_bytes", c_uint64),
        ("count", c_uint64),
        ("offsets", c_void_p),
        ("lengths", c_void_p),
        ("indices", c_void_p),
        ("failures", POINTER(Failure)),
        ("failure_count", c_uint64),
        ("lost_members", c_uint64),
    )


class ReaderStats(Structure):
    """``dlfs_reader_stats``."""

    _fields_ = (
        ("samples", c_uint64),
        ("sample_bytes", c_uint64),
        ("cache_hits", c_uint64),
        ("reads", c_uint64),
        ("read_bytes", c_uint64),
        ("checksum_errors", c_uint64),
        ("read_errors", c_uint64),
        ("retries", c_uint64),
        ("private_batches", c_uint64),
        ("memory_bytes", c_uint64),
        ("wait_ns", c_uint64),
        ("failovers", c_uint64),
        ("plan_ns", c_uint64),
        ("device_ns", c_uint64),
        ("verify_ns", c_uint64),
        ("rest_ns", c_uint64),
        ("copy_ns", c_uint64),
    )


LATENCY_BUCKETS = 24


class MemberStats(Structure):
    """``dlfs_member_stats``."""

    _fields_ = (
        ("reads", c_uint64),
        ("read_bytes", c_uint64),
        ("errors", c_uint64),
        ("queue_pairs", c_uint64),
        ("queue_pairs_max", c_uint64),
        ("latency_ns", c_uint64),
        ("latency", c_uint64 * LATENCY_BUCKETS),
    )


class Choice(Structure):
    """``dlfs_choice``."""

    _fields_ = (
        ("kind", c_uint32),
        ("reserved", c_uint32),
        ("seed", c_uint64),
        ("epoch", c_uint64),
        ("indices", c_void_p),
        ("weights", c_void_p),
        ("count", c_uint64),
        ("draws", c_uint64),
    )


class StreamConfig(Structure):
    """``dlfs_stream_config``."""

    _fields_ = (
        ("sequence", c_void_p),
        ("first", c_uint64),
        ("stride", c_uint64),
        ("count", c_uint64),
        ("group", c_uint64),
        ("group_stride", c_uint64),
        ("plan", c_uint32),
        ("reserved", c_uint32),
    )


class File(Structure):
    """``dlfs_file``."""

    _fields_ = (
        ("position", c_uint64),
        ("buffer_offset", c_uint64),
        ("length_bytes", c_uint64),
        ("modified_ns", c_int64),
        ("descriptor", c_int32),
        ("code", c_int32),
    )


STRUCTURES: dict[str, type[Structure]] = {
    "dlfs_permutation": Permutation,
    "dlfs_fault_config": FaultConfig,
    "dlfs_operation": Operation,
    "dlfs_completion": Completion,
    "dlfs_nvme_config": NvmeConfig,
    "dlfs_nvme_command": NvmeCommand,
    "dlfs_nvme_result": NvmeResult,
    "dlfs_nvme_status": NvmeStatus,
    "dlfs_directory_plan": DirectoryPlan,
    "dlfs_packing": Packing,
    "dlfs_extent": Extent,
    "dlfs_reader_config": ReaderConfig,
    "dlfs_failure": Failure,
    "dlfs_part": Part,
    "dlfs_batch": Batch,
    "dlfs_reader_stats": ReaderStats,
    "dlfs_member_stats": MemberStats,
    "dlfs_choice": Choice,
    "dlfs_stream_config": StreamConfig,
    "dlfs_file": File,
}

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
    "dlfs_path_hash": (c_uint64, (c_void_p, c_size_t, c_uint64)),
    "dlfs_permutation_init": (c_int, (POINTER(Permutation), c_uint64, c_uint64, c_uint64)),
    "dlfs_permutation_map": (
        c_int,
        (POINTER(Permutation), c_uint64, c_uint64, c_size_t, _U64S),
    ),
    "dlfs_permutation_invert": (c_int, (POINTER(Permutation), _U64S, c_size_t, _U64S)),
    "dlfs_device_open_file": (c_int, (c_char_p, c_uint32, c_uint32, _OUT)),
    "dlfs_device_create_memory": (c_int, (c_uint64, c_uint32, _OUT)),
    "dlfs_device_create_fault": (c_int, (c_void_p, POINTER(FaultConfig), _OUT)),
    "dlfs_device_fault_lose": (c_int, (c_void_p, c_uint32)),
    "dlfs_device_create_external": (c_int, (c_void_p, _OUT)),
    "dlfs_device_destroy": (c_int, (c_void_p,)),
    "dlfs_device_size_bytes": (c_uint64, (c_void_p,)),
    "dlfs_device_block_bytes": (c_uint32, (c_void_p,)),
    "dlfs_device_kind": (c_char_p, (c_void_p,)),
    "dlfs_device_flush": (c_int, (c_void_p,)),
    "dlfs_queue_create": (c_int, (c_void_p, c_uint32, _OUT)),
    "dlfs_queue_destroy": (None, (c_void_p,)),
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
    "dlfs_nvme_get_generation": (c_int, (c_void_p, POINTER(c_uint64))),
    "dlfs_nvme_limit_writes": (c_int, (c_void_p, c_uint64, c_uint64)),
    "dlfs_nvme_get_status": (c_int, (c_void_p, POINTER(NvmeStatus))),
    "dlfs_directory_plan_build": (c_int, (c_void_p, _U64S, c_uint64, POINTER(DirectoryPlan))),
    "dlfs_directory_build": (
        c_int,
        (
            POINTER(DirectoryPlan),
            c_void_p,
            _U64S,
            c_void_p,
            POINTER(c_uint8 * 16),
            c_uint64,
            c_void_p,
            c_void_p,
        ),
    ),
    "dlfs_directory_open": (c_int, (c_void_p, c_uint64, _OUT)),
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
        ),
    ),
    "dlfs_pack_verify": (
        c_int64,
        (
            POINTER(Packing),
            c_void_p,
            c_uint64,
            _U64S,
            c_uint64,
            c_void_p,
            c_uint64,
            c_uint64,
            c_void_p,
        ),
    ),
    "dlfs_reader_create": (c_int, (POINTER(ReaderConfig), _OUT)),
    "dlfs_reader_destroy": (c_int, (c_void_p,)),
    "dlfs_reader_read": (c_int, (c_void_p, _U64S, c_uint64, POINTER(POINTER(Batch)))),
    "dlfs_reader_read_apart": (c_int, (c_void_p, _U64S, c_uint64, POINTER(POINTER(Batch)))),
    "dlfs_batch_release": (None, (POINTER(Batch),)),
    "dlfs_batch_gather": (c_int, (POINTER(Batch), c_void_p, c_uint64, _U64S)),
    "dlfs_reader_read_awake": (
        c_int,
        (c_void_p, _U64S, c_uint64, c_uint32, c_void_p, c_void_p, POINTER(POINTER(Batch))),
    ),
    "dlfs_reader_get": (c_int64, (c_void_p, c_uint64, c_void_p, c_uint64, c_uint32)),
    "dlfs_reader_read_part": (c_int, (c_void_p, POINTER(Part), c_void_p, POINTER(Failure))),
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
    "dlfs_stream_next": (c_int, (c_void_p, c_uint64, c_int, POINTER(POINTER(Batch)))),
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
    "dlfs_ranges_read": (c_int, (c_void_p, c_uint64, c_void_p, c_uint64, c_uint32)),
}
