"""fio, the common tool for measuring disks, next to what DLFS reads: same range, size and depth.

It only reads: ``--readonly`` has fio itself refuse to write.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

ENGINES = {"io_uring": ("--fixedbufs", "--registerfiles"), "libaio": ()}
"""Engines of fio, in the order in which they are tried, with what DLFS does by io_uring as well."""
START_SECONDS = 10.0
"""Longest time that fio takes beside its reads, in seconds."""
_END_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class FileRange:
    """A part of a file or disk.

    Attributes:
        path: path of the file.
        first: offset of its first byte.
        size_bytes: its length.
    """

    path: str
    first: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FioResult:
    """A measurement by fio.

    Attributes:
        reads: reads per second.
        read_bytes: bytes per second.
        engine: the engine that it used.
    """

    reads: float
    read_bytes: float
    engine: str


def find_fio() -> str | None:
    """Return the path of fio; None if it is not installed."""
    return shutil.which("fio")


def run_fio(
    program: str,
    ranges: Sequence[FileRange],
    *,
    random: bool,
    request_bytes: int,
    depth: int,
    seconds: float,
) -> FioResult | str:
    """Read some files with fio, all at once; return what it has measured, or why it could not.

    Args:
        program: path of fio.
        ranges: the parts to read.
        random: read in random order; else one after the other.
        request_bytes: bytes of a read.
        depth: reads in flight in each file.
        seconds: time to read.
    """
    problem = ""
    for engine, own in ENGINES.items():
        options = [
            f"--ioengine={engine}",
            *own,
            "--readonly",
            "--direct=1",
            "--thread",
            f"--rw={'randread' if random else 'read'}",
            f"--bs={request_bytes}",
            f"--iodepth={depth}",
            "--norandommap",
            "--time_based",
            f"--runtime={max(1, round(seconds * 1000))}ms",
            "--group_reporting",
            "--output-format=json",
        ]
        for number, each in enumerate(ranges):
            name = each.path.replace("\\", "\\\\").replace(":", "\\:")
            options += [f"--name=member{number}", f"--filename={name}"]
            options += [f"--offset={each.first}", f"--size={each.size_bytes}"]
        code, out, problem = _run([program, *options], seconds + START_SECONDS)
        if code == 0 and "{" in out:
            side = json.loads(out[out.index("{") :])["jobs"][0]["read"]
            return FioResult(float(side["iops"]), float(side["bw_bytes"]), engine)
    return problem


def _run(command: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """Run a command; return its exit code, its output and its last message."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return -1, "", f"fio did not end within {seconds:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # its reads hang
                process.wait(_END_SECONDS)
    lines = [line for line in err.splitlines() if line.strip()]
    return process.returncode, out, lines[-1] if lines else f"fio ended with {process.returncode}"
