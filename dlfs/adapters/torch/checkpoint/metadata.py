"""The metadata of a checkpoint as bytes: torch's ``Metadata`` in MessagePack, without pickle.

torch's own form is a pickle: the writer of it chooses what a program runs that loads it. A volume
may come from anywhere, so this form holds names and numbers only. Decoding checks their
types, and that the pieces of each tensor have the bytes that its type and shape need.

Not all of torch's ``Metadata`` can be stored: ``planner_data`` is that of torch's own planners, the
path in the state of each flattened name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dlfs.base.wording import quote
from dlfs.errors import FormatError, UsageError
from dlfs.ingest.references import CHECKPOINT_FORMAT

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Piece(NamedTuple):
    """The location of some stored bytes."""

    source: UUID
    """UUID of the version of the ``:shards`` dataset."""
    sample: int
    """Index of the sample."""
    length_bytes: int
    """Length of the sample in bytes."""
    crc32c: int
    """CRC32C of the bytes."""
    digest: bytes
    """SHA-256 of the bytes if a save has shared them already, else empty."""


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """A ``Piece`` whose source is a number in ``_Metadata.sources``."""

    source: Count
    sample: Count
    length_bytes: Count
    crc32c: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    digest: bytes


class _Item(msgspec.Struct, frozen=True, array_like=True):
    """A stored shard of a tensor, or an object."""

    name: str
    offset: tuple[Count, ...] | None
    index: Count | None
    pieces: tuple[_Piece, ...]


class _Chunk(msgspec.Struct, frozen=True, array_like=True):
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    layout: str
    memory_format: str
    requires_grad: bool
    pin_memory: bool
    size: tuple[Count, ...]
    chunks: tuple[_Chunk, ...]


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    format: int
    sources: tuple[UUID, ...]
    tensors: dict[str, _Tensor]
    objects: tuple[str, ...]
    items: tuple[_Item, ...]
    paths: dict[str, tuple[str | Count, ...]] | None
    """Path in the state of each flattened name; None if the state was not flattened."""
    checkpoint_id: str
    save_id: str
    version: str | None


# ---- encoding ------------------------------------------------------------------------------------


def encode(metadata: Metadata) -> bytes:
    """Encode torch's ``Metadata``, whose ``storage_data`` has the pieces of each item.

    Raises:
        UsageError: a planner of the caller added something that cannot be stored.
    """
    pieces = [piece for item in metadata.storage_data.values() for piece in item]
    numbers = {uuid: n for n, uuid in enumerate(sorted({piece.source for piece in pieces}))}
    described = metadata.state_dict_metadata
    tensors = {n: s for n, s in described.items() if isinstance(s, TensorStorageMetadata)}
    objects = {n for n, stored in described.items() if isinstance(stored, BytesStorageMetadata)}
    if len(tensors) + len(objects) < len(described):
        name = min(described.keys() - tensors.keys() - objects)
        raise _unsupported(f"metadata of {quote(name)}", described[name])
    meta = metadata.storage_meta or StorageMeta()
    return msgspec.msgpack.encode(
        _Metadata(
            format=CHECKPOINT_FORMAT,
            sources=tuple(numbers),
            tensors={name: _encode_tensor(stored) for name, stored in tensors.items()},
            objects=tuple(objects),
            items=tuple(
                _encode_item(index, item, numbers) for index, item in metadata.storage_data.items()
            ),
            paths=_encode_paths(metadata.planner_data),
            checkpoint_id=str(meta.checkpoint_id),
            save_id=str(meta.save_id),
            version=getattr(metadata, "version", None),  # torch 2.7 and newer
        )
    )


def _unsupported(what: str, got: object) -> UsageError:
    return UsageError(
        f"save a checkpoint: expected {what} as torch's own planners make it, "
        f"got {type(got).__qualname__}"
    )


def _encode_tensor(stored: TensorStorageMetadata) -> _Tensor:
    properties = stored.properties
    return _Tensor(
        dtype=_name(properties.dtype),
        layout=_name(properties.layout),
        memory_format=_name(properties.memory_format),
        requires_grad=properties.requires_grad,
        pin_memory=properties.pin_memory,
        size=tuple(stored.size),
        chunks=tuple(_Chunk(tuple(one.offsets), tuple(one.sizes)) for one in stored.chunks),
    )


def _name(constant: object) -> str:
    """Return the name of a constant of torch: ``float32`` for ``torch.float32``."""
    return str(constant).removeprefix("torch.")


def _encode_item(
    index: MetadataIndex, pieces: Iterable[Piece], numbers: Mapping[UUID, int]
) -> _Item:
    offset = None if index.offset is None else tuple(index.offset)
    stored = tuple(_Piece(numbers[piece.source], *piece[1:]) for piece in pieces)
    return _Item(index.fqn, offset, index.index, stored)


def _encode_paths(planner_data: Any) -> dict[str, tuple[str | int, ...]] | None:
    if planner_data is None:
        return None
    try:
        return msgspec.convert(planner_data, dict[str, tuple[str | Count, ...]])
    except msgspec.ValidationError as error:
        raise _unsupported("planner_data", planner_data) from error


# ---- decoding ------------------------------------------------------------------------------------


def decode(content: bytes, where: str) -> Metadata:
    """Decode the metadata of a checkpoint. Nothing that it names is imported or run.

    Args:
        content: bytes that ``encode`` returned, or any others.
        where: dataset, for the error message.

    Raises:
        FormatError: the bytes are no metadata of this format, or contradict themselves.
    """
    action = f"read the metadata of checkpoint {quote(where)}"
    try:
        stored = msgspec.msgpack.decode(content, type=_Metadata)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FormatError(
            f"{action}: expected format {CHECKPOINT_FORMAT}, got other bytes ({error})"
        ) from error
    if stored.format != CHECKPOINT_FORMAT:
        raise FormatError(
            f"{action}: expected format {CHECKPOINT_FORMAT}, got format {stored.format}, which "
            "another release of DLFS loads"
        )
    try:
        return _decode(stored)
    except FormatError as error:
        raise FormatError(f"{action}: {error}") from error


def _decode(stored: _Metadata) -> Metadata:
    described: dict[str, Any] = {name: BytesStorageMetadata() for name in stored.objects}
    for name, tensor in stored.tensors.items():
        described[name] = _decode_tensor(name, tensor)
    storage: dict[MetadataIndex, tuple[Piece, ...]] = {}
    for item in stored.items:
        index = MetadataIndex(item.name, item.offset, item.index)
        storage[index] = tuple(_decode_piece(piece, stored.sources) for piece in item.pieces)
    _check_lengths(described, storage)
    metadata = Metadata(
        described,
        planner_data=_decode_paths(stored.paths),
        storage_data=storage,
        storage_meta=StorageMeta(stored.checkpoint_id, stored.save_id),
    )
    if hasattr(metadata, "version"):
        metadata.version = stored.version
    return metadata


def _constant(name: str, kind: type) -> Any:
    """Return the constant of torch that has a name, if it is of a kind."""
    found = vars(torch).get(name)
    if not isinstance(found, kind):
        raise FormatError(f"expected the name of a {kind.__name__} of torch, got {quote(name)}")
    return found


def _decode_tensor(name: str, stored: _Tensor) -> TensorStorageMetadata:
    chunks = []
    for chunk in stored.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(stored.size) or any(
            offset + size > whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, stored.size, strict=True)
        ):
            raise FormatError(
                f"{quote(name)} has the shape {stored.size}: expected a shard inside it, got "
                f"the shape {chunk.sizes} at {chunk.offsets}"
            )
        chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
    properties = TensorProperties(
        dtype=_constant(stored.dtype, torch.dtype),
        layout=_constant(stored.layout, torch.layout),
        requires_grad=stored.requires_grad,
        memory_format=_constant(stored.memory_format, torch.memory_format),
        pin_memory=stored.pin_memory,
    )
    return TensorStorageMetadata(properties, torch.Size(stored.size), chunks)


def _decode_piece(stored: _Piece, sources: Sequence[UUID]) -> Piece:
    if stored.source >= len(sources):
        raise FormatError(f"expected one of {len(sources)} sources, got number {stored.source}")
    return Piece(
        sources[stored.source], stored.sample, stored.length_bytes, stored.crc32c, stored.digest
    )


def _decode_paths(
    paths: dict[str, tuple[str | int, ...]] | None,
) -> dict[str, tuple[str | int, ...]] | None:
    """Return the paths; an index in a list is below their number, since torch fills lists up."""
    count = len(paths or {})
    for path in (paths or {}).values():
        for part in path:
            if isinstance(part, int) and part >= count:
                raise FormatError(f"expected an index of a list below {count}, got {part}")
    return paths


def _check_lengths(
    described: Mapping[str, Any], storage: Mapping[MetadataIndex, Sequence[Piece]]
) -> None:
    """Check that each shard of a tensor has the bytes that its type and shape need."""
    for name, stored in described.items():
        if isinstance(stored, BytesStorageMetadata):
            if MetadataIndex(name) not in storage:
                raise FormatError(f"expected the object {quote(name)}, got no bytes of it")
            continue
        for chunk in stored.chunks:
            needed = math.prod(chunk.sizes) * stored.properties.dtype.itemsize
            pieces = storage.get(MetadataIndex(name, chunk.offsets), ())
            found = sum(piece.length_bytes for piece in pieces)
            if found != needed:
                raise FormatError(
                    f"expected {needed} bytes of {quote(name)} at {tuple(chunk.offsets)}, "
                    f"got {found}"
                )
