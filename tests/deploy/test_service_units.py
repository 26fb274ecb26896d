"""The systemd units of the node service: systemd accepts them, and their commands exist."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlfs.cli.commands import app

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze (package systemd)")
    units = []
    for kind in ("service", "socket"):
        units.append(tmp_path / f"dlfs-serve@images.{kind}")
        shutil.copy(UNITS / f"dlfs-serve@.{kind}", units[-1])
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, units)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "dlfs" in line]) == (
        0,
        [],
    )


def test_the_units_start_existing_verbs() -> None:
    lines = (UNITS / "dlfs-serve@.service").read_text().splitlines()
    (start,) = [line.partition("=")[2] for line in lines if line.startswith("ExecStart=")]
    words = shlex.split(start)
    assert words[:3] == ["/usr/bin/env", "dlfs", "serve"]
    output = CliRunner().invoke(app, [words[2], "--help"])
    assert output.exit_code == 0
    assert "--cache" in output.output
