"""``make demo`` without FUSE, and what it leaves when it is interrupted; CI runs it as it is."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "examples.demo"]

pytestmark = pytest.mark.slow


def test_demo_without_fuse(tmp_path) -> None:
    done = subprocess.run(
        [*DEMO, "--dir", tmp_path, "--keep"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for step in ("digits", "format", "import", "verify", "train", "time"):
        assert f"✓ {step}" in done.stdout
    assert "left out: fusermount3" in done.stdout
    (folder,) = tmp_path.iterdir()
    trained = {"training"} if importlib.util.find_spec("torch") else set()
    assert {path.name for path in folder.iterdir()} == {"digits", "volume.img"} | trained
    assert ("✓ torch" in done.stdout) == bool(trained)
    assert list(folder.glob("training/dlfs.sock*")) == []


def test_a_failed_step_is_named_and_leaves_nothing(tmp_path) -> None:
    done = subprocess.run(
        [*DEMO, "--dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "DLFS_LIBRARY": str(tmp_path / "absent.so")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "✗ format" in done.stdout
    assert "demo: dlfs format: " in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fuse
def test_interrupted_demo_leaves_nothing(tmp_path) -> None:
    command = [*DEMO, "--dir", tmp_path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "✓ mount" in line:
                break
        demo.send_signal(signal.SIGINT)
        demo.stdout.read()
    assert demo.returncode == 130
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert list(tmp_path.iterdir()) == []
