"""The same limits stand in dlfs/codes.h, in the block layer and in FORMAT.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlfs.block import lock
from dlfs.format import constants

ROOT = Path(__file__).parents[3]
HEADER = (ROOT / "native/include/dlfs/codes.h").read_text()
SPECIFICATION = (ROOT / "dlfs/format/FORMAT.md").read_text()


@pytest.mark.parametrize(
    ("macro", "value"),
    [
        ("DLFS_MEMBERS_MAX", constants.MEMBERS_MAX),
        ("DLFS_PATH_BYTES_MAX", constants.PATH_BYTES_MAX),
        ("DLFS_COMPONENT_BYTES_MAX", constants.COMPONENT_BYTES_MAX),
        ("DLFS_SAMPLE_BYTES_MAX", constants.SAMPLE_BYTES_MAX),
        ("DLFS_ADDRESS_MAX", constants.ADDRESS_MAX),
        ("DLFS_CHUNK_BYTES_MIN", constants.CHUNK_BYTES_MIN),
        ("DLFS_CHUNK_BYTES_MAX", constants.CHUNK_BYTES_MAX),
    ],
)
def test_the_header_has_the_same_limits(macro: str, value: int) -> None:
    found = re.search(rf"#define {macro} (.*?)(?:/\*|\n)", HEADER)
    assert found is not None
    numbers = [int(number) for number in re.findall(r"\d+", found[1].replace("UINT64_C", ""))]
    if "<<" in found[1]:
        number = (numbers[0] << numbers[1]) - (numbers[2] if len(numbers) > 2 else 0)
    else:
        (number,) = numbers
    assert number == value


def test_the_lock_record_lies_in_its_area() -> None:
    assert lock.RECORD_OFFSET_BYTES == constants.LEASE_OFFSET_BYTES
    assert lock.RECORD_BYTES == constants.LEASE_BYTES


def test_the_lock_record_is_as_specified() -> None:
    record = lock.HolderRecord.of_this_process("a test").encode()
    assert len(record) == 4096
    assert record.startswith(b"DLFS-LOCK 1\n{")
    assert record.rstrip(b"\0").endswith(b"}\n")


@pytest.mark.parametrize(
    "text",
    [
        f"version {constants.VERSION_MAJOR}.{constants.VERSION_MINOR}",
        f"| datasets, all versions counted | {constants.CATALOG_DATASETS_MAX:,} |",
        f"| runs in one catalog | {constants.CATALOG_RUNS_MAX:,} |",
        f"| members of a volume | {constants.MEMBERS_MAX} |",
        f"| smallest volume | {constants.CHUNKS_MIN} chunks |",
        f"| label | {constants.LABEL_BYTES_MAX} bytes of UTF-8 |",
        f"| copies of a chunk | {constants.REPLICAS_MAX} |",
        f"| dataset name | {constants.DATASET_NAME_BYTES_MAX} bytes |",
        f"{constants.PATH_BYTES_MAX:,} bytes; {constants.COMPONENT_BYTES_MAX} bytes |",
        constants.SUPERBLOCK_MAGIC.decode(),
        constants.CATALOG_MAGIC.decode(),
    ],
)
def test_the_specification_has_the_same_numbers(text: str) -> None:
    assert text in SPECIFICATION
