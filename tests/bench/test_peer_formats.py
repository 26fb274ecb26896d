"""The adapters of other projects' formats, each in a process of its own, as they are raced.

They need large packages: ``make test PACKAGES='.[peers]'`` installs them.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.errors import Unavailable
from bench.peers.packages import needed, workers
from bench.peers.peer import Peer
from bench.process import ROOT

MODULES = ("array_record", "huggingface", "lance", "litdata", "mds", "webdataset")
SHARED_MEMORY = Path("/dev/shm")
PEERS = [
    pytest.param(module, peer, id=peer.name)
    for module in MODULES
    for peer in importlib.import_module(f"bench.peers.{module}").PEERS
]


def of_streaming() -> set[str]:
    """What MosaicML Streaming has in shared memory."""
    return {name for name in os.listdir(SHARED_MEMORY) if re.match(r"\d{6}_", name)}


def of_session(session: int) -> list[str]:
    """The processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


@pytest.mark.parametrize(("module", "peer"), PEERS)
def test_every_sample_comes_back_and_nothing_stays_behind(
    module: str, peer: Peer, tmp_path: Path
) -> None:
    folder, temporary, home = (tmp_path / name for name in ("data", "temporary", "home"))
    for path in (folder, temporary, home):
        path.mkdir()
    before = of_streaming()
    command = [sys.executable, "-m", "tests.bench.peer_child", f"bench.peers.{module}", peer.name]
    environment = {**os.environ, "TMPDIR": str(temporary), "HOME": str(home)}
    child = subprocess.Popen(
        [*command, str(folder)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = child.communicate()
    assert child.returncode == 0, err
    found = json.loads(out)
    if "unavailable" in found:
        pytest.skip(found["unavailable"])

    assert err == ""
    assert "refused" not in found or "differ in length" in found["refused"]
    assert found.get("random", 500) == 500
    assert peer.random or found["own_order"]
    assert found.get("shuffled", True)
    assert found.get("seeds", True)
    assert found["left"] == []
    # PyTorch makes itself one, and keeps it.
    assert [path for path in temporary.iterdir() if "torchinductor" not in path.name] == []
    assert list(home.iterdir()) == []
    assert of_streaming() <= before
    assert of_session(child.pid) == []


def test_a_missing_package_is_told() -> None:
    with pytest.raises(Unavailable, match=r"no-such-thing: .*make bench installs it"):
        needed("no_such_module_at_all.inside", "no-such-thing")
    assert workers() >= 1
