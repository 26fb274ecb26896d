"""Recordings of a case: the samples of perf.

perf samples by the processor's cycles where it can count them, else by CPU time. Set-up is not
recorded: perf starts disabled and is enabled when the work begins.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.errors import Unavailable
from bench.machine import LIBDLFS
from bench.process import Child, find_program, output_of, start_child
from bench.profile.costs import Costs, parse_perf
from bench.profile.workload import Done, Job

SAMPLES_PER_SECOND = 2999
"""A prime number, so that samples do not coincide with other periodic work."""
PERF_PRIORITY = -20
_LIBRARY = LIBDLFS / "libdlfs.so"


@dataclass(frozen=True, slots=True)
class Recording:
    """The costs of a case.

    Attributes:
        event: unit of the costs: ``cycles`` or ``cpu-clock``.
        costs: costs by place in the code.
        processes: names of the processes that worked, by process ID.
        done: the work that they did.
    """

    event: str
    costs: Costs
    processes: dict[int, str]
    done: Done


@contextmanager
def _workload(job: Job, folder: str, *prefix: str) -> Iterator[tuple[Child, dict[int, str]]]:
    """Start a case behind the command of a recorder; yield it with its processes' names."""
    log = Path(folder) / "workload.log"
    with start_child("bench.profile.workload", job, log, prefix=prefix) as child:
        yield child, {int(pid): name for pid, name in child.answer().items()}


# ---- perf ----------------------------------------------------------------------------------------


def find_perf() -> str:
    """Return the path of perf."""
    return find_program("perf", "linux-perf")


def perf_event() -> str:
    """Return the event by which perf can sample here."""
    perf = find_perf()
    for event in ("cycles", "cpu-clock"):
        done = subprocess.run(
            [perf, "stat", "--all-cpus", "--event", event, "--field-separator", ",", "true"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 and "<not" not in done.stderr:
            return event
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
    raise Unavailable(f"perf cannot sample all processors here, which takes root: {reason}")


def record_perf(job: Job) -> Recording:
    """Sample a case and the processes that serve it."""
    event = perf_event()
    with (
        tempfile.TemporaryDirectory() as folder,
        _workload(job, folder) as (child, processes),
    ):
        output = Path(folder) / "perf.data"
        with _sampling(event, output):
            child.send("work")
            done = Done(**child.answer())
        child.send("end")
        child.finish()
        words = ["--fields", "pid,period,ip,sym,dso", "--pid", ",".join(map(str, processes))]
        text = output_of(find_perf(), "script", "--input", output, *words)
    return Recording(event, parse_perf(text, str(_LIBRARY)), processes, done)


@contextmanager
def _sampling(event: str, output: Path) -> Iterator[None]:
    """Sample the machine during the block.

    perf samples all processors instead of the processes. It would follow each new thread of a
    process by an event of its own, and did not end where threads came and went.
    """
    control, answer = (output.with_name(name) for name in ("control", "answer"))
    os.mkfifo(control)
    os.mkfifo(answer)
    command = [find_perf(), "record", "--quiet", "--call-graph", "fp"]
    command += ["--event", event, "--freq", str(SAMPLES_PER_SECOND), "--delay", "-1"]
    command += ["--all-cpus", "--output", str(output)]
    # perf records while its command runs. cat ends with its input, so with this process as well.
    command += ["--control", f"fifo:{control},{answer}", "--", "cat"]
    perf = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Opened for both directions, so that open() does not wait for the other side.
    with open(control, "r+b", buffering=0) as commands, open(answer, "r+b", buffering=0) as answers:

        def send(word: str) -> None:
            commands.write(f"{word}\n".encode())
            while not select.select([answers], [], [], 0.1)[0]:
                if perf.poll() is not None:
                    assert perf.stderr is not None
                    raise Unavailable(f"perf record ended: {perf.stderr.read().strip()}")
            answers.read(64)

        try:
            with contextlib.suppress(PermissionError):  # else a busy machine delays it
                os.setpriority(os.PRIO_PROCESS, perf.pid, PERF_PRIORITY)
            send("enable")
            yield
            send("disable")
        finally:
            perf.communicate()
