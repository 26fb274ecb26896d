"""Recordings of a case: perf's samples, or callgrind's counts of instructions.

perf samples by the processor's cycles where it can count them, else by CPU time. Set-up is not
recorded: both tools start disabled and are enabled when the work begins.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.errors import Unavailable
from bench.machine import LIBDLFS
from bench.process import Child, find_program, start_child
from bench.profile.costs import Costs, parse_callgrind, parse_perf
from bench.profile.workload import Done, Job

SAMPLES_PER_SECOND = 2999
"""A prime number, so that samples do not coincide with other periodic work."""
PERF_PRIORITY = -20
_LIBRARY = LIBDLFS / "libdlfs.so"


@dataclass(frozen=True, slots=True)
class Recording:
    """The costs of a case.

    Attributes:
        event: unit of the costs: ``cycles``, ``cpu-clock`` or ``instructions``.
        costs: costs by place in the code.
        processes: names of the processes that worked, by process ID.
        done: the work that they did.
    """

    event: str
    costs: Costs
    processes: dict[int, str]
    done: Done


class _Workload:
    """A case that runs in a child process."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.processes = {int(pid): name for pid, name in child.answer().items()}

    def work(self) -> Done:
        """Let it work, and wait until it is done."""
        self._child.send("work")
        answer = self._child.answer()
        cpu = {int(pid): seconds for pid, seconds in answer["cpu_seconds"].items()}
        return Done(answer["samples"], answer["seconds"], cpu)

    def end(self) -> None:
        """Let it end.

        Raises:
            Unavailable: it ended with an error.
        """
        self._child.send("end")
        self._child.finish()


@contextmanager
def _workload(job: Job, folder: str, *prefix: str) -> Iterator[_Workload]:
    """Start a case in a child process, behind the command of a recorder."""
    log = Path(folder) / "workload.log"
    with start_child("bench.profile.workload", asdict(job), log, prefix=prefix) as child:
        yield _Workload(child)


# ---- perf ----------------------------------------------------------------------------------------


def perf_event() -> str:
    """Return the event by which perf can sample here.

    Raises:
        Unavailable: perf is not installed, or may not be used.
    """
    perf = find_program("perf", "linux-perf")
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
    """Sample a case and the processes that serve it.

    Raises:
        Unavailable: perf or the case cannot run here.
    """
    event = perf_event()
    with tempfile.TemporaryDirectory() as folder, _workload(job, folder) as workload:
        output = Path(folder) / "perf.data"
        with _sampling(event, output):
            done = workload.work()
        workload.end()
        text = _perf_script(output, workload.processes)
    costs = parse_perf(text, str(_LIBRARY))
    return Recording(event, costs, workload.processes, done)


@contextmanager
def _sampling(event: str, output: Path) -> Iterator[None]:
    """Sample the machine during the block.

    perf samples all processors instead of the processes. It would follow each new thread of a
    process by an event of its own, and did not end where threads came and went.
    """
    control, answer = (output.with_name(name) for name in ("control", "answer"))
    os.mkfifo(control)
    os.mkfifo(answer)
    command = [find_program("perf", "linux-perf"), "record", "--quiet", "--call-graph", "fp"]
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
    try:
        with contextlib.suppress(PermissionError):  # else a busy machine delays it
            os.setpriority(os.PRIO_PROCESS, perf.pid, PERF_PRIORITY)
        with _control(perf, control, answer) as control_perf:
            control_perf("enable")
            yield
            control_perf("disable")
    finally:
        perf.communicate()


@contextmanager
def _control(
    perf: subprocess.Popen[str], control: Path, answer: Path
) -> Iterator[Callable[[str], None]]:
    """Open the two pipes of perf; yield a function that sends a command to it and waits."""
    # Opened for both directions, so that open() does not wait for the other side.
    commands = os.open(control, os.O_RDWR)
    answers = os.open(answer, os.O_RDWR)

    def send(word: str) -> None:
        os.write(commands, f"{word}\n".encode())
        while not select.select([answers], [], [], 0.1)[0]:
            if perf.poll() is not None:
                assert perf.stderr is not None
                raise Unavailable(f"perf record ended: {perf.stderr.read().strip()}")
        os.read(answers, 64)

    try:
        yield send
    finally:
        os.close(commands)
        os.close(answers)


def _perf_script(output: Path, processes: Iterable[int]) -> str:
    command = [find_program("perf", "linux-perf"), "script", "--input", str(output)]
    command += ["--fields", "pid,period,ip,sym,dso", "--pid", ",".join(map(str, processes))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"perf script ended: {done.stderr.strip()}")
    return done.stdout


# ---- callgrind -----------------------------------------------------------------------------------


def record_callgrind(job: Job) -> Recording:
    """Count the instructions of a case in user space, of the reading process only.

    Raises:
        Unavailable: valgrind or the case cannot run here.
    """
    valgrind = find_program("valgrind", "valgrind")
    with tempfile.TemporaryDirectory() as folder:
        pattern = Path(folder) / "callgrind.out"
        prefix = [valgrind, "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        prefix += [f"--callgrind-out-file={pattern}", f"--log-file={folder}/log"]
        with _workload(job, folder, *prefix) as workload:
            (process,) = (pid for pid, name in workload.processes.items() if name == "reader")
            _callgrind_control("on", process)
            done = workload.work()
            _callgrind_control("off", process)
            workload.end()
        costs = parse_callgrind(pattern.read_text(encoding="utf-8", errors="replace"))
    return Recording("instructions", costs, workload.processes, done)


def _callgrind_control(state: str, process: int) -> None:
    tool = find_program("callgrind_control", "valgrind")
    done = subprocess.run(
        [tool, "-i", state, str(process)], capture_output=True, text=True, check=False
    )
    if done.returncode or "OK" not in done.stdout:
        raise Unavailable(f"callgrind_control: {(done.stdout + done.stderr).strip()}")
