"""The README's examples do what it says: its Python runs, its commands print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

VARYING = [
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
    (r"in \d+\.\d\d s, \d+(\.\d)? [KMG]iB/s", "in TIME, RATE"),
]
"""What differs from run to run."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def steady(text: str) -> str:
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return text


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a console block, and what it shows below."""
    return [
        (command, shown)
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    ]


def test_python(tmp_path: Path) -> None:
    (code,) = blocks("python")
    expected = re.findall(r"print\(.*\)  # (.*)", code)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected


def test_console(tmp_path: Path) -> None:
    for kind in ("cat", "dog"):
        folder = tmp_path / "photos" / kind
        folder.mkdir(parents=True)
        for number in range(300):
            (folder / f"{number:04}.jpg").write_bytes(os.urandom(8192))
    (block,) = blocks("console")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command, shown in commands(block):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # 141: head has seen enough.
        assert done.returncode in (0, 141), f"{command}: {done.stdout}"
        assert steady(done.stdout) == steady(shown), command


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("folder", sorted(set(re.findall(r"`(tests/[a-z]+)`", README))))
def test_promises_are_tested(folder: str) -> None:
    assert list((ROOT / folder).rglob("test_*.py"))
