"""A program that interrupts operations of dlfs as Ctrl-C would, at chosen and at random moments.

``python -m tests.fault.interrupting MODES OPERATIONS FOLDER SEED COUNT``

MODES and OPERATIONS are names with commas between them; each operation is interrupted in each mode.
``lines`` raises KeyboardInterrupt at lines of dlfs, ``returns`` on the return of functions of C
that dlfs calls: each run of the operation is interrupted once, at another of the points that it
reaches. ``signals`` lets a timer expire at random moments; ``busy`` does so while a thread opens,
reads and forks.

After each interruption, KeyboardInterrupt must have come out of the operation, no descriptor may be
left, and the next operation on the volume must work. The program prints what was wrong, and a line
with the number of interruptions; it exits with 1 if something was wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import faulthandler
import gc
import itertools
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dlfs
from dlfs._native.library import library
from dlfs.ingest.export.targets import export_dataset
from dlfs.ingest.importer import import_dataset, open_source

HANG_S = 60
"""Longest time of one interrupted operation, after which the program dumps its threads and ends."""

CLOSING_S = 10
"""Longest wait for descriptors that other threads have open for a moment, in seconds."""
LOST = ("signals", "workers")
"""Not tried: lines of PyTorch that start worker processes lose Ctrl-C."""

COUNT = 60
SAMPLE_BYTES = 3000
_PACKAGE = str(Path(dlfs.__file__).parent)
_STANDARD = "not of dlfs"
_DESTROYERS = ("destroy", "release", "cancel", "close", "unmap", "free")

Point = tuple[str, int, int]
"""File, line, and how often the line was reached before; or the name of a function instead."""


class Operations:
    """The operations, each on the volume of a folder. Called by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.volume = str(folder / "volume.img")
        self.service = f"unix:{folder / 's'}"

    def prepare(self) -> None:
        """Make the volume, unless it exists."""
        if os.path.exists(self.volume):
            return
        dlfs.format_volume(self.volume, size_bytes=32 << 20, chunk_bytes=16 << 10)
        with dlfs.open(self.volume) as volume, volume.writer("d") as writer:
            for number in range(COUNT):
                writer.add(f"{number:03}", _sample(number), attributes={"label": number})

    def check(self) -> None:
        """Use the volume as the next program would: read and write it."""
        with dlfs.open(self.volume) as volume:
            if all(info.name != "d" for info in volume.datasets()):
                volume.rename("moved", "d")
            with volume["d"] as dataset:
                assert dataset.get("003") == _sample(3)
            with volume.writer("check") as writer:
                writer.add("a", b"a")
            for info in volume.datasets():
                if info.name != "d":
                    volume.remove(info.name, info.version)

    def format(self) -> None:
        path = self.folder / "new.img"
        path.unlink(missing_ok=True)
        dlfs.format_volume(str(path), size_bytes=8 << 20, chunk_bytes=16 << 10)
        path.unlink()

    def open(self) -> None:
        with dlfs.open(self.volume) as volume, volume["d"] as dataset:
            assert len(dataset) == COUNT

    def read(self) -> None:
        with dlfs.open(self.volume) as volume, volume["d"] as dataset:
            _read(dataset)

    def epoch(self) -> None:
        with dlfs.open(self.volume) as volume, volume["d"] as dataset:
            _iterate(dataset)

    def views(self) -> None:
        with dlfs.open(self.volume) as volume, volume["d"] as dataset:
            first, second = dlfs.split(dataset, 0.5)
            for batch in dlfs.concat([first, second]).batches(16, seed=1):
                batch.release()

    def columns(self) -> None:
        with dlfs.open(self.volume) as volume, volume["d"] as dataset:
            assert dataset.column("label")[3] == 3

    def write(self) -> None:
        with dlfs.open(self.volume) as volume, volume.writer("w") as writer:
            for number in range(20):
                writer.add(f"{number:03}", _sample(number), attributes={"x": number})

    def remove(self) -> None:
        with dlfs.open(self.volume) as volume:
            with volume.writer("r") as writer:
                writer.add("a", b"a")
            volume.remove("r")

    def rename(self) -> None:
        with dlfs.open(self.volume) as volume:
            volume.rename("d", "moved")
            volume.rename("moved", "d")

    def connect(self) -> None:
        with dlfs.connect(self.service) as volume, volume["d"] as dataset:
            _read(dataset)
            _iterate(dataset)

    def copy(self) -> None:
        with dlfs.open(self.volume) as volume, volume["d"] as dataset:
            dlfs.copy_dataset(dataset, volume, "copy")

    def files(self) -> None:
        """Export to a folder, and import that."""
        place = self.folder / "files"
        shutil.rmtree(place, ignore_errors=True)
        with dlfs.open(self.volume) as volume:
            with volume["d"] as dataset:
                export_dataset(dataset, place)
            with contextlib.closing(open_source(place)) as source:
                import_dataset(volume, source, "imported")

    def workers(self) -> None:
        from dlfs.adapters.torch import Loader

        with dlfs.open(self.volume) as volume, volume["d"] as dataset:
            seen = sum(len(batch.indices) for batch in Loader(dataset, 16, seed=1, num_workers=2))
            assert seen == COUNT

    def checkpoint(self) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        from dlfs.adapters.torch.checkpoint import StorageReader, StorageWriter

        saved, loaded = {"weights": torch.arange(5000.0)}, {"weights": torch.zeros(5000)}
        try:
            writer = StorageWriter(self.volume, "run", keep=1)
            dcp.save(saved, storage_writer=writer, checkpoint_id="1", no_dist=True)
            dcp.load(loaded, storage_reader=StorageReader(self.volume, "run"), no_dist=True)
        except dcp.api.CheckpointException as error:  # of all ranks, also for KeyboardInterrupt
            raise error.failures[0][0] from error
        assert loaded["weights"][7] == 7

    def loader(self) -> None:
        from torch.utils.data import DataLoader

        from dlfs.adapters.torch import SampleDataset

        with dlfs.open(self.volume) as volume, volume["d"] as dataset:
            for _ in DataLoader(SampleDataset(dataset), batch_size=16, collate_fn=list):
                pass


