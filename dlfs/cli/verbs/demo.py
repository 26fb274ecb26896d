"""``dlfs demo``: shows all of DLFS on real images, in under a minute.

The demo writes handwritten digits as PNG files, imports them as a dataset, and trains a small
network on it, in a new global order every epoch. It compares the mount with the files, and times
three ways to read. If PyTorch is installed, it kills a training whose worker processes read through
a node service, and resumes it. At the end, also after an error, the demo unmounts, and removes its
files unless the user keeps them.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import dlfs
from dlfs.cli.output import (
    Table,
    human_count,
    human_seconds,
    human_size,
    share_bar,
    stdout_console,
)
from dlfs.errors import DlfsError, UsageError
from dlfs.extras import install_command
from dlfs.units import MIB

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from dlfs import Dataset

VOLUME_BYTES = 32 * MIB
SEED = 7
EPOCHS = 12
BATCH = 64
ACCURACY_MIN = 0.9
TORCH_EPOCHS = 3
TORCH_KILLED_BEHIND = "1 960"
"""Epoch and position at which the training is killed: in the middle of the second epoch."""
READ_BATCH = 256
READ_SECONDS = 0.5
"""Least time that each way to read is repeated, in whole passes, in seconds."""
REPORT_COLUMNS = 100
DIGITS_SHOWN = 4
DIGIT_COLUMNS = 22
READ_BYTES_MAX = 1 * MIB
"""Size of one read; all files are smaller."""


class DemoError(DlfsError):
    """A step of the demo failed."""


@dataclass
class _Demo:
    """Folder and console of the demo, which its steps share."""

    folder: Path
    console: Console

    @property
    def source(self) -> Path:
        return self.folder / "digits"

    @property
    def volume(self) -> str:
        return str(self.folder / "volume.img")

    @property
    def mount_point(self) -> Path:
        return self.folder / "mount"

    @contextmanager
    def step(self, name: str, doing: str) -> Iterator[Callable[[str], None]]:
        """Run a step with a spinner, then print its line; the block passes the line's text."""
        texts: list[str] = []
        begin = time.perf_counter()
        with self.console.status(f"[bold]{name}[/]  {doing}"):
            try:
                yield texts.append
            except BaseException:
                self.console.print(f"[bold red]✗[/] [bold]{name:<8}[/] {doing}")
                raise
        seconds = human_seconds(time.perf_counter() - begin)
        self.line("[bold green]✓[/]", name, " ".join(texts), seconds)

    def line(self, mark: str, name: str, text: str, seconds: str = "") -> None:
        """Print one aligned line: mark, name, text, and the time on the right if there is room."""
        from rich.table import Table

        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(width=1)
        grid.add_column(width=8, style="bold")
        grid.add_column(ratio=1)
        grid.add_column(justify="right", style="dim", no_wrap=True)
        grid.add_row(mark, name, text, seconds)
        self.console.print(grid, width=min(self.console.width, REPORT_COLUMNS))

    def left_out(self, name: str, reason: str) -> None:
        """Print the line of a step that cannot run on this machine."""
        from rich.markup import escape

        self.line("[yellow]–[/]", name, f"[yellow]left out: {escape(reason)}[/]")


def demo(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Work below this folder, not below /tmp."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the files and the volume, and say where.")
    ] = False,
) -> None:
    """Import, verify, mount and train on 1,797 real images, and time three ways to read them."""
    _check_packages()
    console = stdout_console()
    with ExitStack() as cleanup, _terminated_as_interrupted():
        work = _Demo(_make_folder(directory, keep, cleanup), console)
        console.print()
        console.rule(
            "[bold]DLFS[/]: 1,797 handwritten digits, from files to training", align="left"
        )
        console.print()
        _make_dataset(work)
        mounted = _mount(work, cleanup)
        with dlfs.open(work.volume) as volume, volume.dataset("digits") as dataset:
            _train(work, dataset)
            _train_with_torch(work, dataset)
            _time_reads(work, dataset, mounted=mounted)
    _close(work, keep=keep)


