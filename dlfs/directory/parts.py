"""``PartDirectory``: a directory for reading a part of each sample of a dataset.

It has the samples, names and storage order of the whole directory, and other locations, so that a
reader reads and verifies just these parts.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs.directory.frozen import FrozenDirectory
from dlfs.format.location import unpack_locations


class PartDirectory(FrozenDirectory):
    """The directory of one part of each sample.

    Args:
        whole: directory of the samples; not closed before the readers of this one.
        locations: location of each part within that of its sample, ``LOCATION[n_samples]``, with
            the CRC32C of the part.

    Threads: any at once.
    """

    def __init__(self, whole: FrozenDirectory, locations: NDArray[Any]) -> None:
        self._whole = whole
        self._open_parts(whole, locations.view(np.uint8), _order(whole, locations))
        self._release = None
        self._descriptors = tuple

    @property
    def dataset_uuid(self) -> UUID:
        """UUID of the dataset, as stored in the segment."""
        return self._whole.dataset_uuid

    @property
    def parts(self) -> NDArray[np.uint32]:
        """CRC32C of each part of a whole sample larger than a chunk."""
        return self._whole.parts

    def verify(self) -> None:
        """Check the whole directory."""
        self._whole.verify()

    def load_names(self) -> None:
        """Load the names of the whole directory, which are those of this one."""
        self._whole.load_names()


def _order(whole: FrozenDirectory, locations: NDArray[Any]) -> NDArray[np.uint64] | None:
    """Return the indices sorted by (address, index); None if the order is that of ``whole``.

    A part may begin at the address of another one only if one of them has no bytes.
    """
    addresses = unpack_locations(locations)[0]
    stored = addresses[whole.order()]
    if np.all(stored[1:] > stored[:-1]):
        return None
    return np.argsort(addresses, kind="stable").astype(np.uint64)
