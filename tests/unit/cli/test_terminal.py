"""Snapshots of the output of every verb on terminals of 60 to 160 columns, and rules for it.

After an intended change: ``pytest tests/unit/cli/test_terminal.py --snapshot-update``, and look
at the difference.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import dlfs
from dlfs.fabric.recipes import RECIPES, Export
from tests.fuse.mounting import wait_for_exit
from tests.support.nvme import DiscoveryRecord, ScriptedTarget
from tests.unit.cli import commands
from tests.unit.cli.terminal import Terminal
from tests.unit.store.nodes import OddRecord, empty, nqn, serve, subsystem

WIDTHS = (60, 80, 100, 160)

MEMBERS = (
    "rack-03-node-17-nvme-wwn-0x5000c500a1b2c3d4-part1.img",
    "rack-03-node-18-nvme-wwn-0x5000c500a1b2c3d5-part1.img",
)
VOLUME = ",".join(MEMBERS)
NAME = "imagenet-21k-p-winter-2021-release-train-shuffled"
DEEP = "n02084071/dog.domestic_dog.canis_familiaris/ILSVRC2012_val_00012345_cropped_224x224.jpeg"
HOST = "nqn.2024-01.org.example:trainer"
ODD = b"odd \n\xff name"

VARYING = [
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "00000000-0000-0000-0000-000000000000"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d", "2000-01-01 00:00"),
    (r"\b0x[0-9a-f]{8}\b", "0x00000000"),
    (r"\b127\.0\.0\.1:\d{5}\b", "127.0.0.1:40000"),
]
"""Patterns of text that differs from run to run, each with a placeholder as wide."""

DROPPABLE = {
    "done",
    "granted",
    "of part",
    *("layout", "on device", "created", "superblock A", "superblock B", "at the tail", "block"),
    *(
        "in flight",
        "queues",
        "median us",
        "a request",
        "planning",
        "checking",
        "rest",
        "cache",
        "reads/s",
    ),
    *("device", "clients", "in memory", "callers", "user", "refused", "since"),
    *("freed", "on media"),
}
"""Titles of the columns that a narrow terminal may do without."""

VERBS = {
    "format": ("format", "new-{}.img", "--size", "4MiB"),
    "info": ("info", VOLUME),
    "info-damaged": ("info", "damaged.img"),
    "verify": ("verify", VOLUME),
    "verify-damaged": ("verify", "damaged.img"),
    "repair": ("repair", VOLUME),
    "import": ("import", "source", "target.img", "--name", f"{NAME}-{{}}"),
    "import-formats": ("import", "--formats"),
    "ls": ("ls", VOLUME),
    "ls-long": ("ls", "-l", VOLUME),
    "ls-samples": ("ls", VOLUME, NAME),
    "ls-samples-long": ("ls", "-l", "-R", VOLUME, NAME),
    "stat": ("stat", VOLUME, NAME),
    "stat-sample": ("stat", VOLUME, NAME, DEEP, os.fsdecode(ODD)),
    "cat": ("cat", VOLUME, NAME, DEEP),
    "export": ("export", VOLUME, NAME, "out-{}"),
    "diff": ("diff", VOLUME, NAME, f"{NAME}@1"),
    "du": ("du", VOLUME),
    "rm": ("rm", "removed-{}.img", NAME, "--yes"),
    "uri": ("uri",),
    "uri-one": ("uri", f"nvme-tcp://10.0.0.5/nqn.2024-01.org.example:disk0?nsid=1,{MEMBERS[0]}"),
    "not-found": ("cat", VOLUME, NAME, "nowhere"),
    "target-hostnqn": ("target", "hostnqn"),
    "no-volume": ("info", "/data/volumes/of-the-third-floor/that-is-not-there.img"),
}
LONG_LINES = {"ls", "ls-samples", "cat", "target-hostnqn"}
"""Names and data, which the terminal itself wraps."""
PICTURES = (
    "datasets",
    "members",
    "namespaces",
    "stalled",
    "topped",
    "topped_import",
    "topped_both",
)
"""Functions of ``tests.unit.cli.shown``."""


def make_volumes(folder: Path) -> None:
    samples = {DEEP.encode(): b"a dog\n", ODD: b"odd", b"n02084071/empty": b""}
    samples |= {b"n%08d/%d.jpeg" % (i % 7, i): bytes(i) for i in range(40)}
    names = {VOLUME: 2, "damaged.img": 1, "target.img": 1} | {
        f"removed-{columns:03}.img": 1 for columns in WIDTHS
    }
    for uri, replicas in names.items():
        dlfs.format_volume(
            [str(folder / member) for member in uri.split(",")],
            size_bytes=8 << 20,
            label="pool of the third floor",
            replicas=replicas,
        )
    for uri in [VOLUME, "damaged.img", *(name for name in names if "removed" in name)]:
        members = [str(folder / member) for member in uri.split(",")]
        with dlfs.open(members) as volume, volume.writer(NAME, seed=7) as writer:
            for path, data in samples.items():
                writer.add(path, data, attributes={"class name, as text": "dog", "weight": 0.25})
    with dlfs.open(str(folder / "damaged.img")) as volume, volume[NAME] as dataset:
        offset = dataset.stat(dataset.index(DEEP)).offset_bytes
    with (folder / "damaged.img").open("r+b") as file:
        file.seek(offset)
        file.write(b"A CAT")
        file.seek(100)
        file.write(b"?")
    (folder / "source").mkdir()
    for number in range(12):
        (folder / "source" / f"{number}.bin").write_bytes(bytes(1000))


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    # Its path is printed: it is equally long on every machine.
    with tempfile.TemporaryDirectory(prefix="dlfs-terminal-", dir="/tmp") as folder:
        make_volumes(Path(folder))
        with Terminal(Path(folder)) as terminal:
            yield terminal


def steady(text: str, folder: Path) -> str:
    """Replace what varies, the folder's random end although it may be folded over lines."""
    for pattern, placeholder in VARYING:
        text = re.sub(pattern, placeholder, text)
    end = r"(\s*)".join(folder.name.rpartition("-")[2])
    return re.sub(end, lambda found: "x" + "x".join(found.groups()) + "x", text)


