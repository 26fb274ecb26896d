"""The recipe for SPDK, against a real nvmf_tgt, which DLFS_SPDK_TARGET names."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.fabric.recipes import Export, spdk_script

HOST = "nqn.2024-01.org.example:trainer"
TARGET = os.environ.get("DLFS_SPDK_TARGET", "")

Run = Callable[[Export, str], tuple[int, str]]

pytestmark = [
    pytest.mark.spdk,
    pytest.mark.skipif(not TARGET, reason="no nvmf_tgt (DLFS_SPDK_TARGET)"),
    pytest.mark.skipif(shutil.which("spdk-rpc") is None, reason="no spdk-rpc (pip install spdk)"),
]


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Run a verb of a recipe next to a running nvmf_tgt."""
    rpc = tmp_path / "rpc.sock"
    options = ("-m", "0x1", "--no-huge", "-s", "512", "--no-pci", "-r", str(rpc))
    log = tmp_path / "nvmf_tgt.log"
    with log.open("wb") as output:
        target = subprocess.Popen([TARGET, *options], stdout=output, stderr=output)
    try:
        wait = ("spdk-rpc", "-s", str(rpc), "-r", "100", "framework_wait_init")
        subprocess.run(wait, check=True, capture_output=True)

        def call(export: Export, verb: str) -> tuple[int, str]:
            done = subprocess.run(
                ["sh", "-s", verb],
                input=spdk_script(export),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "SPDK_RPC_SOCKET": str(rpc)},
                text=True,
            )
            return done.returncode, done.stdout

        yield call
    finally:
        target.terminate()
        target.wait()


def test_start_verify_undo(run: Run, tmp_path: Path) -> None:
    ports = {"port": free_port(), "discovery_port": free_port()}
    exports = []
    for number in range(2):
        disk = tmp_path / f"disk {number}"
        disk.write_bytes(bytes(16 << 20))
        exports.append(
            Export(device=str(disk), address="127.0.0.1", allowed_hosts=(HOST,), **ports)
        )
    first, second = exports
    assert run(first, "verify")[0] == 1
    code, output = run(first, "start")
    assert (code, output.splitlines()[1:]) == (0, [HOST])
    assert run(first, "verify") == (0, output)
    assert run(first, "start") == (
        1,
        f"export.sh: {first.nqn} is exported already; undo it first\n",
    )
    assert run(second, "start")[0] == 0
    check_volume(exports)
    assert run(first, "undo") == (0, "")
    assert run(first, "verify")[0] == 1
    assert run(second, "verify")[0] == 0
    assert run(second, "undo") == (0, "")
    for port in ports.values():
        with pytest.raises(ConnectionRefusedError), socket.socket() as trial:
            trial.connect(("127.0.0.1", port))
    assert run(second, "start")[0] == 0


def check_volume(exports: list[Export]) -> None:
    """Check that a volume can be made of exported devices and that discovery finds it."""
    uris = [f"nvme-tcp://127.0.0.1:{e.port}/{e.nqn}?nsid=1&hostnqn={HOST}" for e in exports]
    dlfs.format_volume(uris)
    discovery = f"nvme-tcp+discover://127.0.0.1:{exports[0].discovery_port}?hostnqn="
    with dlfs.open(discovery + HOST) as volume:
        with volume.writer("samples") as writer:
            writer.add("one", b"1" * 100_000)
        assert volume["samples"].get("one") == b"1" * 100_000
    with pytest.raises(dlfs.NotFoundError, match="there is none"):
        dlfs.open(f"{discovery}nqn.2024-01.org.example:stranger")