def _sample(number: int) -> bytes:
    return random.Random(number).randbytes(SAMPLE_BYTES)


def _read(dataset: dlfs.Dataset) -> None:
    assert dataset.get("003") == _sample(3)
    assert dataset[4] == _sample(4)
    with dataset.read([1, 2, 5]) as batch:
        assert bytes(batch[2]) == _sample(5)


def _iterate(dataset: dlfs.Dataset) -> None:
    seen = 0
    for batch in dataset.batches(16, seed=1, shuffle="global"):
        with batch:
            seen += len(batch)
    assert seen == COUNT


# ---- points --------------------------------------------------------------------------------------


class Tracer:
    """Counts the points that an operation reaches in this thread, and raises at one of them."""

    def __init__(self, *, returns: bool) -> None:
        self._returns = returns
        self.reached: Counter[tuple[str, Any]] = Counter()
        self._target: Point | None = None
        self.raised = False

    def run(self, call: Callable[[], None], target: Point | None) -> None:
        """Run a function, and raise KeyboardInterrupt at a point."""
        self.reached.clear()
        self._target, self.raised = target, False
        (sys.setprofile if self._returns else sys.settrace)(self._trace)  # type: ignore[arg-type]
        try:
            call()
        finally:
            sys.setprofile(None)
            sys.settrace(None)

    def points(self, most: int) -> list[Point]:
        """Return the points that the last run reached, each place at most some times."""
        return [
            (*place, number)
            for place, count in self.reached.items()
            for number in range(min(count, most))
        ]

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if self._returns:
            if event == "c_return":
                self.reach(frame.f_code.co_filename[len(_PACKAGE) :], argument.__name__)
        elif event == "line" and not _leaks(frame):
            self.reach(frame.f_code.co_filename[len(_PACKAGE) :], frame.f_lineno)
        return self._trace

    def reach(self, file: str, place: Any) -> None:
        """Count a point; raise if it is the one."""
        number = self.reached[file, place]
        self.reached[file, place] += 1
        if (file, place, number) == self._target and not self.raised:
            self.raised = True
            raise KeyboardInterrupt


def _leaks(frame: FrameType) -> bool:
    """Return True if CPython 3.11 leaks the frame when a trace function raises at this line.

    Nothing is raised there otherwise: signal handlers do not run at these instructions.
    """
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("POP_EXCEPT", "PUSH_EXC_INFO")


