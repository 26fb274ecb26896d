"""Where a workload's data lies, DLIO's own program, and the service that DLFS's ways go through."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Self

from bench.contestant import WrongBytesError
from bench.contestants.mounts import check_fuse
from bench.dlio.workloads import Workload
from bench.ending import started
from bench.machine import ROOT, Unavailable
from dlfs.ingest.formats.tfrecord.example import ExampleReader

ENVIRONMENT = ROOT / "build" / "dlio" / "venv"
PROGRAMS = Path(__file__).parent / "programs"
SPACE_FACTOR = 1.1
"""Room in a volume for what is beside the samples: the ends of chunks, directories."""
SPACE_EXTRA_BYTES = 64 << 20
RECORD_HEADER_BYTES, RECORD_FOOTER_BYTES = 12, 4
"""Around each record of a TFRecord file: its length and checksum, and its data's checksum."""


def find_dlio() -> Path:
    """DLIO's program.

    Raises:
        Unavailable: it, MPI or FUSE is not there; says what to do.
    """
    found = ENVIRONMENT / "bin" / "dlio_benchmark"
    if not found.exists():
        raise Unavailable(f"{found} is not installed: make bench-dlio, or make build/dlio/.stamp")
    if shutil.which("mpirun") is None:
        raise Unavailable("mpirun is not installed: apt-get install openmpi-bin libopenmpi-dev")
    check_fuse()
    return found


