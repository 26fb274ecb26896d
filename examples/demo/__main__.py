"""``make demo``: shows all of DLFS on real images, in under a minute.

The demo writes handwritten digits as PNG files, imports them as a dataset, and trains a small
network on it, in a new global order every epoch. It compares the mount with the files, and times
three ways to read. If PyTorch is installed, it kills a training whose worker processes read through
a node service, and resumes it. At the end, also after an error, the demo unmounts, and removes its
files unless the user keeps them.

Volumes, mounts and services are made by the ``dlfs`` command, as a user does it.
"""

from __future__ import annotations

import argparse
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
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.neural_network import MLPClassifier

import dlfs
from examples.demo.digits import (
    CLASSES,
    HIDDEN,
    decode,
    draw,
    is_test_sample,
    label_of,
    write_digits,
)

ROOT = Path(__file__).parents[2]
DLFS = (sys.executable, "-m", "dlfs.cli")
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
DIGITS_SHOWN = 4
BAR_COLUMNS = 30
READ_BYTES_MAX = 1 << 20
"""Size of one read; all files are smaller."""


class DemoError(Exception):
    """A step of the demo failed."""


def line(mark: str, name: str, text: str) -> None:
    """Print the line of a step."""
    print(f"{mark} {name:<8} {text}", flush=True)


@contextmanager
def step(name: str) -> Iterator[Callable[[str], None]]:
    """Run a step, then print its line with its time; the block passes the line's text."""
    texts: list[str] = []
    begin = time.perf_counter()
    try:
        yield texts.append
    except BaseException:
        line("✗", name, "failed")
        raise
    line("✓", name, f"{' '.join(texts)} ({time.perf_counter() - begin:.2f} s)")


