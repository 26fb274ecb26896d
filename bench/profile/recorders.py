"""Runs a workload under a recorder: perf's samples, or callgrind's counts of instructions.

perf samples by the processor's cycles where it can count them, else by the clock of the CPU time.
Set-up is not recorded: perf starts disabled and is told when to begin; callgrind likewise.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import LIBDLFS, ROOT, Unavailable
from bench.profile.costs import Costs, parse_callgrind, parse_perf
from bench.profile.workload import Done

SAMPLES_PER_SECOND = 2999
"""No divisor of what else ticks."""
PERF_PRIORITY = -20
_LIBRARY = LIBDLFS / "libdlfs.so"


@dataclass(frozen=True, slots=True)
class Recording:
    """What a workload cost.

    Attributes:
        event: what was counted: ``cycles``, ``cpu-clock`` or ``instructions``.
        costs: by place.
        processes: at work, by number: what they are.
        done: what the workload did.
    """

    event: str
    costs: Costs
    processes: dict[int, str]
    done: Done


@dataclass(frozen=True, slots=True)
class Job:
    """A workload to be run; as the words of its command line.

    Attributes:
        case: which.
        folder: where its data is.
        size_bytes: of the data.
        seconds: to run.
        steps: to run, where not 0.
    """

    case: str
    folder: Path
    size_bytes: int
    seconds: float = 5.0
    steps: int = 0

    def words(self) -> list[str]:
        """Of the command."""
        words = [sys.executable, "-m", "bench.profile.workload", self.case, str(self.folder)]
        words += [str(self.size_bytes), "--seconds", str(self.seconds), "--steps", str(self.steps)]
        return words


class _Child:
    """A workload that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.processes: dict[int, str] = _numbered(self._told())

    def work(self) -> Done:
        """Let it work, and wait for it."""
        self._tell()
        told = self._told()
        return Done(told["samples"], told["seconds"], _numbered(told["cpu_seconds"]))

    def end(self) -> None:
        """Let it end.

        Raises:
            Unavailable: it ended with an error.
        """
        self._tell()
        if self._process.wait():
            raise Unavailable(f"the workload ended with {self._process.returncode}")

    def _tell(self) -> None:
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    def _told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"the workload ended with {self._process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told


def _numbered(values: dict[str, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in values.items()}


@contextmanager
def _child(job: Job, *prefix: str) -> Iterator[_Child]:
    """Run a workload; left early, it loses its input, ends by itself and leaves no mount behind."""
    with subprocess.Popen(
        [*prefix, *job.words()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    ) as process:
        yield _Child(process)


# ---- perf ----------------------------------------------------------------------------------------


def perf_event() -> str:
    """What perf can sample by here.

    Raises:
        Unavailable: perf is not installed, or may not be used.
    """
    perf = _tool("perf", "linux-perf")
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
    """Sample a workload and the processes that serve it.

    Raises:
        Unavailable: perf or the workload cannot run here.
    """
    event = perf_event()
    with tempfile.TemporaryDirectory() as folder, _child(job) as child:
        output = Path(folder) / "perf.data"
        with _sampling(event, output):
            done = child.work()
        child.end()
        text = _perf_script(output, child.processes)
    costs = parse_perf(text, str(_LIBRARY))
    return Recording(event, costs, child.processes, done)


@contextmanager
def _sampling(event: str, output: Path) -> Iterator[None]:
    """Sample the machine during the body; perf says when it has begun and when it has ended.

    All processors, and not the processes: perf follows a process's new threads one event each, and
    was seen to spin for ever where threads come and go.
    """
    control, answer = (output.with_name(name) for name in ("control", "answer"))
    os.mkfifo(control)
    os.mkfifo(answer)
    command = [_tool("perf", "linux-perf"), "record", "--quiet", "--call-graph", "fp"]
    command += ["--event", event, "--freq", str(SAMPLES_PER_SECOND), "--delay", "-1"]
    command += ["--all-cpus", "--output", str(output)]
    # It records as long as its command runs: that ends with its input, so with this process too.
    command += ["--control", f"fifo:{control},{answer}", "--", "cat"]
    perf = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with contextlib.suppress(PermissionError):  # else it starves on a busy machine
            os.setpriority(os.PRIO_PROCESS, perf.pid, PERF_PRIORITY)
        with _opened(perf, control, answer) as tell:
            tell("enable")
            yield
            tell("disable")
    finally:
        perf.communicate()


@contextmanager
def _opened(
    perf: subprocess.Popen[str], control: Path, answer: Path
) -> Iterator[Callable[[str], None]]:
    """The two pipes of perf; gives what tells it something and waits for its answer."""
    # Opened for both directions, so that nobody waits for one who is not there.
    commands = os.open(control, os.O_RDWR)
    answers = os.open(answer, os.O_RDWR)

    def tell(word: str) -> None:
        os.write(commands, f"{word}\n".encode())
        while not select.select([answers], [], [], 0.1)[0]:
            if perf.poll() is not None:
                assert perf.stderr is not None
                raise Unavailable(f"perf record ended: {perf.stderr.read().strip()}")
        os.read(answers, 64)

    try:
        yield tell
    finally:
        os.close(commands)
        os.close(answers)


def _perf_script(output: Path, processes: Iterable[int]) -> str:
    command = [_tool("perf", "linux-perf"), "script", "--input", str(output)]
    command += ["--fields", "pid,period,ip,sym,dso", "--pid", ",".join(map(str, processes))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"perf script ended: {done.stderr.strip()}")
    return done.stdout


# ---- callgrind -----------------------------------------------------------------------------------


def record_callgrind(job: Job) -> Recording:
    """Count the instructions of a workload, in user space, of the reading process only.

    Raises:
        Unavailable: valgrind or the workload cannot run here.
    """
    valgrind = _tool("valgrind", "valgrind")
    with tempfile.TemporaryDirectory() as folder:
        pattern = Path(folder) / "callgrind.out"
        prefix = [valgrind, "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        prefix += [f"--callgrind-out-file={pattern}", f"--log-file={folder}/log"]
        with _child(job, *prefix) as child:
            (process,) = (pid for pid, name in child.processes.items() if name == "reader")
            _callgrind_control("on", process)
            done = child.work()
            _callgrind_control("off", process)
            child.end()
        costs = parse_callgrind(pattern.read_text(encoding="utf-8", errors="replace"))
    return Recording("instructions", costs, child.processes, done)


def _callgrind_control(state: str, process: int) -> None:
    tool = _tool("callgrind_control", "valgrind")
    done = subprocess.run(
        [tool, "-i", state, str(process)], capture_output=True, text=True, check=False
    )
    if done.returncode or "OK" not in done.stdout:
        raise Unavailable(f"callgrind_control: {(done.stdout + done.stderr).strip()}")


def _tool(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"{name} is not installed: apt-get install {package}")
    return found
