"""Changes the members of a volume: adds groups of members, moves data between them, removes them.

``growing`` adds a group of devices, without moving data. ``balancing`` spreads datasets over all
groups. ``shrinking`` empties groups of members and removes them. Both move chunks by ``moving``.
Each works under the lock of one writer (``dlfs.store.transaction``) and is a sequence of commits,
so a crash at any write leaves a complete volume. FORMAT.md, sections 8.6 to 8.8, specifies the
bytes and their order.
"""

from dlfs.resizing.balancing import RebalanceReport, rebalance_volume
from dlfs.resizing.growing import grow_volume
from dlfs.resizing.shrinking import ShrinkReport, shrink_volume

__all__ = [
    "RebalanceReport",
    "ShrinkReport",
    "grow_volume",
    "rebalance_volume",
    "shrink_volume",
]
