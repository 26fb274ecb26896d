"""A directory with valid checksums whose storage order omits a sample.

Chunks in memory are verified in that order, so such a dataset is refused.
"""

import random
import struct
from pathlib import Path

import pytest

import dlfs
from dlfs._native import abi
from dlfs._native.checksums import crc32c, crc32c_blocks
from tests.golden.c_reader import Failed, mounted, opened
from tests.support.volumes import new_volume, write_dataset

BLOCK = 4096
COUNT = 20
SAMPLES = [random.Random(number).randbytes(3000) for number in range(COUNT)]
REASON = "sorted by address"


def seal(segment: bytearray) -> None:
    """Recompute the checksums of a directory's entries."""
    checksums, count = struct.unpack_from("<2Q", segment, 80)
    (locations,) = struct.unpack_from("<Q", segment, 112)
    table = crc32c_blocks(bytes(segment[locations : locations + count * BLOCK]), BLOCK)
    segment[checksums : checksums + 4 * count] = table.astype("<u4").tobytes()
    struct.pack_into("<I", segment, 168, crc32c(bytes(segment[checksums:locations])))
    struct.pack_into("<I", segment, 4092, crc32c(bytes(segment[:4092])))


@pytest.fixture
def image(tmp_path: Path) -> str:
    """Return a volume whose storage order has rank 4 twice and omits rank 5."""
    path = tmp_path / "volume.img"
    uri = new_volume(str(path), size_bytes=8 << 20, chunk_bytes=64 << 10)
    write_dataset(uri, "data", {f"{number:02d}": data for number, data in enumerate(SAMPLES)})
    content = bytearray(path.read_bytes())
    start = content.index(b"DLFSDIR1")
    (entries_bytes,) = struct.unpack_from("<Q", content, start + 64)
    segment = content[start : start + entries_bytes]
    (order,) = struct.unpack_from("<Q", segment, 120)
    ranks = list(struct.unpack_from(f"<{COUNT}I", segment, order))
    (left_out,) = struct.unpack_from("<I", segment, order + 4 * 5)
    ranks[5] = ranks[4]
    struct.pack_into(f"<{COUNT}I", segment, order, *ranks)
    seal(segment)
    content[start : start + entries_bytes] = segment
    data = content.index(SAMPLES[left_out])
    content[data + 100] ^= 1
    path.write_bytes(content)
    return uri


def test_it_is_refused(image: str) -> None:
    with dlfs.open(image) as volume:
        with pytest.raises(dlfs.FormatError, match=REASON) as caught:
            len(volume["data"].paths())
        assert "'data'" in str(caught.value)
        assert image in str(caught.value)
        assert any(REASON in str(finding) for finding in volume.verify())
    with (
        mounted([image]) as (c, volume_in_c),
        pytest.raises(Failed) as in_c,
        opened(c, volume_in_c, b"data"),
    ):
        pass
    assert in_c.value.code == abi.E_FORMAT
