"""Makes the golden volumes, which have every feature of the format, and says what they hold.

``contents()``, ``columns()`` and ``FIELDS`` are what a correct reader finds. The volumes are the
same byte for byte whenever this code makes them, and the tests compare that with the archives
beside this file. After a change of the format, write the archives anew:

    python -m tests.golden.make

``one`` is the simplest volume; ``three`` has three members of different sizes. ``groups`` has two
groups of members and two copies of each chunk. Its first group was removed, so that no chunk has
number 0; one of the others is being evacuated, and has data.
"""

from __future__ import annotations

import functools
import io
import itertools
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

import numpy as np

import dlfs
from dlfs._native.checksums import crc32c
from dlfs.base.units import KIB, MIB
from dlfs.format.bad_records import BadRecord, BadReport
from dlfs.format.constants import LOCATION_RECORD_BYTES_MAX, LOCATION_RECORD_OFFSET_BYTES
from dlfs.format.locations import LocationRecord
from dlfs.store.shrinking import _mark
from dlfs.store.transaction import Transaction
from tests.odd_names import old_writer
from tests.support.unfinished import commit_unfinished

Samples = dict[bytes, bytes]
Contents = dict[tuple[bytes, int], Samples]
Columns = dict[str, list[Any]]

HERE = Path(__file__).parent
MEMBER_SIZES = {
    "one": [3 * MIB],
    "three": [2 * MIB, 2 * MIB + 12 * KIB, 3 * MIB],
    "groups": [3 * MIB, 4 * MIB, 3 * MIB, 4 * MIB, 4 * MIB],
}
CHUNK_BYTES = {"one": 4 * KIB, "three": 16 * KIB, "groups": 16 * KIB}
REPLICAS = {"one": 1, "three": 1, "groups": 2}
LABELS = {"one": "", "three": "trois dés", "groups": "grown"}


@functools.cache
def pattern(length: int, seed: int) -> bytes:
    """Bytes that look random, the same for ever: a linear congruential generator's high bits."""
    state, out = seed, bytearray()
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        out.append(state >> 56)
    return bytes(out)


REMOVED = {b"removed": 1, b"again": 2, b"gone": 1, b"grown": 2}
"""Highest version that was removed of each name."""
STEPS = 4
"""Versions of the dataset ``grown``, each appended to the one before; version 2 is removed."""
UNFINISHED = 2
"""Steps of an unfinished import of the dataset ``grown``."""
GRANTED = 2
"""Chunks that workers of this import may write."""
BAD = {
    1: BadReport(2, {"malformed": 2}, (BadRecord("a\udcff", "record 1", "ä"),)),
    3: BadReport(1, {"cut short": 1}, (BadRecord("b", "record 2", "ended"),)),
}
"""Bad records that the imports of versions of the dataset ``grown`` left out."""
LARGE_SAMPLES = 60
"""Samples of several chunks in the dataset ``later``: more than one group has room for."""

NUMBERS = {
    "small": np.int8, "short": np.int16, "int": np.int32, "long": np.int64,
    "unsigned small": np.uint8, "unsigned short": np.uint16, "unsigned int": np.uint32,
    "unsigned long": np.uint64, "half": np.float16, "single": np.float32, "double": np.float64,
}  # fmt: skip

FIELDS: dict[bytes, dict[str, bytes]] = {
    b"scene/%d" % number: {
        "image": bytes([number]) * (3 * number + 1),
        "caption": ("ä" * number).encode(),
        "label": number.to_bytes(8, "little"),
        "points": np.arange(3.0 * number, dtype="<f4").tobytes(),
        "mask": b"",
    }
    for number in range(5)
}
"""The fields of each sample of the dataset ``scenes``, in bytes."""
FIELD_TYPES = {
    "image": "bytes", "caption": "text", "label": "<i8[]", "points": "<f4[?,3]", "mask": "bytes",
}  # fmt: skip
ALIGNMENTS = {"image": 1, "caption": 1, "label": 8, "points": 4, "mask": 1}


EMPTY_DIRECTORIES: dict[bytes, list[bytes]] = {
    b"empty": [b"nothing/below", b"train"],
    b"odd \xff": [
        b"a b/" + b"e" * 255,
        b"a-",
        b"not \xff UTF-8",
        *(b"z/%d" % i for i in range(20)),
    ],
    b"grown": [b"kept"],
}
"""Directories without samples that datasets of these names have."""


# ---- what is in them -----------------------------------------------------------------------------


def odd(chunk_bytes: int) -> Samples:
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


def numbers(count: int, seed: int) -> Samples:
    """Small samples in folders, enough for several leaves and name blocks."""
    return {
        b"class%d/%04d.bin" % (i % 10, i): pattern(20 + i * 7 % 90, seed + i) for i in range(count)
    }


