"""``python -m bench.shuffle.sources``: how well ``dlfs import`` shuffles, at its real window.

16 times the window of 256 MiB, class by class, are imported from a folder, whose files are read in
an order drawn from the seed, and from a compressed tar archive, which has to be read in its own
order and is packed in one pass and in two. Prints a line of JSON for each. No time is measured.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

import dlfs
from bench.command import command_line
from bench.datasets import DATASET
from bench.process import run_program
from bench.shuffle.orders import Size
from bench.shuffle.packing import WINDOWS, measure_packing
from dlfs.base.units import KIB, MIB, parse_bytes
from dlfs.dataset.sample_packer import STAGE_BYTES_SHUFFLED
from dlfs.epoch.options import WINDOW_CHUNKS
from dlfs.ingest.importer import import_dataset, open_source

FILE_BYTES = 16 * KIB
CHUNK_BYTES = 256 * KIB


def write_folder(folder: Path, count: int, classes: int) -> None:
    """Write files, those of a class in a folder of its own."""
    data = np.random.default_rng(1).bytes(FILE_BYTES)
    for number in range(count):
        place = folder / f"{number * classes // count:03}"
        if number == 0 or number * classes // count != (number - 1) * classes // count:
            place.mkdir(parents=True)
        (place / f"{number:09}").write_bytes(data)


def write_tar(archive: Path, count: int, classes: int) -> None:
    """Write the same files as a compressed archive, in the order of their paths."""
    data = np.random.default_rng(1).bytes(FILE_BYTES)
    with tarfile.open(archive, "w:gz", compresslevel=1) as file:
        for number in range(count):
            member = tarfile.TarInfo(f"{number * classes // count:03}/{number:09}")
            member.size = FILE_BYTES
            file.addfile(member, io.BytesIO(data))


def run(name: str, source: Path, volume: Path, count: int, size: Size, *, one_pass: bool) -> None:
    """Import a source, and print the measures of the dataset."""
    space = count * FILE_BYTES * (1 if one_pass else 2) * 9 // 8 + 256 * MIB
    dlfs.format_volume(volume, size_bytes=space, chunk_bytes=CHUNK_BYTES)
    try:
        with dlfs.open(volume) as opened:
            found = open_source(source)
            try:
                assert found.gives_shuffled == source.is_dir()
                report = import_dataset(opened, found, DATASET, one_pass=one_pass)
            finally:
                found.close()
            assert report.sample_count == count
            assert not report.warnings, report.warnings
            with opened[DATASET] as dataset:
                packing = measure_packing(dataset, size, CHUNK_BYTES, WINDOW_CHUNKS)
    finally:
        volume.unlink()
    print(json.dumps({"source": name, "samples": count} | asdict(packing)), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Import and measure all sources."""
    parser = command_line("bench.shuffle.sources", __doc__, "dir")
    parser.add_argument("--size", default=str(WINDOWS * STAGE_BYTES_SHUFFLED), help="[4 GiB]")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.dir / "sources"
    count = parse_bytes(arguments.size) // FILE_BYTES
    size = Size(per_chunk=CHUNK_BYTES // FILE_BYTES)
    volume, files, archive = folder / "volume.img", folder / "files", folder / "files.tar.gz"
    os.makedirs(folder)
    try:
        write_folder(files, count, size.classes)
        run("folder", files, volume, count, size, one_pass=False)
        shutil.rmtree(files)
        write_tar(archive, count, size.classes)
        run("tar.gz, one pass", archive, volume, count, size, one_pass=True)
        run("tar.gz, two passes", archive, volume, count, size, one_pass=False)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    run_program(main)
