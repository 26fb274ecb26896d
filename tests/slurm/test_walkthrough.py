"""The walk-through of docs/slurm.md, run literally on a cluster."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PATH, Cluster
from tests.slurm.lab import ROOT

PAGE = (ROOT / "docs" / "slurm.md").read_text()
VOLUME = "nvme-tcp+discover://10.0.0.11,nvme-tcp+discover://10.0.0.12"
COMMAND = re.compile(r"^(ann|node|head)[$#] (.*)\n((?:(?!\w+[$#] ).*\n)*)", re.MULTILINE)

pytestmark = [pytest.mark.slurm, pytest.mark.fuse, pytest.mark.timeout(600)]


def commands() -> Iterator[tuple[str, str, str]]:
    """Yield machine, command and expected output of each command of the page."""
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        yield from COMMAND.findall(block)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2, prolog=False, datasets=False) as cluster:
        for number in range(600):
            folder = cluster.shared / "photos" / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:04}.jpg").write_bytes(number.to_bytes(2) * 2048)
        yield cluster


def test_walkthrough(cluster: Cluster) -> None:
    """The commands of users share one shell's variables; those of nodes run on each of them."""
    places = {
        "/opt/dlfs/slurm": str(cluster.scripts),
        "/opt/dlfs/bin": str(Path(sys.executable).parent),
        "/data/photos": str(cluster.shared / "photos"),
        "/etc/slurm/slurm.conf": str(cluster.configuration),
        VOLUME: cluster.volume,
    }
    has_torch = importlib.util.find_spec("torch") is not None
    for path in cluster.scripts.iterdir():
        if path.is_file():  # the scripts and settings name the same places
            text = path.read_text()
            for written, here in places.items():
                text = text.replace(written, here)
            path.write_text(text)
    said: list[str] = []
    stage_job = 0
    run = set()
    for machine, written, expected in commands():
        if not has_torch and ("torchrun" in written or written == "ls run"):
            continue
        command = written
        for there, here in places.items():
            command = command.replace(there, f"'{here}'" if there == VOLUME else here)
        run.add(machine)
        if machine == "node":
            for node in cluster.nodes.values():
                assert node.run("sh", "-c", command) == expected
        elif machine == "head":
            assert cluster.head.run("sh", "-c", command) == expected
        else:
            said.append(command)
            # What a shell knows from earlier commands is repeated; jobs are not.
            known = [each for each in said[:-1] if each.startswith(("export ", "stage="))]
            variables = "\n".join(
                f"stage={stage_job}" if each.startswith("stage=") else each for each in known
            )
            code, shown = cluster.head.try_run(
                "bash", "-c", f"{variables}\n{command}\necho :$stage", user="ann",
                cwd=cluster.home("ann"), environment={"PATH": PATH}, timeout_s=300,
            )  # fmt: skip
            shown, _, stage = shown.rpartition(":")
            if command.startswith("stage="):
                stage_job = int(stage)
            assert (code, steady(shown)) == (0, steady(expected)), command
    assert run == {"ann", "node", "head"}
    cluster.wait_until_clean()


def steady(text: str) -> str:
    """Return an output without what differs from run to run, such as that torch is missing."""
    lines = [line for line in text.splitlines() if not line.startswith("srun: ")]
    return re.sub(r"batch job \d+", "batch job N", "\n".join(lines))
