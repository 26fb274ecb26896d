"""Threads that the system refuses, and threads that Ctrl-C interrupts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import dlfs
from dlfs.base.threads import ThreadPool, map_waiting, run_in_time, run_waiting, start_thread
from tests.support.forked import run_forked


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
def test_a_refused_thread_is_a_limit() -> None:
    with pytest.raises(dlfs.LimitError, match=r"thread name: .* no more threads"):
        start_thread(threading.Thread(target=print, name="name"))
    with (
        ThreadPool(1, thread_name_prefix="pool") as pool,
        pytest.raises(dlfs.LimitError, match=r"thread pool: .* no more threads"),
    ):
        pool.submit(print)


def test_an_interrupt_that_confuses_the_locks_of_threading_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_thread: threading.Thread) -> None:
        lock = threading.Lock()
        try:
            raise KeyboardInterrupt
        finally:
            lock.release()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_thread(threading.Thread(target=print))
    with pytest.raises(KeyboardInterrupt), ThreadPool(1) as pool:
        pool.submit(print)


def test_a_call_whose_thread_was_interrupted_at_its_start_has_ended_with_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    running = threading.Event()
    ended = []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        running.wait()
        raise KeyboardInterrupt

    def run() -> None:
        running.set()
        time.sleep(0.05)
        ended.append(True)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), ThreadPool(1) as pool:
        pool.submit(run)
    assert ended


def test_a_child_ends_the_pool_of_its_parent_without_a_wait() -> None:
    goes_on = threading.Event()
    with ThreadPool(1) as pool:
        pool.submit(goes_on.wait)
        assert run_forked(pool.shutdown) == 0
        goes_on.set()


def test_other_errors_of_a_pool_stay() -> None:
    pool = ThreadPool(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(print)


def test_a_writer_names_the_limit(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    uris = [str(tmp_path / name) for name in ("a.img", "b.img")]
    dlfs.format_volume(uris, size_bytes=16 << 20)
    with dlfs.open(uris) as volume:
        request.getfixturevalue("no_threads")
        with pytest.raises(dlfs.LimitError, match="no more threads"):
            volume.writer("new")


def test_a_call_with_a_time_limit_gives_its_result_its_error_or_a_timeout() -> None:
    goes_on = threading.Event()

    def fail() -> None:
        raise TimeoutError("its own")

    assert run_in_time(lambda: 7, 60) == 7
    with pytest.raises(TimeoutError, match="its own"):
        run_in_time(fail, 60)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        run_in_time(goes_on.wait, 0.01)
    goes_on.set()


def test_a_call_that_is_waited_for_ends_the_wait_by_the_function_called_meanwhile() -> None:
    goes_on = threading.Event()

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_waiting(goes_on.wait, stop)
    goes_on.set()
    assert run_waiting(lambda: 7, stop) == 7


def test_calls_for_many_items_give_their_results_in_order_or_the_first_error_at_once() -> None:
    goes_on = threading.Event()

    def call(number: int) -> int:
        if number == 5:
            raise IndexError("its own")
        if number == 6:
            goes_on.wait()
        return -number

    assert map_waiting(call, range(5), 3) == [0, -1, -2, -3, -4]
    assert map_waiting(call, [], 3) == []
    with pytest.raises(IndexError, match="its own"):
        map_waiting(call, [6, 5], 2)
    goes_on.set()
