"""Makes the golden volumes of format 1.0, and says what they hold.

``contents()`` is what a correct reader finds in each of them. Once released, neither it nor the
archives in v1/ change: a later format gets a script and a folder of its own. The tests also write
the same contents anew with the code under test.

    python -m tests.golden.make_v1 tests/golden/v1
"""

from __future__ import annotations

import functools
import io
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import dlfs
from dlfs.units import KIB, MIB
from tests.odd_names import old_writer

Contents = dict[tuple[bytes, int], dict[bytes, bytes]]

MEMBER_SIZES = {"one": [2 * MIB], "three": [2 * MIB, 2 * MIB + 12 * KIB, 3 * MIB]}
CHUNK_BYTES = {"one": 4 * KIB, "three": 16 * KIB}
LABELS = {"one": "", "three": "trois dés"}


@functools.cache
def pattern(length: int, seed: int) -> bytes:
    """Bytes that look random, the same for ever: a linear congruential generator's high bits."""
    state, out = seed, bytearray()
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        out.append(state >> 56)
    return bytes(out)


def odd(chunk_bytes: int) -> dict[bytes, bytes]:
    """Paths and lengths at the limits."""
    lengths = [0, 1, 511, 512, chunk_bytes - 1, chunk_bytes, chunk_bytes + 1, 3 * chunk_bytes + 5]
    samples = {b"lengths/%06d" % length: pattern(length, length) for length in lengths}
    names = [
        b"a b/ leading and trailing ",
        b"a b.txt",
        b"a!",
        b"a",
        b"new\nline\ttab",
        b"\xff\xfe not UTF-8 \x80",
        "ünï/文字.png".encode(),
        b"...",
        b"-rf",
        b"~",
        b"component/" + b"c" * 255,
        b"/".join([b"d" * 200] * 20 + [b"e" * 75]),
        b"\x01/\x7f",
        b"empty/one",
        b"empty/two",
    ]
    for number, name in enumerate(names):
        samples[name] = b"" if name.startswith(b"empty/") else pattern(40 + number, number)
    return samples


def numbers(count: int, seed: int) -> dict[bytes, bytes]:
    """Small samples in folders, enough for several leaves and name blocks."""
    return {
        b"class%d/%04d.bin" % (i % 10, i): pattern(20 + i * 7 % 90, seed + i) for i in range(count)
    }


def contents(kind: str) -> Contents:
    """Every sample of a golden volume."""
    return datasets(CHUNK_BYTES[kind])


def datasets(chunk_bytes: int) -> Contents:
    """Datasets with what is odd for chunks of this size."""
    return {
        (b"empty", 1): {},
        (b"numbers", 1): numbers(100, 1000),
        (b"numbers", 2): numbers(300, 2000),
        (b"odd \xff", 1): odd(chunk_bytes),
    }


def write(kind: str, folder: Path) -> list[str]:
    """Write a golden volume with this code; returns the paths of its members, in order."""
    members = make_members(folder, MEMBER_SIZES[kind])
    dlfs.format_volume(members, chunk_bytes=CHUNK_BYTES[kind], block_bytes=4096, label=LABELS[kind])
    fill(members, contents(kind))
    return members


def make_members(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Make empty files."""
    members = [str(folder / f"member{number}.img") for number in range(len(sizes))]
    for member, size in zip(members, sizes, strict=True):
        with open(member, "wb") as file:
            file.truncate(size)
    return members


def fill(members: Sequence[str], wanted: Contents) -> None:
    """Write the datasets.

    One more dataset is written and removed between the others: there are several generations, and
    free space in the middle.
    """
    with dlfs.open(members) as volume:
        for (name, version), samples in wanted.items():
            layout = "path" if version == 2 else "shuffled"
            with old_writer(volume, name, layout=layout, seed=version) as writer:
                for path in sorted(samples, key=lambda path: path[::-1]):
                    writer.add(path, samples[path])
            if (name, version) == (b"numbers", 1):
                with volume.writer("removed") as writer:
                    writer.add("x", bytes(50_000))
        volume.remove("removed")


def archive(members: Sequence[str], target: Path) -> None:
    """Pack members into a .tar.xz: they are nearly all zeroes."""
    with tarfile.open(target, "w:xz", preset=9) as tar:
        for member in members:
            data = Path(member).read_bytes()
            info = tarfile.TarInfo(Path(member).name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    for kind in MEMBER_SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            archive(write(kind, Path(scratch)), Path(sys.argv[1]) / f"{kind}.tar.xz")
