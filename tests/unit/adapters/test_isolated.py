"""Adapters to TensorFlow, JAX and Grain, each in a process of its own.

They leave threads behind, which do not survive a fork, and many other tests fork. The first two are
too large for the packages of the tests: where they are not installed, their cases are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dlfs
from dlfs.adapters.tf import batches, example_parser

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.mark.parametrize(
    ("package", "cases"), [("tensorflow", "tf"), ("jax", "jax"), ("grain", "grain")]
)
def test_cases(package: str, cases: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package} (make test PACKAGES={package})")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--basetemp={tmp_path}/base", str(HERE / f"cases_{cases}.py")]
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_without_tensorflow(numbers, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(dlfs.UsageError, match="pip install tensorflow"):
        batches(numbers, 16)
    with pytest.raises(dlfs.UsageError, match="pip install tensorflow"):
        example_parser({})