@contextlib.contextmanager
def trace_natives(tracer: Tracer) -> Iterator[None]:
    """Have functions of libdlfs count as points when they return in the main thread."""
    loaded = library()
    natives = {
        name: function
        for name, function in vars(loaded).items()
        if isinstance(function, ctypes._CFuncPtr) and not name.endswith(_DESTROYERS)  # type: ignore[attr-defined]
    }

    def wrap(name: str, function: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if threading.current_thread() is threading.main_thread():
                tracer.reach("libdlfs", name)
            return result

        return call

    for name, function in natives.items():
        setattr(loaded, name, wrap(name, function))
    try:
        yield
    finally:
        vars(loaded).update(natives)


@contextlib.contextmanager
def busy(volume: str) -> Iterator[None]:
    """Have a thread open, read and fork meanwhile, with moments in which it has nothing open."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.003):
            with dlfs.open(volume) as opened, opened["d"] as dataset:
                _iterate(dataset)
                child = os.fork()
                if not child:
                    os._exit(0)
                os.waitpid(child, 0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# ---- checks --------------------------------------------------------------------------------------


class Checks:
    """What must hold after each interruption."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self.problems: Counter[str] = Counter()
        self.interruptions = 0
        self._ignored: list[str] = []
        sys.unraisablehook = self._note_ignored
        self._descriptors = min((_descriptors() for _ in range(100)), key=len)

    def _note_ignored(self, unraisable: Any) -> None:
        code: CodeType | None = getattr(unraisable.object, "__code__", None)
        where = f"{unraisable.object}"
        if code:
            whose = "" if code.co_filename.startswith(_PACKAGE) else f"{_STANDARD}: "
            where += f" ({whose}{code.co_filename}:{code.co_firstlineno})"
        self._ignored.append(f"{unraisable.exc_type.__name__} ignored in {where}")

    def _left(self) -> list[str]:
        """Return what is open in addition, once other threads have closed what is theirs."""
        until_s = time.monotonic() + CLOSING_S
        while len(found := _descriptors()) > len(self._descriptors) and time.monotonic() < until_s:
            time.sleep(0.001)
        if len(found) <= len(self._descriptors):
            return []
        return [each for number, each in found.items() if number not in self._descriptors]

    def interrupt(self, name: str, run: Callable[[], None], was_raised: Callable[[], bool]) -> None:
        """Run an operation that is interrupted, and check what is left of it.

        Args:
            name: names the moment, in messages.
            run: the operation.
            was_raised: returns True if the interruption took place.
        """
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        outcome = "ended without an exception"
        self._ignored.clear()
        try:
            run()
        except KeyboardInterrupt:
            outcome = ""
        except BaseException as error:  # noqa: BLE001 - any other outcome is a problem
            outcome = f"raised {type(error).__name__}: {error}"
        self.interruptions += 1
        # CPython ignores what hooks of a fork raise, and callbacks of weak references.
        ends = ("_fork", "_separate_all", _STANDARD)
        lost = any(end in text for text in self._ignored for end in ends)
        if outcome and was_raised() and not lost:
            self.problems[f"{name}: {outcome} {' '.join(self._ignored)}"] += 1
        gc.collect()
        left = self._left()
        if left:
            self.problems[f"{name}: descriptors left: {', '.join(left)}"] += 1
            self._descriptors = _descriptors()
        try:
            self._operations.check()
        except BaseException as error:  # noqa: BLE001 - as above
            self.problems[f"{name}: then the volume: {type(error).__name__}: {error}"] += 1
        faulthandler.cancel_dump_traceback_later()


def _descriptors() -> dict[str, str]:
    """Return what each open descriptor is of, by number."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing, or of another thread
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def run_points(
    operations: Operations, name: str, seed: int, count: int, *, returns: bool
) -> Checks:
    """Interrupt an operation at points that it reaches."""
    operation = getattr(operations, name)
    tracer = Tracer(returns=returns)
    with trace_natives(tracer) if returns else contextlib.nullcontext():
        operation()
        tracer.run(operation, None)
        points = tracer.points(2)
        operations.check()
        gc.collect()
        gc.freeze()  # each interruption collects what it left, and not the modules too
        checks = Checks(operations)
        chosen = random.Random(seed).sample(points, min(count, len(points)))
        for point in chosen:
            where = f"{name} at {point[0]}:{point[1]} #{point[2]}"
            checks.interrupt(
                where, lambda point=point: tracer.run(operation, point), lambda: tracer.raised
            )  # type: ignore[misc]
    print(f"{name}: {len(chosen)} of {len(points)} points", flush=True)
    return checks


def run_signals(operations: Operations, name: str, seed: int, count: int) -> Checks:
    """Interrupt an operation at random moments, by a timer."""
    operation = getattr(operations, name)
    randoms = random.Random(seed)
    came = [0]

    def handle(*_: object) -> None:
        came[0] += 1
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handle)
    operation()
    signal.setitimer(signal.ITIMER_REAL, 1000)
    operation()
    took_s = 1000 - signal.setitimer(signal.ITIMER_REAL, 0)[0]
    operations.check()
    gc.collect()
    gc.freeze()
    checks = Checks(operations)

    def run() -> None:
        came[0] = 0
        try:
            signal.setitimer(signal.ITIMER_REAL, randoms.uniform(1e-5, took_s))
            operation()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    for _ in range(count):
        checks.interrupt(f"{name} by signals", run, lambda: bool(came[0]))
    return checks


def run_mode(operations: Operations, mode: str, name: str, seed: int, count: int) -> Checks:
    """Interrupt an operation in one of the modes."""
    if mode == "signals":
        return run_signals(operations, name, seed, count)
    if mode == "busy":
        copy = str(shutil.copy(operations.volume, operations.folder / "other.img"))
        with busy(copy):
            return run_signals(operations, name, seed, count)
    return run_points(operations, name, seed, count, returns=mode == "returns")


def main() -> int:
    """Run the program."""
    modes, names, folder, seed, count = sys.argv[1:]
    print(f"seed {seed}", flush=True)
    operations = Operations(Path(folder))
    operations.prepare()
    problems = 0
    for mode, name in itertools.product(modes.split(","), names.split(",")):
        if not name or (mode, name) == LOST:
            continue
        checks = run_mode(operations, mode, name, int(seed), int(count))
        for problem, times in sorted(checks.problems.items()):
            print(f"{mode}: {times} times: {problem}", flush=True)
        print(f"{mode}, {name}: {checks.interruptions} interruptions", flush=True)
        problems += len(checks.problems)
    return min(problems, 1)


if __name__ == "__main__":
    sys.exit(main())
