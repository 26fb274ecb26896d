"""Composing on the real kernel: a volume over composed namespaces that change meanwhile."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import ExistsError
from dlfs.fabric.composing import ComposingTarget, NamespaceRequest, open_target
from tests.nvmet.guest import Guest, free_port
from tests.support.volumes import new_volume, write_dataset

HOST = "nqn.2024-01.org.example:trainer"
SAMPLES = {f"{number:02}": bytes([number]) * (1000 + 700 * number) for number in range(40)}

_SSH = """#!{python}
# Stands for ssh: runs 'sh -s VERB' of its last argument in the guest, which has no sshd.
import re, socket, sys
with socket.create_connection(("127.0.0.1", {port})) as guest:
    guest.sendall(f"set -- {{sys.argv[-1]}}\\n(".encode() + sys.stdin.buffer.read())
    guest.sendall(b") 2>/tmp/errors; code=$?; cat /tmp/errors; printf 'EXIT %d' $code\\nexit\\n")
    said = guest.makefile("rb").read().decode()
output, code = re.fullmatch(r"(.*)EXIT (\\d+)", said, re.DOTALL).groups()
print(output, end="", file=sys.stderr if int(code) else sys.stdout)
sys.exit(int(code))
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ComposingTarget, int]]:
    """A storage node with a folder /tmp/store, and the port of its data."""
    shell, port = free_port(), free_port()
    script = f"mkdir /tmp/store\nnc -ll -p {shell} -e sh >/dev/null 2>&1 &\n"
    script += f"until netstat -ltn | grep -q ':{shell} '; do sleep 0.05; done\n"
    ssh = tmp_path / "ssh"
    ssh.write_text(_SSH.format(python=sys.executable, port=shell))
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("DLFS_SSH", str(ssh))
    folder = tmp_path / "guest"
    folder.mkdir()
    with Guest(folder, script, ports=[shell, port]) as guest:
        guest.wait_until_ready()
        yield open_target("nvmet+ssh://root@storage-a"), port


@pytest.mark.qemu
def test_a_volume_over_composed_namespaces(node: tuple[ComposingTarget, int]) -> None:
    target, port = node

    def request(name: str, **changes) -> NamespaceRequest:
        return NamespaceRequest(
            **{
                "name": name,
                "size_bytes": 16 * MIB,
                "store": "/tmp/store",
                "address": "127.0.0.1",
                "allowed_hosts": (HOST,),
                "port": port,
                "discovery_port": port,
                **changes,
            }
        )

    made = [target.create(request(name)) for name in ("a", "b")]
    assert target.list() == made
    assert target.create(request("a")) == made[0]
    with pytest.raises(ExistsError, match="resize"):
        target.create(request("a", size_bytes=MIB))

    uris = new_volume([f"{each.uri}&hostnqn={HOST}" for each in made], label="pool")
    write_dataset(uris, "samples", SAMPLES)
    with dlfs.open(uris) as volume:
        dataset = volume["samples"]
        assert [dataset[i] for i in range(len(dataset))] == list(SAMPLES.values())
        grown = target.resize("a", 24 * MIB)
        assert grown.size_bytes == 24 * MIB
        assert [dataset[i] for i in range(len(dataset))] == list(SAMPLES.values())

    target.withdraw("a")
    with pytest.raises(dlfs.NotFoundError):
        dlfs.open(uris)
    assert target.create(request("a", size_bytes=24 * MIB)) == grown
    with dlfs.open(uris) as volume:
        assert list(volume.verify()) == []

    stranger = "nqn.2024-01.org.example:stranger"
    target.create(request("a", size_bytes=24 * MIB, allowed_hosts=(stranger,)))
    with pytest.raises(dlfs.DlfsError, match="refused host"):
        dlfs.open(uris)
    for name in ("a", "b"):
        target.withdraw(name, delete=True)
    assert target.list() == []
