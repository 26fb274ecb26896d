"""The guest: features that the tests of the initiator rely on."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from tests.nvmet.guest import Disk, Guest, GuestError, free_port
from tests.nvmet.initrd import build_archive
from tests.nvmet.kernel import KernelError, decompress_kernel, order_modules
from tests.nvmet.target import KernelTarget

ICREQ = struct.pack("<BBBBIHBBI112x", 0, 0, 128, 0, 128, 0, 0, 0, 0)
ICRESP_HEAD = struct.pack("<BBBBI", 1, 0, 128, 0, 128)


def ic_response(port: int) -> bytes:
    """Return the first bytes of a target's answer to an initialization request."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(ICREQ)
        with connection.makefile("rb") as stream:
            return stream.read(len(ICRESP_HEAD))


@pytest.mark.qemu
def test_a_target_serves_and_survives_a_pause(kernel_target: KernelTarget) -> None:
    assert ic_response(kernel_target.port) == ICRESP_HEAD
    kernel_target.guest.pause()
    with socket.create_connection(("127.0.0.1", kernel_target.port)) as connection:
        connection.sendall(ICREQ)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        kernel_target.guest.resume()
        connection.settimeout(30)
        assert ICRESP_HEAD.startswith(connection.recv(1))


@pytest.mark.qemu
def test_a_guest_that_ends_early_or_fails_reports_the_reason(tmp_path: Path) -> None:
    with Guest(tmp_path, "echo no good; exit 9", ports=[free_port()]) as guest:
        assert guest.running
        with pytest.raises(GuestError, match=r"failed:[\s\S]*no good"):
            guest.wait_until_ready()
        guest.kill()
        assert not guest.running
    missing = tmp_path / "missing"
    missing.mkdir()
    with (
        Guest(missing, "true", disks=[Disk(tmp_path / "none")]) as guest,
        pytest.raises(GuestError, match=r"ended:[\s\S]*Could not open"),
    ):
        guest.wait_until_ready()


def test_archives_are_padded_as_the_format_says() -> None:
    archive = build_archive([("d", 0o40755, b""), ("d/file", 0o100644, b"12345")])
    assert archive.startswith(b"070701" + b"%08x" % 1 + b"%08x" % 0o40755)
    assert archive.index(b"d/file\0") % 4 == 110 % 4
    assert archive.index(b"12345" + bytes(3) + b"070701") % 4 == 0
    assert archive.endswith(b"TRAILER!!!\0\0\0\0")


def test_modules_follow_their_dependencies() -> None:
    files = {"b": b"\0depends=a,c-d\0", "a": b"\0depends=\0", "c_d": b"\0depends=a,built-in\0"}
    assert list(order_modules(["b", "a"], files.__getitem__, {"built_in"})) == ["a", "c_d", "b"]


def test_a_file_that_is_no_kernel_is_refused() -> None:
    with pytest.raises(KernelError, match="unknown way"):
        decompress_kernel(bytes(4096))
