"""The README's examples do what it says: its Python runs, its commands print what it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

VARYING = [
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
    (r"in \d+\.\d\d s, \d+(\.\d)? [KMG]iB/s", "in TIME, RATE"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE"),
]
"""What differs from run to run."""

MARKS = {
    "In PyTorch": [pytest.mark.torch],
    "One service for a machine": [pytest.mark.fuse],
    "Through a mount": [pytest.mark.fuse],
}
"""What a section's examples need."""

SAMPLES = "Samples to try it with"
"""The section whose commands make what the others' examples read."""

SECTIONS = {
    title: re.findall(r"^```(python|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
}
"""Blocks by section: each is a language and the text."""


def steady(text: str) -> str:
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return text


def run_python(code: str, folder: Path) -> None:
    """Run a block; each ``print(...)  # text`` in it prints that text."""
    expected = re.findall(r"print\(.*\)  # (.*)", code)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected


def run_console(block: str, folder: Path) -> None:
    """Run each command of a block; it prints what is shown below it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder,
            env={**os.environ, "PATH": path, "DLFS": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # 141: head has seen enough.
        assert done.returncode in (0, 141), f"{command}: {done.stdout}"
        assert steady(done.stdout) == steady(shown), command


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples that the README makes first."""
    folder: Path = tmp_path_factory.mktemp("made")
    for _, block in SECTIONS[SAMPLES]:
        run_console(block, folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Iterator[Path]:
    """Where examples run: with the samples that the README makes first."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True, symlinks=True)
    yield tmp_path
    if os.path.ismount(tmp_path / "mnt"):  # an example failed
        subprocess.run([shutil.which("fusermount3") or "umount", "-uz", tmp_path / "mnt"])


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(t, marks=MARKS.get(t, []))
        for t, blocks in SECTIONS.items()
        if blocks and t != SAMPLES
    ],
)
def test_examples(title: str, folder: Path) -> None:
    for language, block in SECTIONS[title]:
        run = run_python if language == "python" else run_console
        run(block, folder)


def test_every_way_in_has_its_page() -> None:
    ways = ("In Python", "In PyTorch", "One service for a machine", "Through a mount", "From C")
    assert all(SECTIONS[title] for title in ways)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("folder", sorted(set(re.findall(r"`(tests/[a-z]+)`", README))))
def test_promises_are_tested(folder: str) -> None:
    assert list((ROOT / folder).rglob("test_*.py"))