def _check_packages() -> None:
    wanted = {"PIL": "pillow", "sklearn": "scikit-learn"}
    missing = [package for module, package in wanted.items() if find_spec(module) is None]
    if missing:
        raise UsageError(
            f"demo: expected {' and '.join(missing)} to be installed: {install_command('demo')}"
        )


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP clean up as Ctrl-C does."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _make_folder(directory: Path | None, keep: bool, cleanup: ExitStack) -> Path:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="dlfs-demo-", dir=directory))
    if not keep:
        cleanup.callback(shutil.rmtree, folder)
    return folder


# ---- files, volume, mount ------------------------------------------------------------------------


def _make_dataset(work: _Demo) -> None:
    from dlfs.cli.digits import write_digits
    from dlfs.ingest.importer import import_dataset, open_source

    with work.step("digits", "write scikit-learn's digits as PNG files") as report:
        count = write_digits(work.source)
        report(f"{human_count(count)} PNG files of 8 x 8 pixels, in a folder for each class")
    with work.step("format", "make a volume in a file") as report:
        info = dlfs.format_volume(work.volume, size_bytes=VOLUME_BYTES, label="demo")
        report(f"a volume in a file: {human_size(info.capacity_bytes)} for samples")
    with dlfs.open(work.volume) as volume:
        with work.step("import", "pack the files into a dataset") as report:
            source = open_source(str(work.source))
            try:
                imported = import_dataset(volume, source, "digits", seed=SEED)
            finally:
                source.close()
            sealed = imported.dataset
            size = human_size(sealed.sample_bytes)
            report(f"{human_count(sealed.sample_count)} samples, {size}, packed in shuffled order")
        with work.step("verify", "read everything and check it") as report:
            problem = next(volume.verify(), None)
            if problem is not None:
                raise DemoError(f"demo: verify found damage: {problem}")
            report("every superblock, directory block and sample has its checksum")


def _missing_for_mount() -> str | None:
    """Return what a mount lacks on this machine, or None."""
    from dlfs._native.fuse import is_built

    if find_spec("trio") is None:
        return f"trio is not installed ({install_command('mount')})"
    if not is_built() and find_spec("pyfuse3") is None:
        return f"pyfuse3 is not installed ({install_command('pyfuse3')})"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed (apt install fuse3)"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/fuse cannot be opened ({os.strerror(error.errno or 0)})"
    return None


