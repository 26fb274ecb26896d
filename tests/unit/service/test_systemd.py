"""Tests notifications to systemd, and the socket that it passes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dlfs.service.systemd import listening_socket, notify, watchdog_seconds

TAKE = """
import os, socket, sys
os.environ["LISTEN_PID"] = str(os.getpid())
kind = sys.argv[1]
if kind == "none":
    os.close(3)
elif kind != "listening":
    made = socket.socket(socket.AF_UNIX, getattr(socket, kind))
    os.dup2(made.fileno(), 3)
from dlfs.service.systemd import listening_socket
from dlfs.errors import UsageError
try:
    found = listening_socket()
except UsageError as error:
    print("refused:", error)
else:
    print(found.getsockname(), os.get_inheritable(3))
"""


@pytest.mark.parametrize("abstract", [False, True])
def test_notify_sends_the_state_to_the_socket(
    abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"@dlfs-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "relative", "/there/is/nothing"])
def test_notify_without_systemd_does_nothing(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")


def test_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    for value, expected in (("", None), ("0", None), ("x", None), ("2500000", 2.5)):
        monkeypatch.setenv("WATCHDOG_USEC", value)
        assert watchdog_seconds() == expected
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_seconds() is None


def test_without_systemd_no_socket_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LISTEN_PID", raising=False)
    assert listening_socket() is None
    monkeypatch.setenv("LISTEN_PID", "1")
    assert listening_socket() is None


@pytest.mark.parametrize(
    ("kind", "count", "output"),
    [
        ("listening", "1", "{path} False"),
        ("listening", "2", "refused: take systemd's socket: expected one (LISTEN_FDS=1), got '2'"),
        ("SOCK_STREAM", "1", "refused: take systemd's socket: expected a listening Unix"),
        ("SOCK_DGRAM", "1", "refused: take systemd's socket: "),
        ("none", "1", "refused: take systemd's socket: descriptor 3 is none"),
    ],
)
def test_the_socket_that_systemd_passes_is_checked(
    kind: str, count: str, output: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "v.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def hand_over() -> None:
            os.dup2(listening.fileno(), 3)

        done = subprocess.run(
            [sys.executable, "-c", TAKE, kind],
            env={**os.environ, "LISTEN_FDS": count},
            preexec_fn=hand_over,
            close_fds=False,
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.startswith(output.format(path=path)), done.stdout + done.stderr
