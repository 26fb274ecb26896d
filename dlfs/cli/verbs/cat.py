"""``dlfs cat``: writes the bytes of samples to stdout."""

from __future__ import annotations

from dlfs.cli.options import (
    DatasetArgument,
    IndexOption,
    PathsArgument,
    VolumeArgument,
    open_dataset,
    sample_indices,
)
from dlfs.cli.output import write_bytes
from dlfs.errors import UsageError


def cat(
    volume: VolumeArgument,
    dataset: DatasetArgument,
    paths: PathsArgument = None,
    index: IndexOption = None,
) -> None:
    """Write samples to stdout, one after the other, unchanged.

    A sample of up to 64 MiB is verified before its first byte is written. A larger sample is
    written as it is read, in a few MiB of memory. If its checksum is wrong, cat leaves out its last
    bytes and fails: use the output only if the exit code is 0.

    Examples:
        dlfs cat photos.img photos dog/0001.jpg >dog.jpg
        dlfs cat photos.img photos --index 0 --index 1
    """
    if not paths and not index:
        raise UsageError("cat: expected the paths or indices of samples, got none")
    with open_dataset(volume, dataset) as found:
        for sample in sample_indices(found, paths or [], index or []):
            for part in found.read_pieces(sample):
                write_bytes(part)
