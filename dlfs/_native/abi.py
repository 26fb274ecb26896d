"""The headers of libdlfs in ctypes: structures, constants and prototypes, in the headers' order.

``tests/unit/_native/test_abi.py`` compares every structure, field, constant and prototype with the
headers and with the built library. That is why this file is written by hand: ctypesgen writes 1,726
lines for the headers that this module mirrors in 480, without types for mypy
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
NVME_DATA_BYTES_MAX = 65536
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
CHANNEL_SAMPLES_MAX = 1 << 20
CLIENT_PARTS = 1
PERMUTATION_ROUNDS_MAX = 24
FILES_NOFOLLOW = 1
PATH_MALFORMED, PATH_UNSORTED, PATH_REPEATED, PATH_BELOW_SAMPLE, PATH_IS_DIRECTORY = 1, 2, 3, 4, 5
FILES_THREADS_MAX = 64


def fields(*groups: tuple[Any, str]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a structure from groups of one type: the type, and names by spaces."""
    return tuple((name, kind) for kind, names in groups for name in names.split())


def counters(structure: Structure) -> dict[str, int]:
    """Return the numbers in a structure by the names of its fields; arrays are left out."""
    found = {name: getattr(structure, name) for name, *_ in structure._fields_}
    return {name: value for name, value in found.items() if isinstance(value, int)}


_WORDS = {
    "none": None,
    "bool": c_bool,
    "int": c_int,
    "i64": c_int64,
    "u32": c_uint32,
    "u64": c_uint64,
    "text": c_char_p,
    "ptr": c_void_p,
    "out": POINTER(c_void_p),
}


