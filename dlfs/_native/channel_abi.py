"""Mirrors ``channel.h`` in ctypes: structures, constants and prototypes, in the header's order.

A test compares this file with the header, as it does for ``abi``.
"""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from dlfs._native.abi import (
    Failure,
    MemberStats,
    Part,
    ReaderStats,
    StreamConfig,
    fields,
)

CHANNEL_SAMPLES_MAX = 1 << 20
CLIENT_PARTS = 1


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


_OUT = POINTER(c_void_p)

PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dlfs_reader_arena": (c_int, (c_void_p, POINTER(c_int), POINTER(c_uint64))),
    "dlfs_share_create": (c_int, (c_uint64, _OUT)),
    "dlfs_share_create_within": (c_int, (c_void_p, c_uint64, _OUT)),
    "dlfs_share_allow": (None, (c_void_p, c_uint64)),
    "dlfs_share_destroy": (None, (c_void_p,)),
    "dlfs_share_pinned_bytes": (c_uint64, (c_void_p,)),
    "dlfs_channel_create": (c_int, (POINTER(ChannelConfig), _OUT, POINTER(c_int), POINTER(c_int))),
    "dlfs_channel_revoke": (None, (c_void_p,)),
    "dlfs_channel_destroy": (None, (c_void_p,)),
    "dlfs_channel_get_stats": (None, (c_void_p, POINTER(ChannelStats))),
    "dlfs_arena_view_map": (c_int, (c_int, c_uint64, _OUT)),
    "dlfs_arena_view_memory": (None, (c_void_p, _OUT, POINTER(c_uint64))),
    "dlfs_arena_view_unmap": (None, (c_void_p,)),
    "dlfs_client_create": (c_int, (c_void_p, c_int, POINTER(c_int), c_uint32, _OUT)),
    "dlfs_client_attach": (c_int, (c_void_p, c_void_p, c_uint32)),
    "dlfs_client_destroy": (None, (c_void_p,)),
    "dlfs_client_read": (c_int, (c_void_p, c_void_p, c_uint64, _OUT)),
    "dlfs_client_get": (c_int64, (c_void_p, c_uint64, c_void_p, c_uint64, c_uint32)),
    "dlfs_client_read_part": (c_int, (c_void_p, POINTER(Part), c_void_p, POINTER(Failure))),
    "dlfs_client_reader_stats": (c_int, (c_void_p, POINTER(ReaderStats))),
    "dlfs_client_member_stats": (c_int, (c_void_p, c_uint32, POINTER(MemberStats))),
    "dlfs_client_member_code": (c_int, (c_void_p, c_uint32)),
    "dlfs_client_lost_members": (c_uint64, (c_void_p,)),
    "dlfs_client_is_lost": (c_int, (c_void_p,)),
    "dlfs_client_samples_max": (c_uint64, (c_void_p,)),
    "dlfs_client_stream_open": (c_int, (c_void_p, POINTER(StreamConfig))),
    "dlfs_client_stream_next": (c_int, (c_void_p, c_uint64, c_int, _OUT)),
    "dlfs_client_stream_close": (c_int, (c_void_p,)),
    "dlfs_client_get_stats": (None, (c_void_p, POINTER(ClientStats))),
}
