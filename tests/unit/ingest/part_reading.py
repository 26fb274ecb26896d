"""Reads a source, and its parts in another process, for comparison."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dlfs.ingest.parts import open_part
from dlfs.ingest.source import Division, Layout, Source

Sample = tuple[bytes, bytes, dict[str, Any]]
"""Path, bytes and attributes."""


def read_all(source: Source, layout: Layout, seed: int) -> tuple[list[list[Sample]], list[int]]:
    """Read a source that says where its parts end; return their samples, and their numbers."""
    parts: list[list[Sample]] = [[]]
    ends: list[int] = []
    with closing(source.blocks(layout=layout, seed=seed)) as blocks:
        for block in blocks:
            columns = {name: values.tolist() for name, values in block.attributes.items()}
            places = zip(block.paths, block.offsets.tolist(), block.lengths.tolist(), strict=True)
            for row, (path, at, size) in enumerate(places):
                data = block.data[at : at + size].tobytes()
                values = {name: column[row] for name, column in columns.items()}
                parts[-1].append((path, data, values))
            if block.ends_part is not None:
                ends.append(block.ends_part)
                parts.append([])
    return parts, ends


def read_part(description: bytes, layout: Layout, seed: int, **options: Any) -> list[Sample]:
    """Read a part, in one piece."""
    with closing(open_part(description, **options)) as part:
        (samples,), ends = read_all(part, layout, seed)
    assert not ends
    return samples


def read_elsewhere(
    division: Division, place: Path, layout: Layout, seed: int, **options: Any
) -> list[list[Sample]]:
    """Read all parts in another process, which has another current directory."""
    descriptions = [division.describe(number) for number in range(len(division))]
    file = place / "descriptions"
    file.write_bytes(pickle.dumps((descriptions, layout, seed, options)))
    command = [sys.executable, "-m", "tests.unit.ingest.part_reading", str(file)]
    code = "import os, sys; sys.path.insert(0, os.getcwd()); os.chdir('/'); import runpy; "
    code += "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__')"
    subprocess.run([command[0], "-c", code, *command[2:]], check=True, timeout=300)
    found: list[list[Sample]] = pickle.loads(file.with_suffix(".read").read_bytes())
    return found


def main(arguments: Sequence[str]) -> None:
    file = Path(arguments[1])
    descriptions, layout, seed, options = pickle.loads(file.read_bytes())
    parts = [read_part(one, layout, seed, **options) for one in descriptions]
    file.with_suffix(".read").write_bytes(pickle.dumps(parts))


if __name__ == "__main__":
    main(sys.argv)
