import pytest

from dlfs.errors import SpaceError
from dlfs.format.geometry import ChunkRun, MemberGroup
from dlfs.store.space import FreeSpace, append_run, count_chunks, merge_runs


def test_runs_that_touch_become_one():
    assert merge_runs([ChunkRun(5, 2), ChunkRun(0, 3), ChunkRun(3, 2)]) == [ChunkRun(0, 7)]


def test_empty_runs_vanish():
    assert merge_runs([ChunkRun(5, 0), ChunkRun(1, 1)]) == [ChunkRun(1, 1)]


def test_overlapping_runs_are_refused():
    with pytest.raises(ValueError, match="chunk 4 is in two runs"):
        merge_runs([ChunkRun(0, 5), ChunkRun(4, 1)])


def test_appending_extends_the_last_run():
    runs = [ChunkRun(3, 1)]
    append_run(runs, ChunkRun(4, 2))
    append_run(runs, ChunkRun(0, 1))
    assert runs == [ChunkRun(3, 3), ChunkRun(0, 1)]


def test_take_gives_the_lowest_chunks_in_one_run():
    space = FreeSpace([ChunkRun(10, 4), ChunkRun(2, 2)])
    assert space.take(3) == ChunkRun(2, 2)
    assert space.take(3) == ChunkRun(10, 3)
    assert space.chunk_count == 1


def test_take_leaves_the_reserve():
    space = FreeSpace([ChunkRun(0, 4)], reserve=3)
    assert space.take(9) == ChunkRun(0, 1)
    with pytest.raises(SpaceError, match="3 are kept"):
        space.take(1)
    assert space.take_all(3) == [ChunkRun(1, 3)]


def test_take_all_prefers_one_run():
    space = FreeSpace([ChunkRun(0, 2), ChunkRun(5, 8)])
    assert space.take_all(3) == [ChunkRun(10, 3)]
    assert space.runs() == [ChunkRun(0, 2), ChunkRun(5, 5)]


def test_data_and_directories_come_from_opposite_ends():
    space = FreeSpace([ChunkRun(0, 2), ChunkRun(5, 8)])
    assert (space.take(4), space.take(4)) == (ChunkRun(0, 2), ChunkRun(5, 4))
    assert (space.take_all(2), space.take_all(2)) == ([ChunkRun(11, 2)], [ChunkRun(9, 2)])
    assert (space.take_all(0), space.chunk_count) == ([], 0)


def test_take_all_gathers_the_longest_runs():
    space = FreeSpace([ChunkRun(0, 1), ChunkRun(3, 2), ChunkRun(8, 3)])
    assert space.take_all(5, runs_max=2) == [ChunkRun(3, 2), ChunkRun(8, 3)]
    assert space.runs() == [ChunkRun(0, 1)]


def test_take_all_takes_nothing_when_it_cannot():
    space = FreeSpace([ChunkRun(0, 1), ChunkRun(3, 2)])
    with pytest.raises(SpaceError, match="at most 1 runs"):
        space.take_all(3, runs_max=1)
    assert space.chunk_count == count_chunks(space.runs()) == 3


def test_nothing_is_taken_for_nothing():
    assert FreeSpace([]).take_all(0) == []


def test_released_runs_are_free_again():
    space = FreeSpace([ChunkRun(0, 4)])
    taken = space.take_all(4)
    space.give_back(taken)
    assert space.runs() == [ChunkRun(0, 4)]
    assert space.chunk_count == 4


def test_stripes_are_taken_from_the_group_with_the_most_free_chunks():
    groups = [MemberGroup(0, 0, 1, 10), MemberGroup(11, 1, 1, 6)]
    space = FreeSpace([ChunkRun(4, 6), ChunkRun(11, 6)], reserve=1, groups=groups, stripe=3)
    taken = [space.take(2) for _ in range(6)]
    assert taken == [
        ChunkRun(4, 2), ChunkRun(6, 2),  # a stripe of the first of two groups that are equal
        ChunkRun(11, 2), ChunkRun(13, 2),
        ChunkRun(8, 2), ChunkRun(15, 1),
    ]  # fmt: skip
    assert (space.free_in(groups[1]), space.chunk_count) == (0, 1)


def test_chunks_are_allocated_in_one_group():
    groups = [MemberGroup(0, 0, 1, 10), MemberGroup(11, 1, 1, 6)]
    space = FreeSpace([ChunkRun(4, 6), ChunkRun(11, 6)], groups=groups)
    assert space.take_all(4, group=groups[0]) == [ChunkRun(6, 4)]
    with pytest.raises(SpaceError):
        space.take_all(3, group=groups[0])
    assert space.take_all(2, group=groups[0]) == [ChunkRun(4, 2)]
