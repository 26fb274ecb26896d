"""Makes volumes, and writes and reads datasets as dictionaries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any, TypeVar

import dlfs
from dlfs.format.geometry import DataSpace
from dlfs.store.members import Members
from dlfs.store.transaction import Generation
from tests.support.files import flip_bit

P = TypeVar("P", bound=Members)


def new_volume(path: P, **layout: Any) -> P:
    """Format a volume of one file, and return its path.

    Args:
        path: path of the file.
        layout: arguments of ``dlfs.format_volume``.
    """
    dlfs.format_volume(path, **layout)
    return path


def write_dataset(
    volume: dlfs.Volume | Members,
    name: str | bytes,
    samples: Mapping[Any, Any],
    *,
    attributes: Iterable[Mapping[str, Any]] = repeat({}),
    append: bool = False,
    **options: Any,
) -> None:
    """Write a dataset, or its next version, to a volume.

    Args:
        volume: the volume, open or by its members.
        name: name of the dataset.
        samples: bytes or fields by path.
        attributes: attributes of the samples, in their order.
        append: True for a version that has the samples of the one before, too.
        options: further arguments of ``Volume.writer``.
    """
    with (
        _opened(volume) as opened,
        opened.append(name) if append else opened.writer(name, **options) as writer,
    ):
        for (path, data), each in zip(samples.items(), attributes, strict=False):
            writer.add(path, data, attributes=each)


def read_dataset(volume: dlfs.Volume | Members, name: str) -> dict[bytes, bytes]:
    """Return the samples of a dataset, by path.

    Args:
        volume: the volume, open or by its members.
        name: name of the dataset, and its version if not the latest.
    """
    with _opened(volume) as opened, opened[name] as dataset:
        return dict(zip(dataset.paths(), dataset[:].to_list(), strict=True))


def read_datasets(volume: dlfs.Volume | Members) -> dict[tuple[str, int], dict[bytes, bytes]]:
    """Return the samples of all datasets of a volume, by name and version."""
    with _opened(volume) as opened:
        return {
            (info.name, info.version): read_dataset(opened, f"{info.name}@{info.version}")
            for info in opened.datasets()
        }


def flip_copies(generation: Generation, space: DataSpace, address: int, *copies: int) -> None:
    """Flip a bit of a byte of a volume on files, in some of its copies."""
    for copy in copies:
        member, offset = space.resolve(address, copy)
        flip_bit(generation.members[member].device.uri.removeprefix("file:"), offset)


def _opened(volume: dlfs.Volume | Members) -> AbstractContextManager[dlfs.Volume]:
    return contextlib.nullcontext(volume) if isinstance(volume, dlfs.Volume) else dlfs.open(volume)
