"""The pauses that a keeper makes between servers that die."""

from __future__ import annotations

from dlfs.mount.supervise.keeper import (
    FAILING_SECONDS_MAX,
    PAUSE_SECONDS_MAX,
    PAUSE_SECONDS_MIN,
    YOUNG_SECONDS,
    Failures,
)


def test_pauses_double_up_to_a_limit_and_end_after_a_minute() -> None:
    failures = Failures()
    now_s, pauses = 100.0, []
    while (pause_s := failures.pause_after(YOUNG_SECONDS / 2, now_s)) is not None:
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses[:4] == [0, PAUSE_SECONDS_MIN, 2 * PAUSE_SECONDS_MIN, 4 * PAUSE_SECONDS_MIN]
    assert pauses[-1] == max(pauses) == PAUSE_SECONDS_MAX
    assert FAILING_SECONDS_MAX < sum(pauses) <= FAILING_SECONDS_MAX + PAUSE_SECONDS_MAX


def test_a_server_that_answered_for_long_is_replaced_at_once() -> None:
    failures = Failures()
    for number in range(1000):
        assert failures.pause_after(YOUNG_SECONDS, number * YOUNG_SECONDS) == 0
    assert failures.pause_after(0, 1000 * YOUNG_SECONDS) == PAUSE_SECONDS_MIN
