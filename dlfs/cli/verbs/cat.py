"""``dlfs cat``: the bytes of samples, on stdout."""

from __future__ import annotations

from typing import Annotated

import typer

from dlfs.cli.options import DatasetArgument, VolumeArgument, open_dataset, sample_indices
from dlfs.cli.output import write_bytes
from dlfs.errors import UsageError


def cat(
    volume: VolumeArgument,
    dataset: DatasetArgument,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="Samples, by path.")
    ] = None,
    index: Annotated[
        list[int] | None, typer.Option("--index", "-i", help="Samples, by index; repeatable.")
    ] = None,
) -> None:
    """Write samples to stdout, one behind the other, as they are.

    A sample of up to 64 MiB is verified before its first byte is written. A larger one is written
    as it is read, in a few MiB of memory; if its checksum proves wrong at the end, its last bytes
    are left out and cat fails: use what it wrote only if it exits with 0.
    """
    if not paths and not index:
        raise UsageError("cat: expected the paths or indices of samples, got none")
    with open_dataset(volume, dataset) as (_, found):
        for sample in sample_indices(found, paths or [], index or []):
            for piece in found.read_pieces(sample):
                write_bytes(piece)