def collage(pictures: dict[int, str]) -> str:
    return "\n".join(f"=== {width} columns\n{text}" for width, text in pictures.items())


# ---- rules ---------------------------------------------------------------------------------------


def grid(text: str) -> list[str]:
    """Lines in which each character stands at its column: wide ones are followed by a blank."""
    return [
        "".join(c + "\0" * (cell_len(c) - 1) for c in line) for line in text.rstrip().split("\n")
    ]


@dataclass(frozen=True)
class Words:
    """The words of a screen: in columns that may be dropped, and all others."""

    shown: set[str]
    dropped: set[str]


def words_of(text: str) -> Words:
    lines = grid(text)
    shown: set[str] = set()
    dropped: set[str] = set()
    for number in range(len(lines)):
        rule = number + 1 < len(lines) and set(lines[number + 1]) == {"─"}
        if rule:
            end = next((i for i in range(number, len(lines)) if not lines[i]), len(lines))
            _sort_table([lines[number], *lines[number + 2 : end]], shown, dropped)
            for i in range(number, end):
                lines[i] = ""
        shown.update(lines[number].split())
    bars = {word for word in shown if set(word) <= set("█▓▒░─│╭╮╰╯")}
    return Words({word.replace("\0", "") for word in shown - bars}, dropped)


def _sort_table(lines: list[str], shown: set[str], dropped: set[str]) -> None:
    width = max(map(len, lines))
    blank = "".join(
        " " if {line[i : i + 1] or " " for line in lines} == {" "} else "x" for i in range(width)
    )
    for column in re.finditer(r"x(?:x| (?! ))*", blank):
        title, *cells = (line[column.start() : column.end()].strip() for line in lines)
        for cell in [title, *cells]:
            (dropped if title in DROPPABLE else shown).update(cell.split())


def stands_in(word: str, lines: list[str]) -> bool:
    """Return True if a word is on the screen, in one piece or folded over lines."""
    word = "".join(c + "\0" * (cell_len(c) - 1) for c in word)
    return any(
        _follows(word, lines, row, match.start())
        for row, line in enumerate(lines)
        for match in re.finditer(re.escape(word[0]), line)
    )


def _follows(word: str, lines: list[str], row: int, column: int) -> bool:
    if row >= len(lines):
        return False
    piece = re.match(r"\S*", lines[row][column:])
    assert piece is not None
    found = piece[0]
    if found.startswith(word):
        return True
    if not found or not word.startswith(found):
        return False
    rest, below = word[len(found) :], lines[row + 1] if row + 1 < len(lines) else ""
    starts = {column, len(below) - len(below.lstrip())}
    return any(_follows(rest, lines, row + 1, start) for start in starts)


