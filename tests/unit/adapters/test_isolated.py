"""Adapters to TensorFlow, JAX, Ray, Grain and Dask, each in a process of its own.

They leave threads behind, which do not survive a fork, and many other tests fork. The first three
are too large for the packages of the tests (TensorFlow and JAX with hundreds of megabytes, Ray with
a cluster of processes to start): where they are not installed, their cases are skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dlfs
from dlfs.adapters import dask as dask_adapter
from dlfs.adapters.huggingface import stream
from dlfs.adapters.tf import batches, example_parser

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.mark.parametrize(
    ("package", "cases"),
    [
        ("tensorflow", "tf"),
        ("jax", "jax"),
        ("ray", "ray"),
        ("grain", "grain"),
        ("dask", "dask"),
    ],
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


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("dask.bag", dask_adapter.bag),
        ("dask.dataframe", dask_adapter.dataframe),
        ("datasets", stream),
    ],
)
def test_without_a_package(module, use, numbers, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(
        dlfs.UsageError, match=rf"{package} to be installed.*pip install.*{package}"
    ):
        use(numbers)


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    monkeypatch.delitem(sys.modules, "dlfs.adapters.ray", raising=False)
    with pytest.raises(
        dlfs.UsageError, match=r"Ray Data to be installed.*pip install.*ray\[client,data\]"
    ):
        importlib.import_module("dlfs.adapters.ray")
