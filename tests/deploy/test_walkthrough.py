"""The walk-through of deploy/README.md, run literally on machines made of network namespaces.

The storage nodes' disks are files here. Output that differs from run to run is not compared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.deploy.machines import Network, StorageNode

README = (Path(__file__).parents[2] / "deploy" / "README.md").read_text()
DISK = "/dev/nvme1n1"
STORE = "/srv/dlfs"
MOUNTPOINT = "/mnt/dlfs"

VARYING = [
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
    (r"in \d+\.\d\d s", "in TIME"),
    (r"\d+(\.\d)? [KMGT]iB", "SIZE"),
    (r"\(server \d+, (over io_uring, )?log: [^)]*\)", "(SERVER)"),
    (r" +", " "),
    (r"─+", "─"),
]


def blocks() -> Iterator[tuple[str, str]]:
    """Return the blocks of the walk-through in order, as (language, text)."""
    text = README[README.index("## Two storage nodes") : README.index("## nvmet")]
    yield from re.findall(r"^```(console|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[tuple[str, str, str]]:
    """Return machine, command and expected output of each command of a console block."""
    return re.findall(r"^([a-z-]+)[$#] (.*)\n((?:(?![a-z-]+[$#] ).*\n)*)", block, re.MULTILINE)


def steady(text: str) -> str:
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return "\n".join(line.strip() for line in text.splitlines())


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with closing(Network(tmp_path)) as network:
        for kind in ("cat", "dog"):
            folder = network.machines["trainer"].folder / "photos" / kind
            folder.mkdir(parents=True)
            for number in range(300):
                (folder / f"{number:04}.jpg").write_bytes(os.urandom(8192))
        yield network


def run(network: Network, name: str, command: str, mountpoint: Path) -> tuple[int, str]:
    """Run a command, with the README's paths replaced by this test's."""
    machine = network.machines[name]
    places = {MOUNTPOINT: str(mountpoint), STORE: str(mountpoint.parent / "store")}
    if " compose " in command:
        command = command.replace("GiB", "MiB")
    if isinstance(machine, StorageNode):
        places[DISK] = str(machine.disk)
    elif found := re.search(r"--address (\S+)", command):
        places[DISK] = next(
            str(node.disk)
            for node in network.machines.values()
            if isinstance(node, StorageNode) and node.address == found[1]
        )
    for written, here in places.items():
        command = command.replace(written, here)
    code, shown = machine.type(command)
    for node in network.machines.values():
        if isinstance(node, StorageNode):
            node.serve()
    for written, here in places.items():
        shown = shown.replace(here, written)
    return code, shown


@pytest.mark.fuse
@pytest.mark.root
@pytest.mark.timeout(120)
def test_walkthrough(network: Network, tmp_path: Path) -> None:
    mountpoint = tmp_path / "mountpoint"
    mountpoint.mkdir()
    (tmp_path / "store").mkdir()
    printed = iter(["600 samples from 2 members\n", "[]\n"])
    for language, text in blocks():
        if language == "python":
            (tmp_path / "10.0.0.20" / "example.py").write_text(text)
            shown = run(network, "trainer", "python example.py", mountpoint)
            assert shown == (0, next(printed))
            continue
        for name, command, expected in commands(text):
            code, shown = run(network, name, command, mountpoint)
            assert steady(shown) == steady(expected), command
            assert (code == 0) == (not expected.startswith("dlfs:")), command
