"""A workload's data, its generation by DLIO, and the service that DLFS's ways read from."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Self

from bench.dlio.workloads import Workload
from bench.errors import BenchmarkError, Unavailable, WrongBytesError
from bench.process import ROOT, find_program, output_of, started
from bench.serving import Served, check_fuse, start_service
from dlfs.ingest.formats.tfrecord.example import ExampleReader

ENVIRONMENT = ROOT / "build" / "dlio" / "venv"
PROGRAMS = Path(__file__).parent / "programs"
SPACE_FACTOR = 1.1
"""Size of a volume over its samples: chunks have unused ends, directories take space."""
SPACE_EXTRA_BYTES = 64 << 20
RECORD_HEADER_BYTES, RECORD_FOOTER_BYTES = 12, 4
"""Bytes before and after a record of a TFRecord file: length with checksum, and data's checksum."""


def find_dlio() -> Path:
    """Return the path of DLIO's program, if DLIO, MPI and FUSE are there."""
    found = ENVIRONMENT / "bin" / "dlio_benchmark"
    if not found.exists():
        raise Unavailable(f"{found} is not installed: make bench-dlio, or make build/dlio/.stamp")
    find_program("mpirun", "openmpi-bin libopenmpi-dev")
    check_fuse()
    return found


@dataclass(frozen=True, slots=True)
class Stage:
    """One workload's files, all in one folder on the disk under test.

    `files` are trained on by `ranks` of MPI: processes that share an epoch.
    """

    workload: Workload
    folder: Path
    files: int
    ranks: int = 1

    @property
    def plain(self) -> Path:
        """Folder of DLIO's data on the disk's own file system."""
        return self.folder / "ext4"

    @property
    def volume(self) -> Path:
        """File of DLFS's volume, on the same file system."""
        return self.folder / "volume.img"

    @property
    def mounted(self) -> Path:
        """Mount point."""
        return self.folder / "mnt"

    @property
    def staging(self) -> Path:
        """Staging area of the mount: data before it is sealed."""
        return self.folder / "staging"

    @property
    def dataset(self) -> str:
        """Name of the dataset that the sample API reads."""
        return f"{self.workload.name}-records" if self.workload.records else self.workload.name

    @property
    def stamp(self) -> Path:
        """File with the parameters of the data; exists if the data is complete."""
        return self.folder / "stage.json"

    def described(self) -> dict[str, object]:
        """Return the parameters of the data as plain values."""
        return {"workload": asdict(self.workload), "files": self.files, "ranks": self.ranks}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return the stage whose data is in a folder."""
        found = json.loads((folder / "stage.json").read_text(encoding="utf-8"))
        return cls(Workload(**found["workload"]), folder, found["files"], found["ranks"])

    def data_bytes(self) -> int:
        """Return the bytes of all files that DLIO generated."""
        return sum(path.stat().st_size for path in self.plain.rglob("*") if path.is_file())


# ---- DLIO ----------------------------------------------------------------------------------------


def run_dlio(
    stage: Stage,
    options: Sequence[str],
    log: Path,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run DLIO to its end, with its output in a file.

    By default, MPI binds each rank and its threads to one processor, which is switched off. Its
    session directory is private to this run, as runs that share one may remove it.
    """
    command = ["mpirun", "-np", str(stage.ranks), "--oversubscribe", "--bind-to", "none"]
    command += ["--mca", "btl", "self,vader", "--mca", "oob_tcp_if_include", "lo"]
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    environment = {
        **os.environ,
        "PATH": f"{PROGRAMS}:{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DFTRACER_ENABLE": "0",
        **(variables or {}),
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
        raise BenchmarkError("\n".join([f"DLIO ended with {process.returncode}; {log}:", *end]))


def generate(stage: Stage, folder: Path) -> None:
    """Let DLIO generate the workload's data; it generates the same bytes each time."""
    output = stage.folder / "generated"
    options = stage.workload.options_of(
        folder, output, files=stage.files, ranks=stage.ranks, seed=1
    )
    actions = ["++workload.workflow.generate_data=True", "++workload.workflow.train=False"]
    run_dlio(stage, [*options, *actions], stage.folder / f"generate-{folder.name}.log")


# ---- DLFS ----------------------------------------------------------------------------------------


def dlfs_command(*words: str | Path) -> None:
    """Run a command of ``dlfs``."""
    output_of(sys.executable, "-m", "dlfs.cli", *words, cwd=ROOT)


def serve(stage: Stage, *, writable: bool = False) -> AbstractContextManager[Served]:
    """Serve and mount the volume with no sample in memory; with ``incoming/`` if it is writable."""
    stage.mounted.mkdir(exist_ok=True)
    options = ["--socket", str(stage.folder / "dlfs.sock"), "--mount", str(stage.mounted)]
    options += ["--incoming", str(stage.staging)] if writable else []
    return start_service(str(stage.volume), stage.folder / "serve.log", *options)


# ---- data ----------------------------------------------------------------------------------------


def lay_out(stage: Stage) -> None:
    """Generate the data on the disk and through the mount, seal it, and compare both.

    Do nothing if an earlier run left the same data.
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
    with serve(stage, writable=True):
        generate(stage, stage.mounted / "incoming" / name)
        dlfs_command("seal", stage.mounted, name)
        count = compare(stage.plain, stage.mounted / name)
    shutil.rmtree(stage.staging)
    if count < stage.files:
        raise WrongBytesError(f"{name}: expected {stage.files} files at least, got {count}")
    if stage.workload.records:
        files = sorted((stage.plain / "train").glob("*.tfrecord"))
        dlfs_command("import", *files, stage.volume, "--name", stage.dataset)
    stage.stamp.write_text(described, encoding="utf-8")


def compare(source: Path, copy: Path) -> int:
    """Compare all files of two folders, and return their number.

    TFRecord files are compared by their records' features, because the map of a protocol buffer has
    no order and TensorFlow writes it in another one each time.
    """
    here, there = (
        {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
        for root in (source, copy)
    )
    for path in sorted(here ^ there):
        raise WrongBytesError(f"{path} is in {source if path in here else copy} only")
    for path in sorted(here):
        both = source / path, copy / path
        is_table = path.suffix == ".tfrecord"
        if not (same_records(*both) if is_table else filecmp.cmp(*both, shallow=False)):
            raise WrongBytesError(f"{copy / path} has other bytes than {source / path}")
    return len(here)


def same_records(one: Path, other: Path) -> bool:
    """Return True if two TFRecord files contain the same Examples in the same order."""
    return all(ours == theirs for ours, theirs in zip_longest(_examples(one), _examples(other)))


def _examples(path: Path) -> Iterator[dict[str, bytes]]:
    reader = ExampleReader(f"compare {path}")
    with path.open("rb") as file:
        while header := file.read(RECORD_HEADER_BYTES):
            record = memoryview(file.read(int.from_bytes(header[:8], "little")))
            file.read(RECORD_FOOTER_BYTES)
            found = reader.features(record).items()
            yield {name: feature.SerializeToString() for name, feature in found}
