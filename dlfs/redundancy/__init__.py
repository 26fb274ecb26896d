"""Making a volume with replicas whole again: damaged copies, stale members, lost ones replaced.

``repair`` opens what is left, prepares new devices and commits; ``space`` brings the copies of
every chunk in use in line with the bytes that have the right checksums.
"""

from dlfs.redundancy.repair import RepairReport, repair

__all__ = ["RepairReport", "repair"]