def run_verb(*arguments: str | Path) -> str:
    """Run a verb of the ``dlfs`` command; return what it printed."""
    done = subprocess.run(
        [*DLFS, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise DemoError(f"dlfs {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip() or done.stderr.strip()


# ---- files, volume, mount ------------------------------------------------------------------------


def make_dataset(source: Path, volume: Path) -> None:
    """Write the files, and pack them into a dataset of a new volume, which is then verified."""
    with step("digits") as report:
        count = write_digits(source)
        report(f"{count:,} PNG files of 8 x 8 pixels, in a folder for each class")
    with step("format") as report:
        report(run_verb("format", volume, "--size", "32MiB"))
    with step("import") as report:
        report(run_verb("import", source, volume, "--name", "digits", "--seed", str(SEED)))
    with step("verify") as report:
        run_verb("verify", volume)
        report("every superblock, directory block and sample has its checksum")


def missing_for_mount() -> str | None:
    """Return what a mount lacks on this machine, or None."""
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed (apt install fuse3)"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/fuse cannot be opened ({os.strerror(error.errno or 0)})"
    return None


def mount(volume: Path, point: Path, source: Path, cleanup: ExitStack) -> bool:
    """Mount the volume until the end and compare it; return False if this machine cannot."""
    missing = missing_for_mount()
    if missing is not None:
        line("-", "mount", f"left out: {missing}")
        return False
    with step("mount") as report:
        point.mkdir()
        cleanup.callback(unmount, point)
        run_verb("mount", volume, point, "--log", point.with_suffix(".log"))
        report("/digits/CLASS/NUMBER.png, for any program to read")
    with step("diff -r") as report:
        compare(source, point / "digits")
        report("the mount and the source are equal, byte for byte")
    return True


def unmount(point: Path) -> None:
    """Unmount the volume if it is mounted."""
    if os.path.ismount(point):
        run_verb("umount", point)


def compare(source: Path, mounted: Path) -> None:
    """Compare two folders of PNG files byte for byte."""
    names = {
        str(path.relative_to(folder))
        for folder in (source, mounted)
        for path in folder.rglob("*.png")
    }
    _, unequal, unread = filecmp.cmpfiles(source, mounted, sorted(names), shallow=False)
    if unequal or unread:
        raise DemoError(f"the mount differs from the source: {[*unequal, *unread][0]}")


# ---- training ------------------------------------------------------------------------------------


def train(dataset: dlfs.Dataset) -> None:
    """Train a small network in a new global order every epoch, and show what it reads."""
    labels = np.array([label_of(path) for path in dataset.paths()])
    everything = np.arange(len(dataset), dtype=np.uint64)
    test = everything[is_test_sample(everything)]
    model = MLPClassifier((HIDDEN,), solver="sgd", learning_rate_init=0.05, random_state=1)
    with step("train") as report:
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
            raise DemoError(f"expected over {ACCURACY_MIN:.0%} accuracy, got {accuracy:.1%}")
        report(
            f"{EPOCHS} epochs, newly shuffled: {accuracy:.1%} of {len(test)} unseen digits right"
        )
    show_digits(images, guesses)


def show_digits(images: NDArray[np.float32], guesses: NDArray[np.int64]) -> None:
    """Print some digits side by side, and what they were read as."""
    chosen = np.linspace(0, len(images) - 1, DIGITS_SHOWN, dtype=int)
    drawn = [[*draw(images[i]), f"read as {guesses[i]}".center(16)] for i in chosen]
    print("", *("  ".join(["", *row]) for row in zip(*drawn, strict=True)), "", sep="\n")


def train_with_torch(dataset: dlfs.Dataset, volume: Path, folder: Path) -> None:
    """Train through a service, kill it in mid-epoch, and resume with another number of workers."""
    if find_spec("torch") is None:
        line("-", "torch", "left out: PyTorch is not installed (make demo PACKAGES=torch)")
        return
    with step("torch") as report:
        folder.mkdir()
        with serving(volume, folder / "dlfs.sock") as uri:
            run_trainer(uri, folder, workers=2, kill_behind=TORCH_KILLED_BEHIND)
            accuracy = run_trainer(uri, folder, workers=1).removeprefix("accuracy ")
        check_order(dataset, folder)
        report(
            f"{TORCH_EPOCHS} epochs with PyTorch through a service: killed in mid-epoch with 2 "
            "workers, gone on with 1, in the order of an uninterrupted run: "
            f"{float(accuracy):.1%} right"
        )


@contextmanager
def serving(volume: Path, socket: Path) -> Iterator[str]:
    """Run a node service of the volume during the block; yield its URI."""
    command = [*DLFS, "serve", str(volume), "--socket", str(socket), "--cache", "64MiB", "--json"]
    log = socket.with_suffix(".log")
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        ) as service,
    ):
        assert service.stdout is not None
        try:
            if service.stdout.readline():  # the line says that clients can connect
                yield f"unix:{socket}"
        finally:
            service.terminate()
    if service.returncode:
        raise DemoError(f"dlfs serve ended with {service.returncode}: {log.read_text()}")


def run_trainer(uri: str, folder: Path, *, workers: int, kill_behind: str | None = None) -> str:
    """Run the training to its end or to a step; return the last line that it printed."""
    command = [sys.executable, "-m", "examples.demo.trainer", uri, str(folder)]
    command += ["--epochs", str(TORCH_EPOCHS), "--workers", str(workers)]
    log = folder / "errors.log"
    last_line = ""
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as trainer,
    ):
        assert trainer.stdout is not None
        try:
            for printed in trainer.stdout:
                last_line = printed.strip()
                if last_line == kill_behind:
                    return last_line
            trainer.wait()
        finally:
            trainer.kill()  # SIGKILL, if it has not ended
    if trainer.returncode or kill_behind is not None:
        raise DemoError(f"the training ended with {trainer.returncode}: {log.read_text()}")
    return last_line


def check_order(dataset: dlfs.Dataset, folder: Path) -> None:
    """Compare the order in which samples were learned with that of an uninterrupted run."""
    from examples.demo.trainer import SEED as TRAINER_SEED
    from examples.demo.trainer import load_checkpoint

    order = [dataset.sequence(seed=TRAINER_SEED, epoch=epoch) for epoch in range(TORCH_EPOCHS)]
    expected = [int(index) for sequence in order for index in sequence.indices()]
    if load_checkpoint(folder)["order"] != expected:
        raise DemoError("the order of samples is not that of an uninterrupted run")


