"""How many workers may be lost: all at once, again and again, as long as workers join."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlfs.errors import DeviceError
from dlfs.ingest.workers import launching
from dlfs.ingest.workers.engines import RayWorkers
from dlfs.ingest.workers.invitation import Invitation, boot_id
from dlfs.ingest.workers.launching import DEATHS_MAX, FAILURES_MAX, Losses, ProcessLauncher
from dlfs.ingest.workers.messages import Hello
from dlfs.ingest.workers.ray_driver import Tasks

COUNT = 2 * DEATHS_MAX


class _RayError(Exception):
    pass


class _WorkerCrashedError(_RayError):
    pass


class Ray:
    """What ``Tasks`` needs of the module; ``ended`` has the results of tasks, or their errors."""

    def __init__(self) -> None:
        self.ended: dict[int, Any] = {}
        self.started = 0
        self.exceptions = SimpleNamespace(
            RayError=_RayError,
            WorkerCrashedError=_WorkerCrashedError,
            NodeDiedError=_WorkerCrashedError,
            OutOfMemoryError=_WorkerCrashedError,
            TaskUnschedulableError=_WorkerCrashedError,
        )

    def remote(self, *_arguments: Any, **_options: Any) -> Any:
        """Return a decorator, or start a task, as which of its objects is called."""

        def start(_invitation: str) -> int:
            self.started += 1
            return self.started

        options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))
        return lambda _function: options

    def wait(self, tasks: list[int], **_options: Any) -> tuple[list[int], list[int]]:
        return [task for task in tasks if task in self.ended][:1], []

    def get(self, task: int) -> Any:
        if isinstance(self.ended[task], Exception):
            raise self.ended[task]
        return self.ended[task]

    def end_all(self, result: Any) -> int:
        """End all tasks that run; return their number."""
        running = [task for task in range(1, self.started + 1) if task not in self.ended]
        self.ended |= dict.fromkeys(running, result)
        return len(running)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "PAUSE_S", 0.0)


@pytest.mark.parametrize(
    ("result", "most"),
    [("lost its right to write", FAILURES_MAX), (_WorkerCrashedError("killed"), DEATHS_MAX)],
)
def test_tasks_of_ray(result: Any, most: int) -> None:
    ray = Ray()
    tasks = Tasks(ray, RayWorkers("local", COUNT, 1.0, {}), None, "invitation")

    def lose_all(last: int, present: int) -> None:
        tasks.start(COUNT)
        assert ray.end_all(result) == COUNT
        for _ in range(COUNT):
            tasks.wait(last, present)

    for _ in range(most - 1):
        lose_all(0, 0)
    for last in range(1, most):  # a worker has joined meanwhile, and was lost
        lose_all(last, 0)
    for _ in range(most):  # one still works
        lose_all(most, 1)
    for _ in range(most - 1):
        lose_all(most, 0)
    with pytest.raises(DeviceError, match=f"they ended before, {most} times in a row; the last: "):
        lose_all(most, 0)


def test_a_worker_counts_once_a_loss() -> None:
    losses = Losses()
    began = losses.round
    for _ in range(COUNT):
        losses.note(began, was_killed=False)
    assert (losses.count, losses.is_error) == (1, False)
    for _ in range(FAILURES_MAX - 1):
        losses.note(losses.round, was_killed=False)
    assert losses.is_error
    losses.note_progress()
    assert (losses.count, losses.is_error) == (0, False)


def test_a_process_of_another_host_is_not_taken_for_a_child() -> None:
    """Both have the same ID: the child has not joined."""
    launcher = ProcessLauncher(1, Invitation("none", boot_id()))
    try:
        launcher.check(1, {})
        (child,) = launcher._children
        hello = Hello(1, "", b"", "elsewhere", "another host", child.process.pid)
        launcher.check(1, {1: hello})
        assert not child.has_joined
        launcher.check(1, {1: hello, 2: Hello(1, "", b"", "here", boot_id(), child.process.pid)})
        assert child.has_joined
    finally:
        launcher.close()