def prototypes(
    functions: dict[str, str], structures: dict[str, Any]
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return result and argument types of functions by name, for ``library.bind``.

    Args:
        functions: the types of each function in words, as ``int: ptr Part* out``: the result, then
            the arguments. ``ptr`` is an opaque object, bytes, or an array by its address
            (``array.ctypes.data``); ``out`` is where a pointer is written; a word with a star is a
            pointer to that type.
        structures: those that the words name, by name.
    """

    def type_of(word: str) -> Any:
        if word.endswith("*"):
            return POINTER(type_of(word[:-1]))
        return _WORDS[word] if word in _WORDS else structures[word]

    split = {name: words.partition(":") for name, words in functions.items()}
    return {
        name: (type_of(result), tuple(map(type_of, arguments.split())))
        for name, (result, _, arguments) in split.items()
    }


class Permutation(Structure):
    """``dlfs_permutation``."""

    _fields_ = fields(
        (c_uint64, "size left right"),
        (c_uint32, "rounds reserved"),
        (c_uint64 * PERMUTATION_ROUNDS_MAX, "keys"),
    )


class Operation(Structure):
    """``dlfs_operation``."""

    _fields_ = fields(
        (c_void_p, "buffer"),
        (c_uint64, "offset_bytes"),
        (c_uint32, "length_bytes kind"),
        (c_uint64, "tag"),
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

    _fields_ = fields((c_uint32, "opcode nsid cdw10 cdw11 cdw12 cdw13 cdw14 cdw15"))


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


class PathRefusal(Structure):
    """``dlfs_path_refusal``."""

    _fields_ = fields((c_uint64, "index"), (c_uint32, "rule prefix_bytes is_directory reserved"))


class PathSource(Structure):
    """``dlfs_path_source``."""

    _fields_ = fields((c_void_p, "names offsets locations rows"), (c_uint64, "next count"))


class PathTarget(Structure):
    """``dlfs_path_target``."""

    _fields_ = fields(
        (c_void_p, "names offsets locations rows"), (c_uint64, "names_bytes capacity")
    )


class PathTableView(Structure):
    """``dlfs_path_table_view``."""

    _fields_ = fields((c_uint64, "count"), (c_void_p, "names offsets locations"))


class DirectoryConfig(Structure):
    """``dlfs_directory_config``."""

    _fields_ = fields(
        (c_uint64, "data_bytes"),
        (c_uint32, "chunk_bytes"),
        (c_uint8 * 16, "dataset_uuid"),
        (c_uint32, "reserved"),
    )


class DirectorySegment(Structure):
    """``dlfs_directory_segment``."""

    _fields_ = fields(
        (c_void_p, "entries names"),
        (c_uint64, "entries_bytes names_bytes sample_count sample_bytes empty_count hash_seed"),
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

    _fields_ = fields((c_uint32, "sample_bits block_samples interval_blocks has_references"))


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

    _fields_ = fields(
        (c_uint64, "position index"),
        (c_int32, "code"),
        (c_uint32, "member"),
        (c_uint64, "offset_bytes"),
        (c_uint32, "crc_expected crc_got"),
        (c_uint64, "part_offset_bytes part_length_bytes"),
    )


class Part(Structure):
    """``dlfs_part``."""

    _fields_ = fields((c_uint64, "index offset_bytes length_bytes"))


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


class ChannelConfig(Structure):
    """``dlfs_channel_config``."""

    _fields_ = fields(
        (c_void_p, "reader share"),
        (c_uint64, "copied_bytes_max"),
        (c_uint32, "samples_max batches_max flags reserved"),
        (c_void_p, "memory"),
    )


class ChannelStats(Structure):
    """``dlfs_channel_stats``."""

    _fields_ = fields(
        (c_uint64, "samples sample_bytes batches batches_out pinned_bytes copied_bytes"),
        (c_uint64, "copied_batches refusals failures wakes sleeps busy_ns memory_bytes"),
        (c_int32, "ended"),
        (c_uint32, "under_way"),
    )


class ClientStats(Structure):
    """``dlfs_client_stats``."""

    _fields_ = (("requests", c_uint64), ("wakes", c_uint64), ("sleeps", c_uint64))


PROTOTYPES = prototypes(
    {
        "dlfs_version": "u32:",
        "dlfs_strerror": "text: int",
        "dlfs_memory_map": "int: u64 out u32*",
        "dlfs_memory_unmap": "none: ptr u64",
        "dlfs_crc32c": "u32: u32 ptr u64",
        "dlfs_crc32c_portable": "u32: u32 ptr u64",
        "dlfs_crc32c_copy": "u32: u32 ptr ptr u64",
        "dlfs_crc32c_kind": "text:",
        "dlfs_crc32c_blocks": "none: ptr u64 u64 ptr",
        "dlfs_crc32c_combine": "none: ptr ptr ptr u64",
        "dlfs_path_hash": "u64: ptr u64 u64",
        "dlfs_permutation_init": "int: Permutation* u64 u64 u64",
        "dlfs_permutation_map": "int: Permutation* u64 u64 u64 ptr",
        "dlfs_permutation_invert": "int: Permutation* ptr u64 ptr",
        "dlfs_device_open_file": "int: text u32 u32 out",
        "dlfs_device_create_memory": "int: u64 u32 out",
        "dlfs_device_create_external": "int: ptr out",
        "dlfs_device_destroy": "int: ptr",
        "dlfs_device_size_bytes": "u64: ptr",
        "dlfs_device_block_bytes": "u32: ptr",
        "dlfs_device_kind": "text: ptr",
        "dlfs_device_flush": "int: ptr",
        "dlfs_queue_create": "int: ptr u32 out",
        "dlfs_queue_destroy": "none: ptr",
        "dlfs_queue_release": "none: ptr",
        "dlfs_queue_depth": "u32: ptr",
        "dlfs_queue_in_flight": "u32: ptr",
        "dlfs_queue_register": "int: ptr ptr u64",
        "dlfs_queue_submit": "int: ptr Operation* u32",
        "dlfs_queue_poll": "int: ptr Completion* u32 int",
        "dlfs_queue_descriptor": "int: ptr",
        "dlfs_queue_transfer": "int: ptr u32 ptr u64 u64 u32",
        "dlfs_device_open_nvme": "int: NvmeConfig* text u32 out",
        "dlfs_nvme_run": "int: ptr u32 NvmeCommand* ptr u32 u32 NvmeResult*",
        "dlfs_nvme_set_paths": "int: ptr text* u32* u32",
        "dlfs_nvme_authenticate": "int: ptr",
        "dlfs_device_descriptor": "int: ptr",
        "dlfs_device_incarnation": "int: ptr u64*",
        "dlfs_device_limit_writes": "int: ptr u64 u64",
        "dlfs_nvme_get_status": "int: ptr NvmeStatus*",
        "dlfs_directory_builder_create": "int: DirectoryConfig* out",
        "dlfs_directory_builder_destroy": "none: ptr",
        "dlfs_directory_builder_add_directories": "int: ptr ptr ptr u64 PathRefusal*",
        "dlfs_directory_builder_add": "int: ptr ptr ptr ptr ptr u64 PathRefusal*",
        "dlfs_directory_builder_resize": "int: ptr u64",
        "dlfs_directory_builder_finish": "int: ptr ptr u64 PathRefusal* DirectorySegment*",
        "dlfs_directory_open": "int: ptr u64 out",
        "dlfs_directory_open_parts": "int: ptr ptr ptr out",
        "dlfs_directory_close": "none: ptr",
        "dlfs_directory_attach_names": "int: ptr ptr u64",
        "dlfs_directory_verify": "int: ptr u32 ptr u64 u64*",
        "dlfs_directory_count": "u64: ptr",
        "dlfs_directory_data_bytes": "u64: ptr",
        "dlfs_directory_names_bytes": "u64: ptr",
        "dlfs_directory_locations": "ptr: ptr",
        "dlfs_directory_chunk_bytes": "u64: ptr",
        "dlfs_directory_parts": "ptr: ptr u64*",
        "dlfs_directory_verify_parts": "int: ptr u64*",
        "dlfs_directory_order": "int: ptr u64 u64 ptr",
        "dlfs_directory_rank_at": "u64: ptr u64",
        "dlfs_directory_find": "int: ptr ptr ptr u64 ptr",
        "dlfs_directory_lower_bound": "int: ptr ptr u64 u64*",
        "dlfs_directory_names": "i64: ptr u64 u64 ptr u64 ptr",
        "dlfs_directory_empty_count": "u64: ptr",
        "dlfs_directory_empty_names": "i64: ptr u64 u64 ptr u64 ptr",
        "dlfs_directory_empty_lower_bound": "int: ptr ptr u64 u64*",
        "dlfs_directory_names_of": "i64: ptr ptr u64 ptr u64 ptr",
        "dlfs_paths_sort": "int: ptr ptr u64 ptr",
        "dlfs_paths_merge": "i64: PathSource* u32 PathTarget* u32*",
        "dlfs_path_table_create": "int: out",
        "dlfs_path_table_destroy": "none: ptr",
        "dlfs_path_table_add": "int: ptr ptr ptr ptr u64 PathRefusal*",
        "dlfs_path_table_add_directory": "int: ptr ptr u64 PathRefusal*",
        "dlfs_path_table_find": "int: ptr ptr u64 u64*",
        "dlfs_path_table_get_view": "none: ptr PathTableView*",
        "dlfs_path_table_empty_directories": "u64: ptr ptr u64 ptr u64 u64*",
        "dlfs_path_table_shrink": "none: ptr",
        "dlfs_pack_order": "int: Packing* ptr u64 ptr u64",
        "dlfs_pack": "i64: Packing* ptr u64 ptr ptr ptr u64 ptr u64 u64 ptr ptr",
        "dlfs_pack_verify": "i64: ptr u64 ptr u64 u64 ptr",
        "dlfs_arena_create": "int: ArenaConfig* out",
        "dlfs_arena_destroy": "none: ptr",
        "dlfs_arena_get_stats": "none: ptr ArenaStats*",
        "dlfs_reader_create": "int: ReaderConfig* out",
        "dlfs_reader_destroy": "int: ptr",
        "dlfs_reader_share_bytes": "u64: ptr",
        "dlfs_reader_memory": "int: ptr out u64*",
        "dlfs_reader_read": "int: ptr ptr u64 out",
        "dlfs_batch_release": "none: ptr",
        "dlfs_batch_gather": "int: ptr ptr u64 ptr",
        "dlfs_reader_read_polling": "int: ptr ptr u64 u32 ptr ptr out",
        "dlfs_reader_begin": "int: ptr u64 out",
        "dlfs_pending_read_finish": "int: ptr u32 ptr ptr out",
        "dlfs_pending_read_cancel": "none: ptr",
        "dlfs_reader_get": "i64: ptr u64 ptr u64 u32",
        "dlfs_reader_load_part": "int: ptr Part* bool* Failure*",
        "dlfs_reader_read_part": "int: ptr Part* ptr Failure*",
        "dlfs_reader_send_part": "int: ptr Part* ptr ptr Failure*",
        "dlfs_reader_get_stats": "none: ptr ReaderStats*",
        "dlfs_reader_get_member_stats": "int: ptr u32 MemberStats*",
        "dlfs_reader_lost_members": "u64: ptr",
        "dlfs_reader_member_code": "int: ptr u32",
        "dlfs_sequence_create": "int: ptr u32 u32 u64 u64 u32 out",
        "dlfs_sequence_choose": "int: ptr Choice* out",
        "dlfs_sequence_destroy": "none: ptr",
        "dlfs_sequence_fill": "int: ptr u64 u64 u64 ptr",
        "dlfs_stream_create": "int: ptr StreamConfig* out",
        "dlfs_stream_next": "int: ptr u64 int out",
        "dlfs_stream_destroy": "none: ptr",
        "dlfs_stream_plan": "u32: ptr",
        "dlfs_files_read": "int: int ptr u64 ptr u64 ptr u64 u32 u32",
        "dlfs_files_stat": "int: int ptr u64 ptr u64 u32 u32",
        "dlfs_handle_process": "u32:",
        "dlfs_handle_free": "none: ptr ptr u32",
        "dlfs_handle_close": "none: ptr",
        "dlfs_handle_receive": "i64: int ptr u64 int** u32",
        "dlfs_ranges_read": "int: ptr u64 ptr u64 u32",
        "dlfs_lzf_decompress": "i64: text u64 ptr u64",
        "dlfs_szip_count": "i64: text u64 Szip* u64",
        "dlfs_reader_arena": "int: ptr int* u64*",
        "dlfs_share_create_within": "int: ptr u64 out",
        "dlfs_share_allow": "none: ptr u64",
        "dlfs_share_destroy": "none: ptr",
        "dlfs_channel_create": "int: ChannelConfig* out int* int*",
        "dlfs_channel_revoke": "none: ptr",
        "dlfs_channel_destroy": "none: ptr",
        "dlfs_channel_get_stats": "none: ptr ChannelStats*",
        "dlfs_arena_view_map": "int: int u64 out",
        "dlfs_arena_view_memory": "none: ptr out u64*",
        "dlfs_arena_view_unmap": "none: ptr",
        "dlfs_client_create": "int: ptr int int* u32 out",
        "dlfs_client_attach": "int: ptr ptr u32",
        "dlfs_client_destroy": "none: ptr",
        "dlfs_client_read": "int: ptr ptr u64 out",
        "dlfs_client_get": "i64: ptr u64 ptr u64 u32",
        "dlfs_client_read_part": "int: ptr Part* ptr Failure*",
        "dlfs_client_reader_stats": "int: ptr ReaderStats*",
        "dlfs_client_member_stats": "int: ptr u32 MemberStats*",
        "dlfs_client_member_code": "int: ptr u32",
        "dlfs_client_lost_members": "u64: ptr",
        "dlfs_client_samples_max": "u64: ptr",
        "dlfs_client_stream_open": "int: ptr StreamConfig*",
        "dlfs_client_stream_next": "int: ptr u64 int out",
        "dlfs_client_stream_close": "int: ptr",
        "dlfs_client_get_stats": "none: ptr ClientStats*",
    },
    globals(),
)