def check(pictures: dict[int, str], *, long_lines: bool = False) -> None:
    """No line is too long, and nothing is lost that a narrow terminal must show."""
    for width, text in pictures.items():
        assert "…" not in text
        if not long_lines:
            too_long = [line for line in text.split("\n") if cell_len(line) > width]
            assert not too_long, f"longer than {width} columns"
    widest = words_of(pictures[max(pictures)])
    for width, text in pictures.items():
        lines = grid(text)
        lost = {word for word in widest.shown if not stands_in(word, lines)}
        assert not lost, f"lost at {width} columns: {lost}\n{text}"


def photograph(terminal: Terminal, *words: object, **options: Any) -> dict[int, str]:
    """Return the screen after a command, at each width."""
    return {
        width: steady(terminal.run(*words, columns=width, **options), terminal.folder)
        for width in WIDTHS
    }


# ---- the verbs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VERBS)
def test_verbs(terminal: Terminal, snapshot, name: str) -> None:
    pictures = {}
    for width in WIDTHS:
        words = [word.replace("{}", f"{width:03}") for word in VERBS[name]]
        pictures[width] = steady(terminal.run(*words, columns=width), terminal.folder)
        pictures[width] = re.sub(
            rf"\b({NAME}|new|out|removed)-{width:03}\b", r"\1-000", pictures[width]
        )
    check(pictures, long_lines=name in LONG_LINES)
    assert collage(pictures) == snapshot


@pytest.mark.parametrize("name", PICTURES)
def test_large_statistics(terminal: Terminal, snapshot, name: str) -> None:
    pictures = {width: terminal.show(name, columns=width) for width in WIDTHS}
    check(pictures)
    assert collage(pictures) == snapshot


@pytest.mark.parametrize("verb", ["", "target", *commands.VERBS])
def test_help(terminal: Terminal, snapshot, verb: str) -> None:
    pictures = {width: terminal.run(*verb.split(), "--help", columns=width) for width in WIDTHS}
    check(pictures)
    assert "<" not in "".join(
        line.split("  ")[1] for line in pictures[160].split("\n") if "  -" in line
    )
    assert collage(pictures) == snapshot


@pytest.mark.parametrize("name", ["progress", "demonstrated", "workers"])
def test_what_is_shown_meanwhile_fits(terminal: Terminal, snapshot, name: str) -> None:
    pictures = {width: terminal.show(name, columns=width) for width in WIDTHS}
    check(pictures)
    assert collage(pictures) == snapshot


@pytest.mark.parametrize("verb", ["stall", "version", "doctor"])
def test_verbs_that_measure_fit(terminal: Terminal, verb: str) -> None:
    words = [verb] if verb != "stall" else [verb, VOLUME, NAME, "--seconds", 0.1, "--batch", 8]
    for width in WIDTHS:
        lines = terminal.run(*words, columns=width).split("\n")
        assert max(map(cell_len, lines)) <= width


# ---- storage nodes -------------------------------------------------------------------------------


def test_discover(terminal: Terminal, snapshot) -> None:
    spaces = [serve(terminal.folder / MEMBERS[1], 1), empty(2)]
    with ScriptedTarget([subsystem("pool-7:disk-a", spaces, hosts=[HOST])]) as target:
        address = f"127.0.0.1:{target.port}"
        found = photograph(terminal, "discover", address, "--hostnqn", HOST)
        target.list_also([OddRecord(DiscoveryRecord(nqn("r"), "127.0.0.1", 1), {0: b"\1"})])
        refused = photograph(terminal, "discover", address)
    for pictures in (found, refused):
        check(pictures)
        assert collage(pictures) == snapshot


@pytest.mark.parametrize("kind", RECIPES)
def test_target_recipe(terminal: Terminal, snapshot, kind: str) -> None:
    """A script is printed as it is, to be copied; what to do with it fits the terminal."""
    export = Export(device="/data/a disk", address="fd00::7", allowed_hosts=(HOST,))
    options = ("--address", export.address, "--allow", HOST, "--kind", kind)
    pictures = photograph(terminal, "target", "recipe", export.device, *options)
    script = steady(RECIPES[kind](export), terminal.folder)
    assert all(picture.startswith(script) for picture in pictures.values())
    notes = {width: picture.removeprefix(script) for width, picture in pictures.items()}
    check(notes)
    assert collage(notes) == snapshot