# ---- timing --------------------------------------------------------------------------------------


def time_reads(dataset: dlfs.Dataset, source: Path, mounted: Path | None) -> None:
    """Time whole passes over all samples, each way in the same random order."""
    with dataset.batches(READ_BATCH, seed=SEED, epoch=EPOCHS, world_size=1) as batches:
        order = [int(index) for batch in batches for index in batch.indices]
    names = [os.fsdecode(path) for path in dataset.paths()]
    with step("time") as report:
        rates = {f"DLFS, batches of {READ_BATCH}": rate(len(order), lambda: read_batches(dataset))}
        for label, folder in ("DLFS mount", mounted), ("plain files", source):
            if folder is not None:
                files = [str(folder / names[index]) for index in order]
                reading = partial(read_files, files)
                rates[f"{label}, open + read + close"] = rate(len(order), reading)
        report("all samples as bytes in Python, same random order, 1 thread")
    print(f"\n  {'warm (in memory)':<34} samples/s")
    for name, found in rates.items():
        bar = "█" * round(BAR_COLUMNS * found / max(rates.values()))
        print(f"  {name:<34} {found:>9,.0f} {bar}")
    print(
        "\n  DLFS verifies every sample's CRC32C on the way; plain files come from the page cache\n"
        "  as they are. All data is in memory: this shows overheads, not a disk (see bench/)."
    )


def read_batches(dataset: dlfs.Dataset) -> int:
    """Read an epoch; return its bytes."""
    size = 0
    with dataset.batches(READ_BATCH, seed=SEED, epoch=EPOCHS, world_size=1) as batches:
        for batch in batches:
            with batch:
                size += sum(map(len, batch.to_list()))
    return size


def read_files(paths: list[str]) -> int:
    """Read files; return their bytes."""
    size = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size += len(os.read(descriptor, READ_BYTES_MAX))
        finally:
            os.close(descriptor)
    return size


def rate(count: int, read_all: Callable[[], int]) -> float:
    """Return the samples a second over whole passes, after a first pass to warm up."""
    expected = read_all()
    passes, begin = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begin) < READ_SECONDS:
        if read_all() != expected:
            raise DemoError(f"expected {expected} bytes from every pass, got another number")
        passes += 1
    return passes * count / seconds


# ---- all of it -----------------------------------------------------------------------------------


def demonstrate(folder: Path, cleanup: ExitStack) -> None:
    """Run all steps in a folder."""
    source, volume, point = folder / "digits", folder / "volume.img", folder / "mount"
    print("\nDLFS: 1,797 handwritten digits, from files to training\n")
    make_dataset(source, volume)
    mounted = mount(volume, point, source, cleanup)
    with dlfs.open(str(volume)) as opened, opened["digits"] as dataset:
        train(dataset)
        train_with_torch(dataset, volume, folder / "training")
        time_reads(dataset, source, point / "digits" if mounted else None)


def interrupt(_number: int, _frame: object) -> None:
    """Let a signal clean up as Ctrl-C does."""
    raise KeyboardInterrupt


def main() -> int:
    """Run the demo; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--dir", metavar="DIR", help="work below this folder, not below /tmp")
    parser.add_argument("--keep", action="store_true", help="keep the files, and say where")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    folder = Path(tempfile.mkdtemp(prefix="dlfs-demo-", dir=arguments.dir)).absolute()
    try:
        with ExitStack() as cleanup:
            if not arguments.keep:
                cleanup.callback(shutil.rmtree, folder)
            demonstrate(folder, cleanup)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.keep:
        print(f"\nKept in {folder}. Try:")
        for verb, rest in ("info", ""), ("ls -l", " digits 7"), ("verify", ""):
            print(f"  dlfs {verb} {folder / 'volume.img'}{rest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
