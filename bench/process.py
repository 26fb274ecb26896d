"""Programs that benchmarks start, and how they end.

`run_program` is the entry point of every benchmark. It turns SIGINT, SIGTERM and SIGHUP into
KeyboardInterrupt, so that each benchmark removes its data, unmounts, and stops its servers on the
way out. Ctrl-C reaches all processes of a terminal, SIGTERM perhaps only one. `started` therefore
stops the program that it started when its block ends, and waits until that program has ended.

`start_child` runs a module of the benchmark in a fresh interpreter. The parent writes a job as one
line of JSON, then commands, one word a line. The child's `run_child` answers with lines of JSON.
The standard output of the child goes to its standard error, which the parent writes to a log file,
so that no output of a package is mistaken for an answer.

Threads: none. All functions must be called on the main thread, because signal handlers run there.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, TypeVar

from bench.errors import BenchmarkError, Unavailable, WrongBytesError
from dlfs.base.json_records import from_json, to_json

Job = TypeVar("Job")

ROOT = Path(__file__).parents[1]
"""The checkout: benchmarks start their own modules from here."""

INTERRUPTED = 130
"""Exit code of a program that a signal interrupted, as shells report Ctrl-C."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# ---- signals -------------------------------------------------------------------------------------


class _Interrupt:
    """Signal handler that raises KeyboardInterrupt, now or when signals are no longer deferred."""

    def __init__(self) -> None:
        self._is_ending = self._is_deferred = self._has_arrived = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._is_ending and number != signal.SIGINT:
            return  # the program is cleaning up already
        self._is_ending = True
        self._has_arrived = self._is_deferred
        if not self._is_deferred:
            raise KeyboardInterrupt

    def defer(self) -> None:
        """Defer signals until `deliver`."""
        self._is_deferred = True

    def deliver(self) -> None:
        """Raise KeyboardInterrupt if a signal arrived while signals were deferred."""
        arrived, self._is_deferred, self._has_arrived = self._has_arrived, False, False
        if arrived:
            raise KeyboardInterrupt


_interrupt = _Interrupt()


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a program until it returns or a signal interrupts it, and exit with its code.

    A signal that the process was started to ignore stays ignored: ``nohup`` and a shell's ``&``
    rely on it.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


# ---- programs ------------------------------------------------------------------------------------


def find_program(name: str, package: str) -> str:
    """Return the path of an installed program of a Debian package."""
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"{name} is not installed: apt-get install {package}")
    return found


def output_of(*command: object, **options: Any) -> str:
    """Run a program to its end and return its standard output; ``options`` are subprocess.run's.

    If it fails, Unavailable has the last line of its messages.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, capture_output=True, text=True, **options)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit {done.returncode}"]
        raise Unavailable(f"{Path(words[0]).name}: {lines[-1]}")
    return done.stdout


@contextmanager
def bound_to(core: int | None) -> Iterator[None]:
    """Bind this thread, and threads and processes that it starts, to a core; None binds nothing."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, allowed if core is None else {core})
    except OSError as error:
        raise Unavailable(f"--core {core}: {error.strerror}") from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def started(
    command: Sequence[str | Path], *, grace_seconds: float | None = None, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Start a program, and stop it at the end of the block: send SIGTERM, then wait for its end.

    A signal that arrives while the program starts is raised within the block, so that no program is
    left behind.

    Args:
        command: the program and its arguments.
        grace_seconds: time from SIGTERM until the program is killed; None: unlimited.
        options: arguments of ``subprocess.Popen``.
    """
    _interrupt.defer()
    try:
        process = subprocess.Popen(command, **options)
    except BaseException:
        _interrupt.deliver()
        raise
    try:
        _interrupt.deliver()
        yield process
    finally:
        process.terminate()  # has no effect on a process that has ended
        try:
            process.communicate(timeout=grace_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


# ---- children: the parent's side -----------------------------------------------------------------


class Child:
    """A module of the benchmark that runs in a process of its own; see `start_child`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self.pid = process.pid

    def send(self, line: str) -> None:
        """Send a line. If the child has ended, `answer` reports that."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def answer(self, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Wait for the next answer and return it.

        Raises:
            Unavailable: the child lacks something, failed, or did not answer in time.
            WrongBytesError: it read bytes that differ from the source.
            BenchmarkError: it reported that the benchmark cannot continue.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_seconds)[0]:
            raise Unavailable(f"no answer within {timeout_seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"it failed: {self._last_line()}")
        answer: dict[str, Any] = json.loads(line)
        for key, error in _ERRORS.items():
            if key in answer:
                raise error(answer[key])
        return answer

    def finish(self) -> None:
        """Close the child's standard input, and wait until it has ended without an error."""
        self._process.communicate()
        if self._process.returncode:
            raise Unavailable(f"it failed: {self._last_line()}")

    def _last_line(self) -> str:
        code = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"


_ERRORS: dict[str, type[Exception]] = {
    "unavailable": Unavailable,
    "wrong": WrongBytesError,
    "failed": BenchmarkError,
}
"""Exceptions that a child reports to its parent, by the key of the answer."""


@contextmanager
def start_child(
    module: str,
    job: object,
    log: Path,
    *,
    prefix: Sequence[str] = (),
    grace_seconds: float | None = None,
) -> Iterator[Child]:
    """Run a module in a fresh interpreter, and give it a job.

    At the end of the block the child's input is closed, which ends it. When the block raises, the
    child is stopped instead.

    Args:
        module: name of a module that calls `run_child`.
        job: a dataclass of plain values, whose class the module gives to `run_child`.
        log: file that receives what the child prints.
        prefix: command that the interpreter is started through.
        grace_seconds: time that the child may take to stop.
    """
    command = [*prefix, sys.executable, "-m", module]
    pipe = subprocess.PIPE
    with (
        open(log, "wb") as errors,
        started(
            command,
            grace_seconds=grace_seconds,
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            text=True,
            cwd=ROOT,
        ) as process,
    ):
        child = Child(process, log)
        child.send(to_json(job).decode())
        yield child
        process.communicate()


# ---- children: the child's side ------------------------------------------------------------------


class Parent:
    """The parent of this process, reached through its standard input and output."""

    def __init__(self, commands: TextIO, answers: TextIO) -> None:
        self._commands, self._answers = commands, answers

    def answer(self, **values: Any) -> None:
        """Send an answer of plain values."""
        self._answers.write(json.dumps(values) + "\n")
        self._answers.flush()

    def wait_for(self, command: str) -> None:
        """Wait for a command; exit when the parent sends another one or has closed the pipe."""
        line = self._commands.readline()
        if line != f"{command}\n":
            raise SystemExit(f"expected {command} from the parent, got {line!r}")


def run_child(kind: type[Job], work: Callable[[Job, Parent], None]) -> int:
    """Read the job, do the work, and report the errors of `bench.errors` to the parent."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    parent = Parent(sys.stdin, answers)
    job = from_json(sys.stdin.readline(), kind)
    try:
        work(job, parent)
    except Unavailable as reason:
        parent.answer(unavailable=str(reason))
    except WrongBytesError as error:
        parent.answer(wrong=error.args[0])
    except BenchmarkError as error:
        parent.answer(failed=str(error))
    return 0
