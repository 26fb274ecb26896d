"""The examples of README.md and docs/: their Python runs, their commands print what is shown."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import ROOT, run_here
from tests.support.examples import Installation, run_example, sections

CHECKOUT = Installation(
    python=Path(sys.executable), variables={"PYTHONPATH": str(ROOT), "DLFS": str(ROOT)}
)
"""The dlfs of this checkout; the examples in C find its headers by the variable DLFS."""

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if not path.is_symlink()  # what a link leads to has tests of its own
}

MARKS = {
    "README.md: In PyTorch": [pytest.mark.torch],
    "README.md: One service for a machine": [pytest.mark.fuse],
    "README.md: Through a mount": [pytest.mark.fuse],
    "docs/mount.md": [pytest.mark.fuse],
    "docs/pytorch.md": [pytest.mark.torch],
    "docs/service.md": [pytest.mark.fuse],
    "docs/workers.md: Ray": [pytest.mark.ray],
}
"""Requirements of the examples, by page, or by page and section."""

SAMPLES = "README.md: Samples to try it with"
"""The section whose commands make the files that all other examples read."""


ELSEWHERE = ("docs/frameworks.md", "docs/slurm.md")
"""Pages whose examples other tests run: ``tests/support/documents.py``, ``tests/slurm``."""

SECTIONS = dict(
    section for page in PAGES.items() if page[0] not in ELSEWHERE for section in sections(*page)
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples that the README makes first."""
    folder: Path = tmp_path_factory.mktemp("made")
    for _, block in SECTIONS[SAMPLES]:
        run_example("console", block, folder, CHECKOUT)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Iterator[Path]:
    """Make the folder in which examples run, with the samples that the README makes first."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True, symlinks=True)
    yield tmp_path
    if os.path.ismount(tmp_path / "mnt"):  # an example failed
        subprocess.run([shutil.which("fusermount3") or "umount", "-uz", tmp_path / "mnt"])


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=MARKS.get(title, MARKS.get(title.partition(":")[0], [])))
        for title in SECTIONS
        if title != SAMPLES
    ],
)
def test_examples(title: str, folder: Path, request: pytest.FixtureRequest) -> None:
    marks = {mark.name for mark in request.node.iter_markers()}
    for language, block in SECTIONS[title]:
        if language == "python" and "fuse" not in marks:
            run_here(block, folder, prints_more="torch" in marks)
        else:
            run_example(language, block, folder, CHECKOUT)


@pytest.mark.parametrize("way", ["api", "pytorch", "service", "mount", "c", "formats"])
def test_every_way_in_has_its_page(way: str) -> None:
    assert any(title.startswith(f"docs/{way}.md: ") for title in SECTIONS)
    assert f"](docs/{way}.md)" in PAGES["README.md"]


def test_every_framework_has_an_example_that_runs() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests/unit/adapters").rglob("*.py"))
    page = "docs/frameworks.md"
    for title, blocks in sections(page, PAGES[page]):
        assert len(blocks) == 1, title
        assert f'run_framework("{title.partition(": ")[2]}"' in tests, title


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """MkDocs checks all links and anchors, and mkdocstrings every name of the reference."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "Epoch.resume" in (tmp_path / "reference/index.html").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_named_folders_of_tests_have_tests(page: str) -> None:
    for folder in set(re.findall(r"`(tests/[a-z]+)`", PAGES[page])):
        assert list((ROOT / folder).rglob("test_*.py")), folder


HOPS = re.findall(r"`([\w/.]+\.(?:py|c))`: `(\w+)`", PAGES["docs/architecture.md"])


@pytest.mark.parametrize(("file", "function"), HOPS)
def test_every_hop_of_the_architecture_exists(file: str, function: str) -> None:
    defined = rf"^(\s*(async )?def {function}|[\w ]+[ *]{function})\("
    assert re.search(defined, (ROOT / file).read_text(), re.MULTILINE), f"{function} in {file}"


def test_files_that_the_architecture_names_exist() -> None:
    named = re.findall(r"`((?:dlfs|native|tests|deploy)/[\w/.]*)`", PAGES["docs/architecture.md"])
    assert len(named) > 40
    assert not [name for name in named if not (ROOT / name).exists()]
