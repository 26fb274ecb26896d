from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlfs.mount.inode_numbers import (
    DATASET_MAX,
    DEPTH_MAX,
    INCOMING,
    INDEX_MAX,
    ROOT,
    InodeParts,
    pack,
    unpack,
)


@given(st.integers(1, DATASET_MAX), st.integers(0, DEPTH_MAX), st.integers(0, INDEX_MAX))
def test_round_trip(dataset: int, depth: int, index: int) -> None:
    inode = pack(dataset, depth, index)
    assert unpack(inode) == InodeParts(dataset, depth, index)
    assert 1 < inode < 1 << 64


def test_root_and_incoming_are_in_no_dataset() -> None:
    assert unpack(ROOT).dataset == unpack(INCOMING).dataset == 0
