"""How the pace of random reads grows with the reads in flight: DLFS, fio, the bare reader."""

from __future__ import annotations

from bench.contestant import Contestant, Ground
from bench.contestants.bare import BareUring
from bench.contestants.fio import FioRead
from bench.contestants.samples import Batches
from bench.machine import Unavailable
from bench.peers.outcome import Deep
from dlfs.units import KIB

DEPTHS = (1, 4, 16, 64, 128, 256)


def sweep(ground: Ground, dataset: str) -> list[Deep]:
    """Every depth once, cold.

    Raises:
        WrongBytesError: a reader gave other bytes than the source has.
    """
    found = []
    for depth in DEPTHS:
        racers: dict[str, Contestant] = {
            "DLFS read()": Batches(1 / 16, depth),
            "fio 4 KiB": FioRead(4 * KIB, depth),
            "bare io_uring reader": BareUring(depth),
        }
        for who, contestant in racers.items():
            try:
                sample = contestant.run(ground)
            except Unavailable:
                continue  # the race names the same ones as missing
            rate = sample.samples / sample.seconds
            found.append(Deep(who, dataset, depth, ground.round, rate))
    return found
