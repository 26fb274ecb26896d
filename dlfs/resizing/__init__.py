"""Changes the members of a volume: adds groups of members, moves data between them, removes them.

``growing`` adds a group of devices, without moving data. ``shrinking`` empties groups of members
and removes them. Each works under the lock of one writer (``dlfs.store.transaction``) and is a
sequence of commits, so a crash at any write leaves a complete volume. FORMAT.md, sections 8.6 and
8.7, specifies the bytes and their order.
"""

from dlfs.resizing.growing import grow_volume
from dlfs.resizing.shrinking import ShrinkReport, shrink_volume

__all__ = ["ShrinkReport", "grow_volume", "shrink_volume"]
