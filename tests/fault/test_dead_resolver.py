"""A name server that never answers: opening takes ``connect_ms``, and not as long as the resolver.

The child has a network and a mount namespace of its own, in which the name server is a socket of
this machine that reads nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.namespaces import in_own_mounts

pytestmark = pytest.mark.root

CHILD = """
import json, socket, sys, time
import dlfs
from dlfs.errors import DlfsError

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
    silent.bind(("127.0.0.1", 53))
    seen = []
    for options in ("connect_ms=300&reconnect_ms=0", "connect_ms=300&reconnect_ms=500"):
        began = time.monotonic()
        try:
            dlfs.open(f"nvme-tcp://storage.example:4420/nqn.2026-01.org.example:x?nsid=1&{options}")
        except DlfsError as error:
            seen.append([time.monotonic() - began, str(error)])
print(json.dumps(seen))
"""
RESOLVER_S = 20  # two tries of 10 s, which the resolver makes before it gives up


def test_a_name_server_that_is_silent_is_waited_for_as_a_host_is(tmp_path: Path) -> None:
    settings = tmp_path / "resolv.conf"
    settings.write_text("nameserver 127.0.0.1\noptions timeout:10 attempts:2\n")
    script = (
        'ip link set lo up; mount --bind "$1" "$(readlink -f /etc/resolv.conf)"; exec "$2" -c "$3"'
    )
    command = in_own_mounts(script, "--net")
    done = subprocess.run(
        [*command, settings, sys.executable, CHILD], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for took_s, message in json.loads(done.stdout):
        assert took_s < RESOLVER_S / 2
        assert "connect storage.example:4420: find the address of storage.example: the r" in message
