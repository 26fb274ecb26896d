"""The book of grants: who may write which chunks."""

from __future__ import annotations

import pytest

from dlfs.errors import UsageError
from dlfs.format.geometry import ChunkRun
from dlfs.store.grants import GrantBook, LostGrant


def book() -> GrantBook:
    made = GrantBook()
    made.add([ChunkRun(10, 5), ChunkRun(0, 4)])
    return made


def test_chunks_go_from_the_pool_to_workers_and_to_steps() -> None:
    grants = book()
    assert grants.take("a", 6) == [ChunkRun(0, 4), ChunkRun(10, 2)]
    assert grants.take("b", 100) == [ChunkRun(12, 3)]
    assert grants.take("c", 1) == []
    assert grants.runs() == [ChunkRun(0, 4), ChunkRun(10, 5)]
    grants.use("a", [ChunkRun(10, 1), ChunkRun(1, 2)])
    assert grants.held == {
        "a": [ChunkRun(0, 1), ChunkRun(3, 1), ChunkRun(11, 1)],
        "b": [ChunkRun(12, 3)],
    }
    grants.give_back("a", [ChunkRun(3, 1)])
    grants.give_back("b")
    grants.give_back("c")
    assert grants.pool == [ChunkRun(3, 1), ChunkRun(12, 3)]
    assert (grants.pool_chunks, list(grants.held)) == (4, ["a"])


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([ChunkRun(3, 2)], "granted to it, got 2 from 3 on"),
        ([ChunkRun(10, 3)], "granted to it, got 3 from 10 on"),
        ([ChunkRun(0, 2), ChunkRun(1, 1)], "each chunk once"),
        ([ChunkRun(0, 4), ChunkRun(100, 1)], "granted to it, got 1 from 100 on"),
    ],
)
def test_what_was_not_granted_cannot_be_used(runs: list[ChunkRun], message: str) -> None:
    grants = book()
    grants.take("a", 6)
    grants.take("b", 2)
    held = dict(grants.held)
    for action in (grants.use, grants.check, grants.give_back):
        with pytest.raises(UsageError, match=rf"worker 'a': .*{message}"):
            action("a", runs)
    assert grants.held == held


def test_chunks_of_a_lost_worker_are_nobodys_until_it_cannot_write() -> None:
    grants = book()
    grants.take("a", 6)
    grants.lose("a", 20.0)
    grants.lose("b", 30.0)  # which has nothing
    assert grants.lost == [LostGrant("a", (ChunkRun(0, 4), ChunkRun(10, 2)), 20.0)]
    assert grants.take("c", 100) == [ChunkRun(12, 3)]
    assert grants.runs() == [ChunkRun(0, 4), ChunkRun(10, 5)]
    assert grants.lost_until_s == 20.0
    assert grants.runs_without([ChunkRun(13, 1)], 19.0) == [
        ChunkRun(0, 4),
        ChunkRun(10, 3),
        ChunkRun(14, 1),
    ]
    assert grants.expire(19.9) == []
    assert grants.runs_without([], 20.0) == [ChunkRun(12, 3)]
    assert grants.expire(20.0) == [ChunkRun(0, 4), ChunkRun(10, 2)]
    assert (grants.runs(), grants.lost_until_s) == ([ChunkRun(12, 3)], None)
    assert "3 held" not in repr(grants)
