"""Moments of a coordinator that the worlds of tests/property seldom meet."""

from __future__ import annotations

from dlfs.format.geometry import ChunkRun
from dlfs.ingest.workers.coordinator import (
    LOSSES_MAX,
    Begin,
    Commit,
    Confirm,
    Coordinator,
    GrantTimes,
    Send,
)
from dlfs.ingest.workers.messages import (
    PROTOCOL_VERSION,
    RUNS_MAX,
    Granted,
    Hello,
    NeedChunks,
    ProgressMade,
    Ready,
    Renew,
    StepMade,
)
from dlfs.store.grants import GrantBook
from tests.property.test_import_workers import make_content


def begun(
    book: GrantBook,
    runs: list[ChunkRun],
    needed: int,
    times: GrantTimes = GrantTimes(1, 5, None),  # noqa: B008
) -> tuple[Coordinator, int]:
    """Return a coordinator of two parts, and the worker that has the first one and its chunks."""
    coordinator = Coordinator(
        [3000, 3000],
        {},
        book,
        times,
        chunk_bytes=1000,
        setup=b"",
        slots=8,
        now_s=0.0,
    )
    hello = Hello(PROTOCOL_VERSION, "1", b"", "host", "boot", 1)
    worker = coordinator.join(hello, 0.0, can_be_killed=True)
    assert worker is not None
    coordinator.receive(worker, Ready([None]), 0.0)
    coordinator.receive(worker, NeedChunks(needed, True), 0.0)
    coordinator.take_actions()
    book.add(runs)
    coordinator.committed()
    return coordinator, worker


def test_a_step_that_comes_while_the_one_before_is_committed() -> None:
    book = GrantBook()
    coordinator, worker = begun(book, [ChunkRun(0, 8)], 4)
    coordinator.take_actions()
    first = make_content(0, 0, False, [0, 1])
    coordinator.receive(worker, StepMade.of(first), 0.1)
    assert any(isinstance(action, Commit) for action in coordinator.take_actions())
    book.use(str(worker), first.runs)  # by the thread that commits; it has not told the loop yet
    coordinator.receive(worker, StepMade.of(make_content(0, 1, True, [2])), 0.2)
    assert any(isinstance(action, Begin) for action in coordinator.take_actions())
    assert worker in coordinator.workers


def test_chunks_of_a_step_that_is_being_committed_are_refused() -> None:
    book = GrantBook()
    coordinator, worker = begun(book, [ChunkRun(0, 8)], 4)
    coordinator.receive(worker, StepMade.of(make_content(0, 0, False, [0, 1])), 0.1)
    coordinator.take_actions()
    coordinator.receive(worker, StepMade.of(make_content(0, 1, True, [1])), 0.2)
    assert worker not in coordinator.workers


def test_a_grant_has_no_more_runs_than_a_message() -> None:
    book = GrantBook()
    runs = [ChunkRun(2 * number, 1) for number in range(RUNS_MAX + 10)]
    coordinator, _ = begun(book, runs, len(runs))
    sent = [action.message for action in coordinator.take_actions() if isinstance(action, Send)]
    (granted,) = [message for message in sent if isinstance(message, Granted)]
    assert len(granted.runs) == RUNS_MAX
    assert book.pool_chunks == 10


def test_a_full_volume_has_room_when_the_chunks_of_a_lost_worker_are_free() -> None:
    """The commit that frees them cannot list them itself: it is the next one that does."""
    book = GrantBook()
    coordinator, lost = begun(book, [ChunkRun(0, 8)], 8, GrantTimes(1, 5, 10))
    coordinator.take_actions()
    coordinator.leave(lost, "its connection has ended")
    coordinator.gone(lost)
    hello = Hello(PROTOCOL_VERSION, "1", b"", "host", "boot", 2)
    worker = coordinator.join(hello, 1.0, can_be_killed=False)
    assert worker is not None
    coordinator.receive(worker, Ready([None]), 1.0)
    coordinator.receive(worker, NeedChunks(4, True), 1.0)
    is_free = False
    for second in range(1, 30):
        coordinator.receive(worker, Renew(second), second)
        coordinator.check_time(second)
        for action in coordinator.take_actions():
            if isinstance(action, Confirm):
                coordinator.confirmed(second)
            elif isinstance(action, Commit):
                book.add([ChunkRun(0, 8)] if is_free else [])
                is_free = bool(book.expire(second))
                coordinator.committed()
    assert coordinator.failure is None
    assert book.held.keys() == {str(worker)}


def test_workers_that_are_lost_at_once_say_nothing_of_a_part() -> None:
    """Each is given the part of the one before, as nobody knows yet that it is lost as well."""
    coordinator, first = begun(GrantBook(), [], 1)
    hello = Hello(PROTOCOL_VERSION, "1", b"", "host", "boot", 2)

    def join(count: int) -> list[int]:
        numbers = [coordinator.join(hello, 0.0, can_be_killed=True) for _ in range(count)]
        for number in numbers:
            assert number is not None
            coordinator.receive(number, Ready([None]), 0.0)
        return [number for number in numbers if number is not None]

    coordinator.receive(first, ProgressMade(0, 0, 0, 0), 0.1)
    for number in [first, *join(2 * LOSSES_MAX)]:
        coordinator.leave(number, "its host is lost")
        coordinator.gone(number)
    assert coordinator.failure is None
    for _ in range(LOSSES_MAX - 1):
        assert coordinator.failure is None
        (number,) = join(1)
        coordinator.receive(number, ProgressMade(0, 0, 0, 0), 0.2)
        coordinator.leave(number, "it was killed")
        coordinator.gone(number)
    assert "part 0" in str(coordinator.failure)
    assert "without a further step" in str(coordinator.failure)
