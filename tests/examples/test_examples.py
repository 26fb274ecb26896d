"""Each program of examples/ runs, learns, and continues where it was stopped.

They take about five seconds of CPU time each, most of it for importing PyTorch. ``make test`` runs
the quickest; ``make test-examples``, which sets ``DLFS_EXAMPLES``, runs all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LINES_MAX = 140

slow = pytest.mark.skipif(
    not os.environ.get("DLFS_EXAMPLES"), reason="takes 5 to 20 s of CPU time: make test-examples"
)

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs an example with its data in one folder, and returns what it prints."""

    def run(name: str, *arguments: str, ranks: int = 1) -> str:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        command = [sys.executable, *(launcher if ranks > 1 else ())]
        command += [str(EXAMPLES / name), "--folder", str(tmp_path / "data"), *arguments]
        # No activated environment: neither dlfs nor python is found.
        environment = {**os.environ, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def numbers(pattern: str, text: str) -> list[float]:
    """Return the numbers that a pattern finds."""
    return [float(number) for number in re.findall(pattern, text)]


@slow
@pytest.mark.torch
def test_classify_images(run: Run) -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("no torchvision")
    assert run("classify_images.py", "--stop-after", "9", ranks=2) == ""
    resumed = run("classify_images.py", ranks=3)
    assert sorted(re.findall(r"rank (\d) of 3 resumes epoch 0 at image 360", resumed)) == [*"012"]
    assert numbers(r"epoch (\d): loss", resumed) == [0, 1, 2, 3]
    assert numbers(r"epoch 0: .* of (\d+) images", resumed) == [80]  # a third of what was left
    alone = run("classify_images.py", "--restart")
    right = numbers(r" (\d+) of 600 images right", alone)
    assert len(right) == 4
    assert right[-1] > 500


@slow
@pytest.mark.torch
def test_regress_volumes(run: Run) -> None:
    errors = numbers(r"mass ([0-9.]+)", run("regress_volumes.py"))
    assert len(errors) == 5
    assert errors[-1] < 0.35 < errors[0]


@pytest.mark.torch
def test_segment_volumes(run: Run) -> None:
    scores = numbers(r"Dice score ([0-9.]+)", run("segment_volumes.py"))
    assert len(scores) == 5
    assert scores[-1] > 0.75 > scores[0]


@slow
@pytest.mark.torch
def test_language_model(run: Run) -> None:
    printed = run("language_model.py")
    losses = numbers(r"loss ([0-9.]+)", printed)
    assert len(losses) == 3
    assert losses[-1] < 0.6 < losses[0]
    assert "'2 3 4' -> '2 3 4 5 6 7.'" in printed


@pytest.mark.frameworks
@pytest.mark.torch  # CI installs nbclient next to PyTorch
@pytest.mark.filterwarnings("ignore")  # what other packages deprecate
def test_tour(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    assert not any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    pages = [one["data"]["text/html"] for one in outputs if "text/html" in one.get("data", {})]
    assert len(pages) == 5
    assert sum("data:image/png" in page for page in pages) >= 2
    text = "".join(one.get("text", "") for one in outputs)
    assert "300 samples left" in text
    assert "for training" in text


def test_readme_lists_every_example() -> None:
    listed = re.findall(r"\]\((\w+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text())
    found = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short_and_use_the_public_interface(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LINES_MAX
    modules = set(re.findall(r"(?:from|import) (dlfs[\w.]*)", text))
    assert modules <= {"dlfs", "dlfs.adapters.torch"}
    assert not re.search(r"\._[a-z]", text)
