"""Hostile bytes for the C interface's decoders of superblocks and catalogs: libFuzzer.

The seeds are what volumes made here have on media; the harness (native/fuzz) makes checksums right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.format.geometry import DataSpace
from dlfs.format.superblock import decode_superblock
from tests.fuzz.test_fuzz_nvme_pdu import built, survives

INPUT_BYTES_MAX = 8 * KIB
SUPERBLOCK_RIGHT, CATALOG_RIGHT = 1, 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def write_seeds(folder: Path, work: Path) -> None:
    """A superblock and its catalog from volumes of one member and of three with replicas."""
    folder.mkdir()
    for count, replicas in ((1, 1), (3, 2)):
        members = [str(work / f"{count}-{number}.img") for number in range(count)]
        dlfs.format_volume(
            members, size_bytes=2 * MIB, chunk_bytes=4 * KIB, block_bytes=4 * KIB, replicas=replicas
        )
        with dlfs.open(members) as volume:
            for name in ("b", "a", "b"):
                with volume.writer(name) as writer:
                    for number in range(40):
                        writer.add(f"{number}", bytes(number * 99))
        images = [Path(member).read_bytes() for member in members]
        block = max(
            (images[0][at : at + 4096] for at in (0, 64 * KIB)),
            key=lambda data: decode_superblock(data, "seed").generation,
        )
        superblock = decode_superblock(block, "seed")
        space = DataSpace(superblock.geometry, superblock.catalog_runs)
        catalog = b"".join(
            images[piece.member][piece.offset_bytes : piece.offset_bytes + piece.length_bytes]
            for piece in space.member_ranges(0, superblock.catalog_bytes)
        )
        for choices in range(4):
            (folder / f"{count}-{choices}").write_bytes(bytes([choices]) + block + catalog)


def test_the_decoders_survive_hostile_bytes(tmp_path: Path) -> None:
    fuzzer = built("fuzz_volume", tmp_path)
    seeds = tmp_path / "seeds"
    write_seeds(seeds, tmp_path)
    survives(fuzzer, seeds, INPUT_BYTES_MAX)
