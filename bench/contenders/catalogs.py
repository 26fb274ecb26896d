"""Volumes with many datasets: imports of one sample into them, and the listing of their datasets.

A volume of so many datasets is made by as many imports, once for all rounds.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import dlfs
from bench.errors import WrongBytesError
from bench.measurement import Environment, Measurement
from bench.resources import cpu_seconds_of_children, timed
from dlfs.base.units import KIB, MIB

CHUNK_BYTES = 16 * KIB
IMPORTS = 20
"""Imports of a run."""
DATA = b"one sample"


def _import(volume: dlfs.Volume, number: int) -> None:
    with volume.writer(f"set-{number:06}") as writer:
        writer.add("sample", DATA)


def _lay_volume(folder: Path, count: int) -> str:
    """Make a volume of so many datasets, unless an earlier round did."""
    path = folder / f"datasets-{count}.img"
    if not path.exists():
        making = path.with_suffix(".new")
        # Samples and a directory for each dataset, and two catalogs in few runs of chunks.
        size_bytes = 16 * MIB + 4 * CHUNK_BYTES * count
        dlfs.format_volume(str(making), size_bytes=size_bytes, chunk_bytes=CHUNK_BYTES, force=True)
        with dlfs.open(str(making)) as volume:
            for number in range(count):
                _import(volume, number)
        making.rename(path)
    return str(path)


@dataclass(frozen=True)
class TinyImports:
    """Imports of one sample, each a new dataset of a volume that has others.

    Attributes:
        few: a volume of ten datasets, instead of as many as the limits say.
    """

    few: bool

    @property
    def label(self) -> str:
        return f"DLFS import of one sample, {'ten' if self.few else 'all'} datasets before it"

    def run(self, environment: Environment) -> Measurement:
        count = 10 if self.few else environment.limits.datasets
        with dlfs.open(_lay_volume(environment.scene.folder, count)) as volume:
            before = len(volume.datasets())
            with timed() as watch:
                for number in range(before, before + IMPORTS):
                    _import(volume, number)
            with volume[f"set-{before:06}"] as dataset:
                if dataset.get("sample") != DATA:
                    raise WrongBytesError("the imported sample differs")
            for number in range(before, before + IMPORTS):
                volume.remove(f"set-{number:06}")
        notes = {"plan": f"{before:,} datasets"}
        total = IMPORTS * len(DATA)
        return Measurement(IMPORTS, total, watch.seconds, watch.cpu_seconds, 1, notes)


@dataclass(frozen=True)
class ListDatasets:
    """The opening of a volume and the listing of its datasets.

    Attributes:
        program: by ``dlfs ls``, a process of its own; else in this one.
    """

    program: bool

    @property
    def label(self) -> str:
        return "DLFS ls, with the start of Python" if self.program else "DLFS open and datasets()"

    def run(self, environment: Environment) -> Measurement:
        count = environment.limits.datasets
        path = _lay_volume(environment.scene.folder, count)
        if self.program:
            with timed(cpu_seconds_of_children) as watch:
                command = [sys.executable, "-m", "dlfs.cli", "ls", path]
                names = subprocess.run(command, check=True, capture_output=True).stdout.split()
            found = len(names)
        else:
            with timed() as watch, dlfs.open(path) as volume:
                found = len(volume.datasets())
        if found != count:
            raise WrongBytesError(f"expected {count} datasets, got {found}")
        return Measurement(found, 0, watch.seconds, watch.cpu_seconds, found)
