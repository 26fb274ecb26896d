"""The driver of a Ray cluster that runs the workers of an import: ``python -m`` this module.

``RayLauncher`` starts it, so that Ray's threads, signal handlers and output stay out of the process
of the coordinator, which can kill it at any time. Each worker is a task of Ray: a process of the
cluster that runs nothing else, and ends with the task. Ray never runs a task again by itself: the
driver starts another one in place of one that has ended, which joins as another worker, as long as
workers join; tasks that are lost at once are one loss (``Losses``).

Standard input has lines of three numbers: how many workers could have a part, that of the worker
that has joined last, and how many are there. When it ends, also by the death of the coordinator,
the driver cancels all tasks. If it is killed, Ray does so. An error is one line on standard error.

Threads: one for standard input.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from threading import Thread
from typing import Any

import msgspec

from dlfs.base.forks import Event
from dlfs.errors import DeviceError, DlfsError
from dlfs.ingest.workers.engines import LOCAL, RayWorkers
from dlfs.ingest.workers.invitation import VARIABLE
from dlfs.ingest.workers.launching import Losses
from dlfs.ingest.workers.ray_task import run_task

CONNECT_S = 10.0
"""Longest time in which the cluster must accept a connection, in seconds."""
TICK_S = 0.25
NODES_S = 5.0
"""Interval between two looks at the nodes of the cluster, in seconds."""
CANCEL_S = 10.0
"""Longest time in which cancelled tasks end, in seconds."""
_CLOSE_S = 15.0


class Orders:
    """What the coordinator wants, read from standard input by a thread.

    Attributes:
        wanted: number of workers that could have a part.
        last: number of the worker that has joined last; 0 without.
        present: number of workers that have joined and are not lost.
        has_ended: True if the coordinator wants no more workers, or has died.
    """

    def __init__(self) -> None:
        self.wanted = self.last = self.present = 0
        self.has_ended = Event()
        Thread(target=self._read, name="dlfs-orders", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.wanted, self.last, self.present = map(int, line.split())
        self.has_ended.set()
        time.sleep(_CLOSE_S)
        os._exit(1)  # Ray does not return; it cancels the tasks of a driver that has ended


class Tasks:
    """The tasks of an import.

    Args:
        ray: the module, connected to the cluster.
        workers: the workers as the user wants them.
        node: ID of the only node on which workers may run; None for any.
        invitation: what workers need to join.
    """

    def __init__(self, ray: Any, workers: RayWorkers, node: str | None, invitation: str) -> None:
        self._ray = ray
        self._workers = workers
        self._node = node
        self._invitation = invitation
        # Its process ends with the task, and Ray never runs it again.
        self._remote = ray.remote(max_calls=1, max_retries=0)(run_task)
        # With the node of each that is bound to one, and the round in which it was started.
        self._running: dict[Any, tuple[str | None, int]] = {}
        self._nodes: list[str] = []
        self._nodes_until_s = 0.0
        self._last = 0
        self._losses = Losses()

    def wait(self, last: int, present: int) -> None:
        """Wait for the end of tasks, a moment long, and note how they have ended.

        Args:
            last: number of the worker that has joined last.
            present: number of workers that have joined and are not lost.

        Raises:
            DeviceError: the tasks end before they join.
        """
        if present or last > self._last:
            self._last = last
            self._losses.note_progress()
        if not self._running:
            time.sleep(TICK_S)
            return
        ended, _ = self._ray.wait([*self._running], num_returns=1, timeout=TICK_S)
        for task in ended:
            _, began = self._running.pop(task)
            self._note_end(task, began)

    def _note_end(self, task: Any, began: int) -> None:
        errors = self._ray.exceptions
        deaths = (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.TaskUnschedulableError,  # the node to which it was bound is lost
        )
        try:
            reason = self._ray.get(task)
            died = False
        except deaths as error:
            reason, died = _one_line(error), True
        except errors.RayError as error:
            reason, died = _one_line(error), False
        if not reason:
            return
        self._losses.note(began, was_killed=died)
        print(f"a task of Ray has ended: {reason}", file=sys.stderr, flush=True)
        if self._losses.is_error:
            raise DeviceError(
                f"run workers by Ray: expected tasks that join the import, but they ended before, "
                f"{self._losses.count} times in a row; the last: {reason}",
                0,
            )

    def start(self, wanted: int) -> None:
        """Start the tasks that are missing.

        Raises:
            DeviceError: no node of the cluster has what a worker is to reserve.
        """
        if time.monotonic() < self._losses.not_before_s:
            return
        if self._workers.count is not None:
            while len(self._running) < min(wanted, self._workers.count):
                self._start(self._node)
            return
        busy = {node for node, _ in self._running.values()}
        for node in self._find_nodes():
            if len(self._running) < wanted and node not in busy:
                self._start(node)

    def _start(self, node: str | None) -> None:
        strategy: Any = "SPREAD"
        if node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        options = self._remote.options(
            name="dlfs import-worker",
            num_cpus=self._workers.cpus,
            resources=self._workers.resources or None,
            scheduling_strategy=strategy,
        )
        self._running[options.remote(self._invitation)] = node, self._losses.round

    def _find_nodes(self) -> list[str]:
        """Return the IDs of the nodes that have what a worker reserves."""
        if time.monotonic() >= self._nodes_until_s:
            self._nodes_until_s = time.monotonic() + NODES_S
            amounts = {"CPU": self._workers.cpus, **self._workers.resources}
            found = [node for node in self._ray.nodes() if node["Alive"]]
            self._nodes = sorted(
                node["NodeID"] for node in found
                if self._node in (None, node["NodeID"])
                and all(node["Resources"].get(name, 0) >= most for name, most in amounts.items())
            )  # fmt: skip
            if not self._nodes and not self._running:
                raise DeviceError(
                    f"run workers by Ray: expected a node with {_amounts(amounts)}, got "
                    f"{len(found)} without; ?workers=N waits for one",
                    0,
                )
        return self._nodes

    def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = [*self._running]
        for task in tasks:
            self._ray.cancel(task, force=True)
        if tasks:
            self._ray.wait(tasks, num_returns=len(tasks), timeout=CANCEL_S)


def connect(workers: RayWorkers) -> Any:
    """Connect to the cluster; return the module ``ray``.

    Raises:
        DeviceError: there is no cluster at the address.
    """
    if workers.address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if workers.host is not None:  # Ray itself takes minutes to find that nothing listens
        try:
            socket.create_connection((workers.host, workers.port), CONNECT_S).close()
        except OSError as error:
            raise DeviceError(
                f"run workers by Ray: connect to {workers.address}: {error.strerror or error}",
                error.errno or 0,
            ) from error
    import ray
    import ray.exceptions

    options: dict[str, Any] = {"include_dashboard": False} if workers.address == LOCAL else {}
    try:
        ray.init(workers.address, log_to_driver=False, logging_level="CRITICAL", **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise DeviceError(
            f"run workers by Ray: connect to {workers.address}: {_one_line(error)}", 0
        ) from error
    return ray


def _amounts(amounts: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _one_line(error: BaseException) -> str:
    """Return the text of an error of Ray as one line: the last of a traceback, or all of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    is_traceback = any(line.startswith("File ") for line in lines)
    text = lines[-1] if is_traceback else " ".join(lines)
    return f"{type(error).__name__}: {text[:1000]}"


def main() -> int:
    """Run workers until standard input ends; return the exit code."""
    workers = msgspec.json.decode(sys.argv[1], type=RayWorkers)
    orders = Orders()
    try:
        ray = connect(workers)
        node = ray.get_runtime_context().get_node_id() if "here" in sys.argv[2:] else None
        tasks = Tasks(ray, workers, node, os.environ[VARIABLE])
        try:
            while not orders.has_ended.is_set():
                tasks.start(orders.wanted)
                tasks.wait(orders.last, orders.present)
        finally:
            with suppress(Exception):  # Ray cancels them when this process ends
                tasks.cancel()
            ray.shutdown()
    except DlfsError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
