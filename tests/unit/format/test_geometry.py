from __future__ import annotations

import pytest

from dlfs.base.units import KIB, MIB
from dlfs.errors import UsageError
from dlfs.format.geometry import (
    ChunkRun,
    DataSpace,
    Geometry,
    MemberRange,
    split_runs,
    superblock_offsets,
)


def geometry(members: int = 3, rows: int = 10) -> Geometry:
    return Geometry.of_one_group(members, 4096, 512, MIB, rows)


def test_chunks_go_round_robin_over_members() -> None:
    places = [geometry().locate(chunk) for chunk in range(7)]
    first = [(member, MIB) for member in range(3)]
    second = [(member, MIB + 4096) for member in range(3)]
    assert places == [*first, *second, (0, MIB + 8192)]


@pytest.mark.parametrize("chunk", [-1, 30])
def test_a_chunk_outside_the_volume_is_refused(chunk: int) -> None:
    with pytest.raises(UsageError, match=r"expected 0\.\.29"):
        geometry().locate(chunk)


def test_the_smallest_member_decides_the_rows() -> None:
    got = Geometry.for_members([8 * MIB, 3 * MIB + 100, 9 * MIB], 256 * KIB, 4096)
    assert got == Geometry.of_one_group(3, 256 * KIB, 4096, MIB, 7)
    assert got.chunk_total == 21
    assert got.capacity_bytes == 21 * 256 * KIB


def test_copies_lie_on_other_members_in_bands_of_their_own() -> None:
    got = Geometry.of_one_group(3, 4096, 512, MIB, 11, replicas=2)
    assert (got.groups[0].band_rows, got.chunk_total) == (5, 15)
    assert got.capacity_bytes == 15 * 4096
    assert [got.locate(chunk, 1) for chunk in range(4)] == [
        (1, MIB + 5 * 4096),
        (2, MIB + 5 * 4096),
        (0, MIB + 5 * 4096),
        (1, MIB + 6 * 4096),
    ]
    places = {got.locate(chunk, copy) for chunk in range(15) for copy in range(2)}
    assert len(places) == 30
    assert {offset for _, offset in places} == {MIB + row * 4096 for row in range(10)}
    with pytest.raises(UsageError, match="in 2 copies, got copy 2 of chunk 0"):
        got.locate(0, 2)


def test_members_hold_fewer_chunks_when_each_is_there_twice() -> None:
    got = Geometry.for_members([8 * MIB, 3 * MIB + 100, 9 * MIB], 256 * KIB, 4096, 2)
    assert got == Geometry.of_one_group(3, 256 * KIB, 4096, MIB, 7, 2)
    assert got.chunk_total == 9
    size = MIB + 2 * 2 * 4096 + 4096
    assert Geometry.for_members([size] * 2, 4096, 4096, 2).chunk_total == 4
    with pytest.raises(UsageError, match=f"expected at least {size} bytes"):
        Geometry.for_members([size - 1] * 2, 4096, 4096, 2)


def test_a_range_has_the_same_pieces_in_every_copy() -> None:
    space = DataSpace(
        Geometry.of_one_group(3, 4096, 512, MIB, 10, 2), (ChunkRun(1, 2), ChunkRun(7, 1))
    )
    first = list(space.member_ranges(100, 10000))
    second = list(space.member_ranges(100, 10000, 1))
    assert [piece.length_bytes for piece in first] == [piece.length_bytes for piece in second]
    assert [piece.member for piece in first] == [1, 2, 1]
    assert [piece.member for piece in second] == [2, 0, 2]
    assert space.resolve(100, 1) == (2, MIB + 5 * 4096 + 100)


def test_a_large_chunk_moves_the_data_offset() -> None:
    assert Geometry.for_members([64 * MIB], 4 * MIB, 4096).data_offset_bytes == 4 * MIB


def test_the_tail_is_the_last_whole_block() -> None:
    assert superblock_offsets(10 * 4096 + 17) == (0, 65536, 9 * 4096)


def test_exactly_enough_room() -> None:
    size = MIB + 4 * 4096 + 4096
    assert Geometry.for_members([size], 4096, 4096).groups[0].row_count == 4
    with pytest.raises(UsageError, match=f"member 0 is too small: expected at least {size} bytes"):
        Geometry.for_members([size - 1], 4096, 4096)


def test_the_smallest_size_is_named_for_an_odd_number_of_rows() -> None:
    size = MIB + 4096 + 4096
    assert Geometry.for_members([size] * 4, 4096, 4096).groups[0].row_count == 1
    with pytest.raises(UsageError, match=rf"member 2 .* at least {size} bytes .* for 1 chunks"):
        Geometry.for_members([size, size, size - 1, size], 4096, 4096)