@dataclass(frozen=True, slots=True)
class Stage:
    """One workload's files, all in one folder on the disk under test.

    Attributes:
        workload: whose.
        folder: theirs alone.
        files: that are trained on.
        ranks: of MPI: processes that share an epoch.
    """

    workload: Workload
    folder: Path
    files: int
    ranks: int = 1

    @property
    def plain(self) -> Path:
        """DLIO's data, on the disk's own file system."""
        return self.folder / "ext4"

    @property
    def volume(self) -> Path:
        """DLFS's volume, a file on the same file system."""
        return self.folder / "volume.img"

    @property
    def mounted(self) -> Path:
        """The mount."""
        return self.folder / "mnt"

    @property
    def spool(self) -> Path:
        """What is written through the mount, until it is sealed."""
        return self.folder / "spool"

    @property
    def dataset(self) -> str:
        """What the sample API reads."""
        return f"{self.workload.name}-records" if self.workload.records else self.workload.name

    @property
    def stamp(self) -> Path:
        """Says what was laid out; it is there when all is."""
        return self.folder / "stage.json"

    def described(self) -> dict[str, object]:
        """What decides about the data, as plain values."""
        return {"workload": asdict(self.workload), "files": self.files, "ranks": self.ranks}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The stage that was laid out in a folder."""
        told = json.loads((folder / "stage.json").read_text(encoding="utf-8"))
        return cls(Workload(**told["workload"]), folder, told["files"], told["ranks"])

    def data_bytes(self) -> int:
        """Of all files that DLIO made."""
        return sum(path.stat().st_size for path in self.plain.rglob("*") if path.is_file())


# ---- DLIO ----------------------------------------------------------------------------------------


def run_dlio(
    stage: Stage, options: Sequence[str], log: Path, more: Mapping[str, str] | None = None
) -> None:
    """Run DLIO to its end, with its output in a file.

    MPI binds each rank to one processor unless it is told not to, and the rank's threads with it.
    Its session lies in a folder of this run's own: runs that share one may take it from each other.

    Args:
        stage: for the number of ranks.
        options: DLIO's command line.
        log: takes what it says.
        more: environment variables.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    command = ["mpirun", "-np", str(stage.ranks), "--oversubscribe", "--bind-to", "none"]
    command += ["--mca", "btl", "self,vader", "--mca", "oob_tcp_if_include", "lo"]
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    environment = {
        **os.environ,
        "PATH": f"{PROGRAMS}:{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DFTRACER_ENABLE": "0",
        **(more or {}),
    }
    with log.open("wb") as output, tempfile.TemporaryDirectory(prefix="dlio") as session:
        command += ["--mca", "orte_tmpdir_base", session]
        with started(
            [*command, str(find_dlio()), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=stage.folder,
        ) as process:
            process.wait()
    if process.returncode:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
        raise RuntimeError("\n".join([f"DLIO ended with {process.returncode}; {log}:", *end]))


def generate(stage: Stage, folder: Path) -> None:
    """Have DLIO make the workload's data; the same bytes each time."""
    output = stage.folder / "generated"
    options = stage.workload.options_of(
        folder, output, files=stage.files, ranks=stage.ranks, seed=1
    )
    doing = ["++workload.workflow.generate_data=True", "++workload.workflow.train=False"]
    run_dlio(stage, [*options, *doing], stage.folder / f"generate-{folder.name}.log")


# ---- DLFS ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """A service that runs: what ``dlfs.connect`` takes, and its process."""

    uri: str
    pid: int


def dlfs_command(*words: str | Path) -> None:
    """Run a verb of ``dlfs``.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    command = [sys.executable, "-m", "dlfs.cli", *map(str, words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")


@contextmanager
def serve(stage: Stage, *, incoming: bool = False) -> Iterator[Served]:
    """Serve and mount the volume, with nothing in memory yet.

    Raises:
        RuntimeError: the service ended before it was ready; names its log.
    """
    stage.mounted.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "dlfs.cli", "serve", str(stage.volume), "--json"]
    command += ["--socket", str(stage.folder / "dlfs.sock"), "--mount", str(stage.mounted)]
    command += ["--incoming", str(stage.spool)] if incoming else []
    with (
        (stage.folder / "serve.log").open("ab") as log,
        started(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT) as process,
    ):
        yield Served(json.loads(_until_ready(process, log.name))["uri"], process.pid)


def _until_ready(process: subprocess.Popen[bytes], log: str) -> bytes:
    assert process.stdout is not None
    told = b""
    for line in process.stdout:
        told += line
        if line == b"}\n":
            return told
    raise RuntimeError(f"dlfs serve ended with {process.wait()}; see {log}")


# ---- laying out ----------------------------------------------------------------------------------


def lay_out(stage: Stage) -> None:
    """Make the data both ways, seal it, and compare; unless it is there already.

    Raises:
        WrongBytesError: a file differs between the disk and the mount.
        RuntimeError: DLIO or DLFS failed.
        Unavailable: one of them cannot run here.
    """
    find_dlio()
    described = json.dumps(stage.described())
    if stage.stamp.exists() and stage.stamp.read_text(encoding="utf-8") == described:
        return
    shutil.rmtree(stage.folder, ignore_errors=True)
    stage.folder.mkdir(parents=True)
    generate(stage, stage.plain)
    copies = 2 if stage.workload.records else 1
    size = int(stage.data_bytes() * SPACE_FACTOR * copies) + SPACE_EXTRA_BYTES
    dlfs_command("format", stage.volume, "--size", str(size))
    name = stage.workload.name
    with serve(stage, incoming=True):
        generate(stage, stage.mounted / "incoming" / name)
        dlfs_command("seal", stage.mounted, name)
        count = compare(stage.plain, stage.mounted / name)
    shutil.rmtree(stage.spool)
    if count < stage.files:
        raise WrongBytesError(f"{name}: expected {stage.files} files at least, got {count}")
    if stage.workload.records:
        files = sorted((stage.plain / "train").glob("*.tfrecord"))
        dlfs_command("import", *files, stage.volume, "--name", stage.dataset)
    stage.stamp.write_text(described, encoding="utf-8")


def compare(source: Path, copy: Path) -> int:
    """Compare all files of two folders; how many there are.

    TFRecord files are compared by their records' features: a protocol buffer keeps a map in no
    particular order, and TensorFlow writes it in another one each time.

    Raises:
        WrongBytesError: one differs, or is in one of them only.
    """
    here, there = (
        {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
        for root in (source, copy)
    )
    for path in sorted(here ^ there):
        raise WrongBytesError(f"{path} is in {source if path in here else copy} only")
    for path in sorted(here):
        same = same_records if path.suffix == ".tfrecord" else _same_bytes
        if not same(source / path, copy / path):
            raise WrongBytesError(f"{copy / path} has other bytes than {source / path}")
    return len(here)


def _same_bytes(one: Path, other: Path) -> bool:
    return filecmp.cmp(one, other, shallow=False)


def same_records(one: Path, other: Path) -> bool:
    """Whether two TFRecord files hold the same Examples in the same order."""
    return all(ours == theirs for ours, theirs in zip_longest(_examples(one), _examples(other)))


def _examples(path: Path) -> Iterator[dict[str, bytes]]:
    reader = ExampleReader(f"compare {path}")
    with path.open("rb") as file:
        while header := file.read(RECORD_HEADER_BYTES):
            record = memoryview(file.read(int.from_bytes(header[:8], "little")))
            file.read(RECORD_FOOTER_BYTES)
            found = reader.features(record).items()
            yield {name: feature.SerializeToString() for name, feature in found}
