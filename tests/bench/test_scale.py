"""The benchmarks of imports of very many samples, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.process import ROOT
from bench.scale import appends
from bench.scale.__main__ import main, run_import
from dlfs.dataset import step_cutter

COUNT = 1_000_000
MOST_BYTES = 100
"""Greatest memory of a sample beside the new directory, where an import of any size takes about 55
of them."""
IMPORT = f"""
from pathlib import Path
from bench.scale.__main__ import run_import
from dlfs.dataset import committed_steps, sealing, step_cutter

step_cutter.STEP_SAMPLES = 1 << 16
committed_steps.PAUSE_S = 0.0
sealing.BUFFERED_SAMPLES = 1 << 16
run_import(Path("volume.img"), {COUNT}, True)
"""


def lines(text: str) -> dict[str, dict[str, float]]:
    """Return what each part reported."""
    return {found["part"]: found for found in map(json.loads, text.splitlines())}


def test_parts_report_their_time_and_memory(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:  # type: ignore[type-arg]
    assert main(["--samples", "2e4", "--dir", str(tmp_path)]) == 0
    found = lines(capfd.readouterr().out)
    assert list(found) == [
        "generate", "steps", "seal", "import", "open", "read at random", "epoch",
    ]  # fmt: skip
    assert found["epoch"]["samples"] == 20_000
    assert not list(tmp_path.iterdir())


def test_a_second_pass_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,  # type: ignore[type-arg]
) -> None:
    monkeypatch.setattr(step_cutter, "STEP_SAMPLES", 1 << 12)
    run_import(tmp_path / "volume.img", 20_000, True, two_passes=True)
    assert list(lines(capfd.readouterr().out)) == ["steps", "second pass", "seal", "import"]


def test_an_import_in_steps_takes_little_memory(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert lines(run.stdout)["import"]["beside_bytes_a_sample"] < MOST_BYTES


def test_appends_report_their_cost(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:  # type: ignore[type-arg]
    assert appends.main(["--appends", "3", "--samples", "50", "--dir", str(tmp_path)]) == 0
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()][-1]["appends"] == 3
    assert not list(tmp_path.iterdir())