def _run_verb(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlfs.cli", *arguments]
    return subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def _mount(work: _Demo, cleanup: ExitStack) -> bool:
    """Mount the volume until the end and compare it; return False if this machine cannot."""
    missing = _missing_for_mount()
    if missing is not None:
        work.left_out("mount", missing)
        return False
    with work.step("mount", "mount the volume") as report:
        work.mount_point.mkdir()
        cleanup.callback(_unmount, work)
        log = str(work.folder / "mount.log")
        done = _run_verb("mount", work.volume, str(work.mount_point), "--log", log)
        if done.returncode:
            raise DemoError(f"demo: mount: {done.stderr.strip()}")
        report("/digits/CLASS/NUMBER.png, for any program to read")
    with work.step("diff -r", "compare the mount with the files") as report:
        _compare(work.source, work.mount_point / "digits")
        report("the mount and the source are equal, byte for byte")
    return True


def _compare(source: Path, mounted: Path) -> None:
    """Compare two folders of PNG files byte for byte."""
    names = {
        str(path.relative_to(folder))
        for folder in (source, mounted)
        for path in folder.rglob("*.png")
    }
    _, unequal, unread = filecmp.cmpfiles(source, mounted, sorted(names), shallow=False)
    if unequal or unread:
        raise DemoError(f"demo: the mount differs from the source: {[*unequal, *unread][0]}")


def _unmount(work: _Demo) -> None:
    if not os.path.ismount(work.mount_point):
        return
    done = _run_verb("umount", str(work.mount_point))
    if done.returncode:
        raise DemoError(f"demo: umount: {done.stderr.strip()}")


# ---- training and timing -------------------------------------------------------------------------


def _train(work: _Demo, dataset: Dataset) -> None:
    import numpy as np
    from sklearn.neural_network import MLPClassifier

    from dlfs.cli.digits import CLASSES, HIDDEN, decode, is_test_sample, label_of

    labels = np.array([label_of(path) for path in dataset.paths()])
    everything = np.arange(len(dataset), dtype=np.uint64)
    test = everything[is_test_sample(everything)]
    model = MLPClassifier((HIDDEN,), solver="sgd", learning_rate_init=0.05, random_state=1)
    with work.step("train", f"{EPOCHS} epochs in global random order") as report:
        for epoch in range(EPOCHS):
            with dataset.batches(BATCH, seed=SEED, epoch=epoch, world_size=1) as batches:
                for batch in batches:
                    with batch:
                        learned = np.flatnonzero(~is_test_sample(batch.indices))
                        images = decode([batch.tobytes(int(position)) for position in learned])
                        known = labels[batch.indices[learned]]
                        model.partial_fit(images, known, classes=range(CLASSES))
        with dataset.read(test) as batch:
            images = decode(batch.to_list())
        guesses = model.predict(images)
        accuracy = float((guesses == labels[test]).mean())
        if accuracy <= ACCURACY_MIN:
            raise DemoError(f"demo: expected over {ACCURACY_MIN:.0%} accuracy, got {accuracy:.1%}")
        right = f"[bold]{accuracy:.1%}[/] of {len(test)} unseen digits right"
        report(f"{EPOCHS} epochs, newly shuffled: {right}")
    _show_digits(work, images, guesses, labels[test])


def _show_digits(
    work: _Demo,
    images: NDArray[np.float32],
    guesses: NDArray[np.int64],
    labels: NDArray[np.int64],
) -> None:
    from rich.columns import Columns
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.text import Text

    from dlfs.cli.digits import draw

    shown = min(DIGITS_SHOWN, work.console.width // DIGIT_COLUMNS)
    step = len(images) // shown
    panels = []
    for i in range(step // 2, len(images), step)[:shown]:
        wrong = "" if guesses[i] == labels[i] else f", is {labels[i]}"
        panels.append(
            Panel.fit(Text("\n".join(draw(images[i]))), subtitle=f"read as {guesses[i]}{wrong}")
        )
    work.console.print()
    work.console.print(Padding(Columns(panels, padding=(0, 0)), (0, 0, 0, 2)))
    work.console.print()


def _missing_for_torch(socket: Path) -> str | None:
    """Return what a training with PyTorch through a service lacks here, or None."""
    from dlfs.service.sockets import PATH_BYTES_MAX

    if find_spec("torch") is None:
        return f"PyTorch is not installed ({install_command('torch')})"
    if find_spec("trio") is None:
        return f"trio is not installed ({install_command('service')})"
    if len(os.fsencode(socket.absolute())) > PATH_BYTES_MAX:
        return "the path of --dir is too long for a service's socket"
    return None


def _train_with_torch(work: _Demo, dataset: Dataset) -> None:
    """Train through a service, kill it in mid-epoch, and resume with another number of workers."""
    folder = work.folder / "training"
    socket = folder / "service.sock"
    missing = _missing_for_torch(socket)
    if missing is not None:
        work.left_out("torch", missing)
        return
    with work.step("torch", "train with PyTorch through a service, killed in mid-epoch") as report:
        folder.mkdir()
        with _serving(work, socket) as uri:
            _run_trainer(uri, folder, workers=2, kill_behind=TORCH_KILLED_BEHIND)
            accuracy = _run_trainer(uri, folder, workers=1).removeprefix("accuracy ")
        _check_order(dataset, folder)
        report(
            f"{TORCH_EPOCHS} epochs with PyTorch through a service: killed in mid-epoch with 2 "
            "workers, gone on with 1, in the order of an uninterrupted run: "
            f"[bold]{float(accuracy):.1%}[/] right"
        )


@contextmanager
def _serving(work: _Demo, socket: Path) -> Iterator[str]:
    """Run a node service of the volume during the block; yield its URI."""
    command = [sys.executable, "-m", "dlfs.cli", "serve", work.volume, "--socket", str(socket)]
    log = socket.with_suffix(".log")
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [*command, "--cache", "64MiB", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as service,
    ):
        assert service.stdout is not None
        try:
            if service.stdout.readline():  # the line says that clients can connect
                yield f"unix:{socket}"
        finally:
            service.terminate()
    if service.returncode:
        raise DemoError(f"demo: serve: it ended with {service.returncode}: {log.read_text()}")


def _run_trainer(uri: str, folder: Path, *, workers: int, kill_behind: str | None = None) -> str:
    """Run the training to its end or to a step; return the last line that it printed."""
    command = [sys.executable, "-m", "dlfs.cli.trainer", uri, str(folder)]
    command += ["--epochs", str(TORCH_EPOCHS), "--workers", str(workers)]
    log = folder / "errors.log"
    last_line = ""
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as trainer,
    ):
        assert trainer.stdout is not None
        try:
            for line in trainer.stdout:
                last_line = line.strip()
                if last_line == kill_behind:
                    return last_line
            trainer.wait()
        finally:
            trainer.kill()  # SIGKILL, if it has not ended
    if trainer.returncode or kill_behind is not None:
        raise DemoError(f"demo: torch: it ended with {trainer.returncode}: {log.read_text()}")
    return last_line


def _check_order(dataset: Dataset, folder: Path) -> None:
    from dlfs.cli.trainer import SEED as TRAINER_SEED
    from dlfs.cli.trainer import load_checkpoint

    order = [dataset.sequence(seed=TRAINER_SEED, epoch=epoch) for epoch in range(TORCH_EPOCHS)]
    expected = [int(index) for sequence in order for index in sequence.indices()]
    if load_checkpoint(folder)["order"] != expected:
        raise DemoError("demo: torch: the order of samples is not that of an uninterrupted run")


def _time_reads(work: _Demo, dataset: Dataset, *, mounted: bool) -> None:
    """Time whole passes over all samples, each way in the same random order."""
    with dataset.batches(READ_BATCH, seed=SEED, epoch=EPOCHS, world_size=1) as batches:
        order = [int(index) for batch in batches for index in batch.indices]
    names = [os.fsdecode(path) for path in dataset.paths()]
    files = [str(work.source / names[index]) for index in order]
    with work.step("time", "read every sample, three ways") as report:
        rates = {
            f"DLFS, batches of {READ_BATCH}": _rate(len(order), lambda: _read_batches(dataset))
        }
        if mounted:
            on_mount = [str(work.mount_point / "digits" / names[index]) for index in order]
            rates["DLFS mount, open + read + close"] = _rate(
                len(order), lambda: _read_files(on_mount)
            )
        rates["plain files, open + read + close"] = _rate(len(order), lambda: _read_files(files))
        report("all samples as bytes in Python, same random order, 1 thread")
    _show_rates(work, rates)


def _read_batches(dataset: Dataset) -> int:
    size = 0
    with dataset.batches(READ_BATCH, seed=SEED, epoch=EPOCHS, world_size=1) as batches:
        for batch in batches:
            with batch:
                size += sum(map(len, batch.to_list()))
    return size


def _read_files(paths: list[str]) -> int:
    size = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size += len(os.read(descriptor, READ_BYTES_MAX))
        finally:
            os.close(descriptor)
    return size


def _rate(count: int, read_all: Callable[[], int]) -> float:
    """Return the samples a second over whole passes, after a first pass to warm up."""
    expected = read_all()
    passes, begin = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begin) < READ_SECONDS:
        if read_all() != expected:
            raise DemoError(f"demo: expected {expected} bytes from every pass, got another number")
        passes += 1
    return passes * count / seconds


def _show_rates(work: _Demo, rates: dict[str, float]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    shown = Table("warm (in memory)", "samples/s", "", right=("samples/s",), drop=("",))
    for name, rate in rates.items():
        bar = Text(share_bar(rate / max(rates.values())), "green")
        shown.add_row(name, human_count(round(rate)), bar)
    work.console.print()
    work.console.print(Padding(shown, (0, 0, 0, 2)))
    caution = (
        "DLFS verifies every sample's CRC32C on the way; plain files come from the page cache as "
        "they are. All data is in memory: this shows overheads, not a disk (see bench/)."
    )
    work.console.print(
        Padding(caution, (1, 0, 0, 2)), style="dim", width=min(work.console.width, REPORT_COLUMNS)
    )


def _close(work: _Demo, *, keep: bool) -> None:
    work.console.print()
    if not keep:
        return
    work.console.print(f"Kept in {work.folder}. Try:", markup=False, soft_wrap=True)
    for verb in ("info", "ls -l", "verify"):
        dataset = " digits 7" if verb == "ls -l" else ""
        work.console.print(f"  dlfs {verb} {work.volume}{dataset}", markup=False, soft_wrap=True)