def step(number: int, chunk_bytes: int) -> Samples:
    """Samples that a version of ``grown`` adds."""
    added = {
        b"%d/" % (STEPS - number) + path: data for path, data in numbers(30, 500 * number).items()
    }
    return {**added, b"large/%d" % number: bytes([number]) * (2 * chunk_bytes + 100)}


def later(chunk_bytes: int) -> Samples:
    """Samples that were written after the volume was grown."""
    large = {b"large/%d" % i: bytes([i]) * (2 * chunk_bytes + i) for i in range(LARGE_SAMPLES)}
    return {**numbers(20, 7), **large}


def scenes() -> Samples:
    """The bytes of samples with fields: each begins at a multiple of its alignment."""
    samples = {}
    for path, fields in FIELDS.items():
        data = b""
        for name, value in fields.items():
            data += bytes(-len(data) % ALIGNMENTS[name]) + value
        samples[path] = data
    return samples


def contents(kind: str) -> Contents:
    """Every sample of a golden volume."""
    chunk_bytes = CHUNK_BYTES[kind]
    found: Contents = {
        (b"empty", 1): {},
        (b"numbers", 1): numbers(100, 1000),
        (b"numbers", 2): numbers(300, 2000),
        (b"odd \xff", 1): odd(chunk_bytes),
        (b"scenes", 1): scenes(),
        (b"again", 3): numbers(20, 3000),
    }
    samples: Samples = {}
    for number in range(1, STEPS + 1):
        samples = {**samples, **step(number, chunk_bytes)}
        found[b"grown", number] = samples
    del found[b"grown", 2]
    if kind == "groups":
        found[b"later", 1] = later(chunk_bytes)
    return found


def number_at(name: str, place: int) -> Any:
    """A number of a column: the extremes of its type first, NaN among those that have it."""
    dtype = np.dtype(NUMBERS[name])
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    special = [limits.min, limits.max, dtype.type("nan") if dtype.kind == "f" else dtype.type(1)]
    return dtype.type(special[place]) if place < len(special) else dtype.type(place % 100)


def columns(name: bytes, samples: Mapping[bytes, bytes]) -> Columns:
    """Return the attributes of a dataset, by column, in the order of its sorted paths."""
    paths = sorted(samples)
    places = range(len(paths))
    if not paths:
        return {}
    if name == b"numbers":
        found: Columns = {c: [number_at(c, place) for place in places] for c in NUMBERS}
        found["even"] = [place % 2 == 0 for place in places]
        found["class"] = [path.split(b"/")[0].decode() for path in paths]
        found["caption"] = [
            f"Bild {place} für {paths[place].decode()}" * (place % 3) for place in places
        ]
        found["dlfs:dtype"] = ["|u1" for _ in places]
        found["dlfs:shape"] = [str(len(samples[path])) for path in paths]
        return found
    if name == b"odd \xff":
        return {"n" * 255: list(places), "字": ["" for _ in places]}
    if name == b"grown":
        return {"path": [path.decode() for path in paths], "length": [len(path) for path in paths]}
    if name == b"scenes":
        return field_columns([FIELDS[path] for path in paths])
    return {}


def field_columns(rows: Sequence[Mapping[str, bytes]]) -> Columns:
    """Return the columns that describe the fields of some samples."""
    types = ",".join(f'"{field}":"{kind}"' for field, kind in FIELD_TYPES.items())
    found: Columns = {"dlfs:fields": ["{" + types + "}"] * len(rows)}
    for field in FIELD_TYPES:
        if field == "points":
            found["dlfs:field:points:shape"] = [f"{len(row[field]) // 12},3" for row in rows]
        elif field != "label":
            found[f"dlfs:field:{field}:bytes"] = [len(row[field]) for row in rows]
        found[f"dlfs:field:{field}:crc32c"] = [crc32c(row[field]) for row in rows]
    return found


# ---- making them ---------------------------------------------------------------------------------


@contextmanager
def same_every_time(kind: str) -> Iterator[None]:
    """Draw UUIDs and times from counters."""
    uuids = itertools.count(1000 * list(MEMBER_SIZES).index(kind) + 1)
    times = itertools.count(1_700_000_000_000_000_000, 1_000_000_000)

    def uuid4() -> UUID:
        return UUID(int=next(uuids) << 80, version=4)

    replaced: list[tuple[str, Callable[..., Any]]] = [
        (f"dlfs.{module}.uuid4", uuid4)
        for module in ("store.formatting", "store.growing", "dataset.writer")
    ]
    replaced += [
        (f"dlfs.{module}.now_ns", lambda: next(times))
        for module in ("store.formatting", "dataset.step_content", "dataset.sealing")
    ]
    # Versions of zlib compress differently, but store alike.
    replaced.append(("dlfs.format.bad_records.zlib.compress", partial(zlib.compress, level=0)))
    with ExitStack() as stack:
        for target, function in replaced:
            stack.enter_context(patch(target, function))
        yield


