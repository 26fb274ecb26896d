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
from dlfs.fabric.keys import KeyKind, generate_key, write_key
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
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a verb of a recipe next to a running nvmf_tgt, which has the options of the parameter."""
    rpc = tmp_path / "rpc.sock"
    further = getattr(request, "param", ())
    options = ("-m", "0x1", "--no-huge", "-s", "512", "--no-pci", "-r", str(rpc), *further)
    log = tmp_path / "nvmf_tgt.log"
    with log.open("wb") as output:
        target = subprocess.Popen([TARGET, *options], stdout=output, stderr=output)
    try:
        method = "spdk_get_version" if "--wait-for-rpc" in further else "framework_wait_init"
        wait = ("spdk-rpc", "-s", str(rpc), "-r", "100", method)
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


@pytest.mark.parametrize("run", [("--wait-for-rpc",)], indirect=True)
def test_tls_and_authentication(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLFS_KEYS", str(tmp_path / "host"))
    monkeypatch.setattr("dlfs.fabric.recipes.KEYS", str(tmp_path / "node"))
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(16 << 20))
    ports = {"port": free_port(), "discovery_port": free_port()}
    options = {"address": "127.0.0.1", "allowed_hosts": (HOST,), "tls": True, "auth": True, **ports}
    export = Export(device=str(disk), **options)
    names = {"wire": f"{HOST}.tls", "chap": HOST, "node": export.nqn}

    def rotate() -> None:
        """Give the storage node and this host new keys."""
        for name, there in names.items():
            key = generate_key(KeyKind.TLS if name == "wire" else KeyKind.DHCHAP)
            write_key(name, key, replace=True)
            (tmp_path / "node").mkdir(mode=0o700, exist_ok=True)
            shutil.copy(tmp_path / "host" / name, tmp_path / "node" / there)

    rotate()
    code, output = run(export, "start")
    assert (code, output.splitlines()[-1:]) == (0, [HOST]), output
    keys = "&tls_psk=wire&dhchap_key=chap&dhchap_ctrl_key=node"
    check_volume([export], keys)
    with pytest.raises(dlfs.AuthenticationError, match="demands TLS"):
        dlfs.open(f"nvme-tcp+discover://127.0.0.1:{export.discovery_port}?hostnqn={HOST}")
    uri = f"nvme-tcp://127.0.0.1:{export.port}/{export.nqn}?nsid=1&hostnqn={HOST}{keys}"
    with dlfs.open(uri, memory_bytes=1 << 20) as volume:
        samples = volume["samples"]
        for _ in range(2):
            rotate()
            assert run(export, "rotate") == (0, "")
            assert samples.get("one") == b"1" * 100_000
    assert run(export, "undo") == (0, "")
    with_plain = Export(device=str(disk), **{**options, "tls": False, "auth": False})
    assert run(with_plain, "start")[0] == 0
    check_volume([with_plain])


def check_volume(exports: list[Export], keys: str = "") -> None:
    """Check that a volume can be made of exported devices and that discovery finds it."""
    uris = [f"nvme-tcp://127.0.0.1:{e.port}/{e.nqn}?nsid=1&hostnqn={HOST}{keys}" for e in exports]
    dlfs.format_volume(uris, force=True)
    discovery = f"nvme-tcp+discover://127.0.0.1:{exports[0].discovery_port}?hostnqn="
    with dlfs.open(discovery + HOST + keys) as volume:
        with volume.writer("samples") as writer:
            writer.add("one", b"1" * 100_000)
        assert volume["samples"].get("one") == b"1" * 100_000
    refusal = dlfs.AuthenticationError if keys else dlfs.NotFoundError
    with pytest.raises(refusal, match="has no TLS key" if keys else "there is none"):
        dlfs.open(f"{discovery}nqn.2024-01.org.example:stranger{keys}")