@pytest.mark.parametrize(
    ("sizes", "chunk_bytes", "block_bytes", "message"),
    [
        ([], 4096, 512, "1..64 members, got 0"),
        ([8 * MIB] * 65, 4096, 512, "1..64 members, got 65"),
        ([8 * MIB], 5000, 512, "a chunk of a power of two"),
        ([8 * MIB], 2048, 512, "a chunk of a power of two in 4096"),
        ([8 * MIB], 0, 512, "a chunk of a power of two"),
        ([8 * MIB], 4096, 256, "a block of a power of two in 512"),
        ([8 * MIB], 4096, 8192, "of at most the chunk"),
        ([8 * MIB, 100], 4096, 512, "member 1 is too small"),
        ([0], 4096, 512, "member 0 is too small"),
        ([1 << 63], 4096, 512, "members of at most"),
    ],
)
def test_a_layout_that_cannot_be(
    sizes: list[int], chunk_bytes: int, block_bytes: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Geometry.for_members(sizes, chunk_bytes, block_bytes)


@pytest.mark.parametrize(("members", "replicas"), [(1, 2), (3, 4), (8, 5), (3, 0)])
def test_more_replicas_than_there_can_be(members: int, replicas: int) -> None:
    with pytest.raises(UsageError, match=f"replicas on {members} members, got {replicas}"):
        Geometry.for_members([8 * MIB] * members, 4096, 4096, replicas)


def test_a_space_resolves_through_its_runs() -> None:
    runs = (ChunkRun(20, 2), ChunkRun(3, 1))
    space = DataSpace(geometry(), runs)
    assert space.size_bytes == 3 * 4096
    assert [space.volume_chunk(chunk) for chunk in range(3)] == [20, 21, 3]
    assert space.resolve(2 * 4096 + 7) == (0, MIB + 4096 + 7)
    assert DataSpace(geometry(), tuple(runs)).resolve(4096) == geometry().locate(21)


@pytest.mark.parametrize("address", [-1, 3 * 4096])
def test_an_address_outside_a_space_is_refused(address: int) -> None:
    with pytest.raises(UsageError, match=r"resolve a chunk: expected 0\.\.2"):
        DataSpace(geometry(), (ChunkRun(20, 3),)).resolve(address)


def test_a_lone_member_gives_one_piece_for_neighbours() -> None:
    space = DataSpace(geometry(1, 30), (ChunkRun(4, 4), ChunkRun(20, 1)))
    assert list(space.member_ranges(100, 5 * 4096 - 100)) == [
        MemberRange(0, MIB + 4 * 4096 + 100, 4 * 4096 - 100),
        MemberRange(0, MIB + 20 * 4096, 4096),
    ]


def test_several_members_give_a_piece_for_each_chunk() -> None:
    space = DataSpace(geometry(2, 30), (ChunkRun(4, 2),))
    assert list(space.member_ranges(4000, 200)) == [
        MemberRange(0, MIB + 2 * 4096 + 4000, 96),
        MemberRange(1, MIB + 2 * 4096, 104),
    ]


def test_a_piece_ends_with_its_run() -> None:
    space = DataSpace(geometry(1, 30), (ChunkRun(4, 1), ChunkRun(20, 2)))
    assert list(space.member_ranges(0, 3 * 4096)) == [
        MemberRange(0, MIB + 4 * 4096, 4096),
        MemberRange(0, MIB + 20 * 4096, 2 * 4096),
    ]


@pytest.mark.parametrize(
    ("count", "first", "remaining"),
    [
        (0, (), ((20, 4), (3, 1), (9, 3))),
        (1, ((20, 1),), ((21, 3), (3, 1), (9, 3))),
        (3, ((20, 3),), ((23, 1), (3, 1), (9, 3))),
        (4, ((20, 4),), ((3, 1), (9, 3))),
        (7, ((20, 4), (3, 1), (9, 2)), ((11, 1),)),
        (8, ((20, 4), (3, 1), (9, 3)), ()),
        (9, ((20, 4), (3, 1), (9, 3)), ()),
    ],
)
def test_runs_are_divided_after_a_number_of_chunks(
    count: int, first: tuple[tuple[int, int], ...], remaining: tuple[tuple[int, int], ...]
) -> None:
    runs = (ChunkRun(20, 4), ChunkRun(3, 1), ChunkRun(9, 3))
    assert split_runs(runs, count) == (
        tuple(ChunkRun(*run) for run in first),
        tuple(ChunkRun(*run) for run in remaining),
    )


def test_no_bytes_are_no_pieces() -> None:
    assert list(DataSpace(geometry(), ()).member_ranges(0, 0)) == []


@pytest.mark.parametrize(("address", "length"), [(0, 4097), (-1, 2), (4096, 1), (0, -1)])
def test_a_range_that_leaves_the_space_is_refused(address: int, length: int) -> None:
    with pytest.raises(UsageError, match="cut a range"):
        list(DataSpace(geometry(), (ChunkRun(0, 1),)).member_ranges(address, length))