def write(kind: str, folder: Path) -> list[str]:
    """Write a golden volume with this code; returns the paths of its members, in order."""
    members = make_members(folder, MEMBER_SIZES[kind])
    first, second = (members[3:], members[:3]) if kind == "groups" else (members, [])
    with same_every_time(kind):
        dlfs.format_volume(
            first,
            chunk_bytes=CHUNK_BYTES[kind],
            block_bytes=4096,
            label=LABELS[kind],
            replicas=REPLICAS[kind],
        )
        fill(first, kind)
        if second:
            change_members(first, second, kind)
    return members


def make_members(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Make empty files."""
    members = [str(folder / f"member{number}.img") for number in range(len(sizes))]
    for member, size in zip(members, sizes, strict=True):
        with open(member, "wb") as file:
            file.truncate(size)
    return members


def fill(members: Sequence[str], kind: str) -> None:
    """Write the datasets that a volume of one group has.

    Others are written and removed between them: there are several generations, and free space in
    the middle.
    """
    with dlfs.open(members) as volume:
        for (name, version), samples in contents(kind).items():
            if name in (b"grown", b"again", b"scenes", b"later"):
                continue
            layout = "path" if version == 2 else "shuffled"
            with old_writer(volume, name, layout=layout, seed=version) as writer:
                add_all(writer, name, samples)
            if (name, version) == (b"numbers", 1):
                with volume.writer("removed") as writer:
                    writer.add("x", bytes(50_000))
        volume.remove("removed")
        with volume.writer("scenes", fields=FIELD_TYPES) as writer:
            for path, fields in FIELDS.items():
                points = np.frombuffer(fields["points"], "<f4").reshape(-1, 3)
                label = int.from_bytes(fields["label"], "little")
                caption = fields["caption"].decode()
                writer.add(path, {**fields, "caption": caption, "label": label, "points": points})
        for name, version in (("gone", 1), ("again", 1), ("again", 2), ("again", 3)):
            with volume.writer(name) as writer:
                add_all(writer, name.encode(), numbers(20, 1000 * version))
            if version < 3:
                volume.remove(name)
        for number in range(1, STEPS + 1):
            with volume.writer("grown") if number == 1 else volume.append("grown") as writer:
                add_all(writer, b"grown", step(number, CHUNK_BYTES[kind]))
                writer.bad += BAD.get(number, BadReport())
        volume.remove("grown", 2)
        commit_unfinished(volume, "grown", UNFINISHED, granted=GRANTED)


def add_all(writer: dlfs.DatasetWriter, name: bytes, samples: Samples) -> None:
    """Add samples with their attributes, in an order that is not that of their paths.

    So are empty directories, and some that contain others.
    """
    for directory in reversed(EMPTY_DIRECTORIES.get(name, [])):
        writer.add_directory(directory)
        writer.add_directory(directory.partition(b"/")[0])
    rows = columns(name, samples)
    paths = sorted(samples)
    for path in sorted(paths, key=lambda path: path[::-1]):
        row = {column: values[paths.index(path)] for column, values in rows.items()}
        writer.add(path, samples[path], attributes=row)


def change_members(first: Sequence[str], second: Sequence[str], kind: str) -> None:
    """Grow, shrink and grow the volume again; begin to evacuate its last group."""
    with dlfs.open(first) as volume:
        volume.grow(second)
        volume.shrink(first)
        volume.grow(first, force=True)
        with volume.writer("later") as writer:
            add_all(writer, b"later", later(CHUNK_BYTES[kind]))
        last = volume.session.superblock.geometry.groups[-1]
        records = volume.session.catalog.datasets
        assert any(last.has(run) for record in records for run in record.data_runs)
        with volume._transaction("golden") as transaction:
            _mark(transaction.base, {last.first_chunk}, Transaction)
    for member in [*first, *second]:
        name_members_by_file(Path(member))


def name_members_by_file(member: Path) -> None:
    """Replace the paths in a location record, which are of this machine, by file names."""
    with member.open("r+b") as file:
        file.seek(LOCATION_RECORD_OFFSET_BYTES)
        record = LocationRecord.decode(file.read(LOCATION_RECORD_BYTES_MAX))
        assert record is not None
        uris = {uuid: f"/golden/{Path(uri).name}" for uuid, uri in record.uris.items()}
        content = replace(record, uris=uris).encode()
        file.seek(LOCATION_RECORD_OFFSET_BYTES)
        file.write(content.ljust(LOCATION_RECORD_BYTES_MAX, b"\0"))


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
            archive(write(kind, Path(scratch)), HERE / f"{kind}.tar.xz")
