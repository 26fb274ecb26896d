"""Runs examples of the documents in this process.

``tests/unit/test_documents.py`` runs the examples in Python by this module, but for those of a
mount or a service, and so do the tests of a framework with their section of docs/frameworks.md: to
start Python with dlfs takes longer than the examples, and to import a framework takes seconds.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import dlfs
from dlfs.base.units import MIB
from tests.support.examples import printed_texts, sections

ROOT = Path(__file__).parents[2]


def run_framework(name: str, folder: Path) -> None:
    """Run the example of a framework in a folder, and check what it prints.

    Args:
        name: title of the section of docs/frameworks.md.
        folder: empty folder; the volume ``photos.img`` is made in it.
    """
    page = "docs/frameworks.md"
    ((_, code),) = dict(sections(page, (ROOT / page).read_text()))[f"{page}: {name}"]
    _make_photos(folder / "photos.img")
    run_here(code, folder)


def run_here(code: str, folder: Path, *, prints_more: bool = True) -> None:
    """Run a block of Python in a folder, and check what it prints; a framework may print more."""
    found = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(found):
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    expected = printed_texts(code)
    lines = found.getvalue().splitlines()
    found_lines = [line for line in lines if line in expected] if prints_more else lines
    assert found_lines == expected, lines


def _make_photos(path: Path) -> None:
    """Make the volume that the README makes, with other bytes."""
    dlfs.format_volume(str(path), size_bytes=64 * MIB)
    with dlfs.open(str(path)) as volume, volume.writer("photos") as writer:
        for number in range(600):
            kind = "cat" if number < 300 else "dog"
            writer.add(f"{kind}/{number % 300:04}.jpg", bytes([number % 251]) * 8192)
