"""The whole report: its parts, its index with the summary, what it says on the way."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from rich.console import Console

from bench import datasets, gather, progress
from bench.gather import Ended, Part
from bench.machine import describe
from bench.peers.outcome import GLOBAL_GIVEN, Outcome, Run
from bench.peers.report import make_report
from bench.progress import Progress
from bench.report import Report, Table


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """Programs that leave a file each instead of the real ones; the second fails."""
    program = "import sys, pathlib; pathlib.Path(sys.argv[2], '{0}.md').touch(); sys.exit({1})"
    found = [
        Part(name, name.title(), ("-c", program.format(name, code)), 1)
        for name, code in (("fine", 0), ("broken", 3))
    ]
    monkeypatch.setattr(gather, "PARTS", found)
    return found


def test_the_index_names_what_each_part_left(parts: list[Part], tmp_path: Path) -> None:
    words = ["--results", str(tmp_path), "--dir", str(tmp_path / "data"), "--corpus", "none"]
    (tmp_path / "data" / "dlfs-bench" / "left").mkdir(parents=True)
    assert gather.main(words) == 1
    text = (tmp_path / gather.INDEX).read_text()
    assert "- [fine.md](fine.md)" in text
    assert "FAILED: exit 3" in text
    assert "No real files were read" in text
    assert list((tmp_path / "data").iterdir()) == []
    with pytest.raises(SystemExit):
        gather.main(["--parts", "nothing"])
    with pytest.raises(SystemExit):
        gather.main([*words, "--corpus", str(tmp_path / "nowhere")])


def test_an_interrupt_lets_the_part_clean_up_and_ends_the_report(
    parts: list[Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "try:\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    pathlib.Path(sys.argv[2], 'removed').touch()\n"
    )
    monkeypatch.setattr(gather, "PARTS", [Part("ends", "Ends", ("-c", program), 1), *parts])
    words = ["--results", str(tmp_path), "--dir", str(tmp_path / "data"), "--corpus", "none"]
    assert gather.main(words) == gather.INTERRUPTED
    assert (tmp_path / "removed").exists()
    assert not (tmp_path / "fine.md").exists()
    assert "was interrupted after" in (tmp_path / gather.INDEX).read_text()


def test_the_summary_leads(tmp_path: Path) -> None:
    facts = describe(tmp_path)
    cases = Report("cases", "", facts, {})
    cases.add(Table("Floors: 1 MISSED, 1 met", ("case", ""), [("a", "MISSED"), ("b", "met")]))
    cases.add(Table("random-4k", ("contender",), [("fio",)]))
    cases.write(tmp_path)
    runs = [
        Run(peer, "4k", GLOBAL_GIVEN, False, 1, 1, 0, rate, rate, 1.0, 0.5)
        for peer, rate in (("dlfs", 90), ("array_record", 30), ("lmdb", 60))
    ]
    datasets = {"4k": {"about": "4 KiB samples", "samples": 100, "sample_bytes": 409_600}}
    missing = [("litdata", "4k", "", "litdata has no wheel")]
    outcome = Outcome(runs, [], missing, datasets, {"lmdb": "1"})
    make_report(facts, {}, outcome).write(tmp_path)
    ended = [
        Ended(Part(name, name, ("-m", name), 1), f"python -m {name}", 0, 60.0, files)
        for name in ("cases", "peers")
        for files in [tuple(path.name for path in sorted(tmp_path.glob(f"{name}-*")))]
    ]

    text = gather.index(ended, facts, "No corpus.", tmp_path)

    assert "## Floors: 1 MISSED, 1 met\n\n| case |  |\n| --- | --- |\n| a | **MISSED** |" in text
    assert "| fio |" not in text
    assert "| array_record | 3.00 met | 3.00 met |" in text
    assert "| lmdb | **1.50 MISSED** |" in text
    assert "| webdataset | - |" in text
    assert "- litdata did not run: litdata has no wheel" in text
    assert text.index("## Floors") < text.index("How many times") < text.index("python -m cases")
    assert facts["commit"] in text.splitlines()[2]


def test_pages_hold_what_cells_may_hold(tmp_path: Path) -> None:
    assert Table("", ("a", "b"), [("x|y", "two\nlines")]).markdown() == [
        "| a | b |",
        "| --- | --- |",
        "| x\\|y | two lines |",
    ]
    report = Report("kind", "Title", {"date": "2026-11-21T01:02:03+00:00"}, {"a": 1})
    report.add("text")
    path = report.write(tmp_path)
    assert path.name == "kind-2026-11-21T010203Z.json"
    lines = path.with_suffix(".md").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("# Title", "")
    assert "text" in lines
    assert json.loads(path.read_text())["a"] == 1


def test_progress_is_told_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 60.0, 61.0, 600.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with Progress(Console(file=out), "peers") as told:
        told.whole().show("begins")
        stretch = told.whole().part(0.0, 0.5)
        stretch.show("lmdb", 0.2)
        stretch.show("too soon to be shown", 0.3)
        stretch.show("hdf5", 1.0)
    lines = [line[9:] for line in out.getvalue().splitlines()]
    assert lines == [
        "peers: begins (0%)",
        "peers: lmdb (10% done, about 9 min left)",
        "peers: hdf5 (50% done, about 10 min left)",
    ]


def test_progress_on_a_terminal_is_one_line() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=80), "cases") as told:
        told.show("random-4k", 0.5)
    assert "cases" in out.getvalue()


def test_who_is_late_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 20.0, 20.0, 70.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    whole = Progress(minutes=1.0).whole()
    half = whole.part(0.0, 0.5)
    assert half.has_time_for(16.0)  # a fifth of the minute, and half of the rest
    assert not half.has_time_for(17.0)
    assert not whole.has_time_for(0.0)
    monkeypatch.undo()
    assert Progress().has_time_for(1e9, 0.01)


def test_the_corpus_is_apart_from_what_a_part_removes(
    parts: list[Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, sources = tmp_path / "sources.tar.xz", tmp_path / "sources"
    sources.mkdir()
    (sources / "main.c").write_text("int x;")
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(sources, "sources")
    for module in (gather, datasets):
        monkeypatch.setattr(module, "CORPUS_ARCHIVE", archive)
    program = (
        "import pathlib, sys\n"
        "words = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "corpus = pathlib.Path(words['--corpus'])\n"
        "assert (corpus / 'sources' / 'main.c').exists()\n"
        "assert 'dlfs-bench' not in corpus.parts and 'dlfs-bench-peers' not in corpus.parts\n"
    )
    part = Part("reads", "Reads", ("-c", program), 1, ("--dir", "--corpus", "--minutes"))
    monkeypatch.setattr(gather, "PARTS", [part])
    assert gather.main(["--results", str(tmp_path), "--dir", str(tmp_path / "data")]) == 0
    assert "The corpus is linux-source" in (tmp_path / gather.INDEX).read_text()
    assert list((tmp_path / "data").iterdir()) == []