# ---- mounts and services -------------------------------------------------------------------------


INCOMING = [
    ("incoming", "mnt"),
    ("seal", "mnt", "with links"),
    ("seal", "mnt", "with links", "--skip-links"),
    ("seal", "mnt", f"{NAME}-of-the-third-floor"),
    ("incoming", "mnt"),
    ("incoming", "mnt", "--discard", "with links"),
    ("incoming", "mnt"),
]
"""Commands for one dataset that can be sealed, and one that cannot."""


def write_incoming(folder: Path) -> None:
    (folder / f"{NAME}-of-the-third-floor").mkdir()
    (folder / f"{NAME}-of-the-third-floor" / "1.bin").write_bytes(bytes(5000))
    (folder / "with links").mkdir()
    (folder / "with links" / "1.bin").symlink_to("nowhere")


@pytest.mark.fuse
def test_mounts(terminal: Terminal, snapshot) -> None:
    """One mount at each width, since most of these commands do their work once."""
    folder = terminal.folder
    (folder / "mnt").mkdir()
    dlfs.format_volume(str(folder / "mounted.img"), size_bytes=8 << 20)
    options = ("--incoming", "spool", "--no-uring", "--log", "mount.log")
    shown: dict[tuple[str, ...], dict[int, str]] = {}
    for width in WIDTHS:

        def take(*words: str, title: str = "", width: int = width) -> None:
            text = steady(terminal.run(*words, columns=width), folder)
            shown.setdefault((title, *words), {})[width] = re.sub(r"(floor)@\d", r"\1@1", text)

        take("mount", "mounted.img", "mnt", *options)
        try:
            write_incoming(folder / "mnt" / "incoming")
            for number, words in enumerate(INCOMING):
                take(*words, title=f"{number}")
        finally:
            take("umount", "mnt")
            for pid in re.findall(r"dlfs\[(\d+)\]", (folder / "mount.log").read_text()):
                wait_for_exit(int(pid))  # then the next server can take the staging area
        take("umount", "mnt", title="again")
    for pictures in shown.values():
        check(pictures)
        assert collage(pictures) == snapshot


def test_serve(terminal: Terminal, snapshot) -> None:
    options = ("--socket", "a.sock", "--cache", "64MiB", "--metrics", "127.0.0.1:0")
    pictures = photograph(terminal, "serve", VOLUME, *options, until="serving on")
    check(pictures)
    assert collage(pictures) == snapshot


@pytest.mark.parametrize("rows", [6, 10, 24, 40])
def test_top_on_a_low_terminal(terminal: Terminal, snapshot, rows: int) -> None:
    pictures = {width: terminal.show("topped_live", columns=width, rows=rows) for width in WIDTHS}
    for width, picture in pictures.items():
        lines = picture.splitlines()
        assert len(lines) <= rows
        whole = [line for line in terminal.show("topped", columns=width).splitlines() if line]
        added = [line for line in lines if line not in whole]
        assert len(added) == (lines != whole)
        assert all(line.startswith("no room for ") for line in added)
    assert collage(pictures) == snapshot


def test_top_of_a_service(terminal: Terminal) -> None:
    """Check the live screen of a running service; its statistics differ from run to run."""
    uri = f"unix:{terminal.folder}/top.sock"
    command = [sys.executable, "-m", "dlfs.cli", "serve", VOLUME, "--socket", "top.sock", "--json"]
    with subprocess.Popen(command, cwd=terminal.folder, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        try:
            while service.stdout.readline() not in (b"}\n", b""):
                pass
            with dlfs.connect(uri) as volume, volume[NAME] as dataset:
                assert dataset.get(DEEP) == b"a dog\n"
                for width, rows in zip(WIDTHS, itertools.cycle((8, 50))):
                    options = ("--interval", 0.1, "--count", 1)
                    picture = terminal.run("top", uri, *options, columns=width, rows=rows)
                    lines = picture.splitlines()
                    assert len(lines) <= rows
                    assert max(map(cell_len, lines)) <= width
                    assert "…" not in picture
                    assert ("no room for" in picture) == (rows == 8)
        finally:
            service.terminate()
    assert service.returncode == 0
