"""Repairs volumes: damaged copies, stale members, and lost members that a new device replaces.

``repair`` opens the members that are left, prepares new devices and commits. ``copies`` makes all
copies of the chunks in use equal to the bytes whose checksums are right. ``adoption`` recognises a
member without superblocks, in a volume without replicas.
"""

from dlfs.redundancy.repair import RepairReport, repair

__all__ = ["RepairReport", "repair"]
