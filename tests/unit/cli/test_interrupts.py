"""Ctrl-C at any moment: one line, exit code 130, no traceback."""

from __future__ import annotations

import ast
import random
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OURS = "dlfs.cli"
"""The module whose ``main`` answers SIGINT from its first line on; before, Python itself does."""
SCRIPT = f"import sys; from {OURS} import main; sys.exit(main())"
"""Command line of the script ``dlfs``, as installers write it."""
DLFS = [sys.executable, "-X", "importtime", "-c", SCRIPT]


def interrupt_behind(arguments: list[str], imports: int) -> tuple[int, list[str]]:
    """Send SIGINT after so many modules were imported behind ``OURS``; exit code and messages.

    Python reports each import on stderr, so that the moment is a place in the program, no time.
    """
    messages: list[str] = []
    seen = None
    with subprocess.Popen(
        [*DLFS, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as done:
        assert done.stderr is not None
        for line in done.stderr:
            if not line.startswith("import time:"):
                messages.append(line)
            elif seen is not None:
                seen += 1
            if seen is None and line.rstrip().endswith(f" {OURS}"):
                seen = 0
            if seen == imports:
                done.send_signal(signal.SIGINT)
                seen += 1
    return done.returncode, messages


def test_nothing_is_loaded_before() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["scripts"] == {"dlfs": f"{OURS}:main"}
    # Without site (-S), and so without what environments add to the way that modules are found.
    code = f"import os, sys; old = set(sys.modules); import {OURS}; print(set(sys.modules) - old)"
    found = subprocess.check_output([sys.executable, "-S", "-c", code], text=True, cwd=ROOT)
    assert ast.literal_eval(found) == {"dlfs", OURS}


@pytest.mark.parametrize("seed", range(10))
def test_while_modules_are_imported(seed: int) -> None:
    # "version" imports about 140 modules, libdlfs among them; the first ones in every run.
    imports = seed + 1 if seed < 4 else random.Random(seed).randrange(5, 120)
    code, messages = interrupt_behind(["version"], imports)
    assert messages == ["dlfs: interrupted\n"], f"behind {imports} imports"
    assert code == 130


SLOW_END = """
import atexit, signal, sys, threading
sys.argv = ["dlfs", "version"]
def wait():  # at exit; interrupted there
    print("ending", flush=True)
    threading.Event().wait(60)
atexit.register(wait)
from dlfs.cli import main
main()
"""


def test_while_python_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_END], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        for line in done.stdout:
            if line == "ending\n":
                done.send_signal(signal.SIGINT)
        assert done.stderr.read() == "dlfs: interrupted\n"
    assert done.returncode == 130


@pytest.mark.parametrize("_round", range(4))
def test_twice_in_a_verb(volume: Path, _round: int) -> None:
    """The second one comes while the verb is being interrupted, or behind that."""
    with subprocess.Popen(
        [sys.executable, "-m", "dlfs.cli", "-v", "stall", volume, "small", "--seconds", "60"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as done:
        assert done.stderr is not None
        for line in done.stderr:
            if "opened dataset" in line:
                break
        done.send_signal(signal.SIGINT)
        done.send_signal(signal.SIGINT)
        assert done.stderr.read() == "dlfs: interrupted\n"
    assert done.returncode == 130


def test_ignored_where_it_was_ignored(volume: Path) -> None:
    """Check a command with SIGINT ignored, as a shell starts it in the background."""
    with subprocess.Popen(
        [sys.executable, "-m", "dlfs.cli", "-v", "stall", volume, "small", "--seconds", "0.5"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as done:
        assert done.stderr is not None
        for line in done.stderr:
            if "opened dataset" in line:
                done.send_signal(signal.SIGINT)
                break
        done.stderr.read()
    assert done.returncode == 0
