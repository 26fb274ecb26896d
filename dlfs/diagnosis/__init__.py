"""Checks a machine for what DLFS depends on, and measures what limits the speed of a volume.

``doctor.examine`` runs the checks of ``checks``: each is a function that reads the machine's
settings through a ``Machine`` and yields a ``Finding`` for each of them. ``bench`` measures the
devices, the network, the API and the mount of a volume one after the other, next to fio.

A check is there only for a setting that DLFS depends on, and says what DLFS does without it. A
check reads below ``Machine.root``, so that a test can plant a misconfiguration; what only the
running system can answer (a device, a target, a system call) is asked where the root is ``/``.
Whatever may hang is asked in a thread with a time limit (``run_in_time``).
"""
