"""The service's socket: its file, its mode, who may use it, and what a dead service left."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dlfs.errors import DeviceError, ExistsError, NotFoundError, UsageError
from dlfs.service.sockets import (
    AllowList,
    Peer,
    adopt,
    default_path,
    group_number,
    listen,
    parse_allow_list,
    path_of,
    peer_of,
    user_number,
)

DEAD = """
import os, sys
from dlfs.service.sockets import AllowList, listen
listen(sys.argv[1], AllowList())
print("listening", flush=True)
os.kill(os.getpid(), 9)
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_socket_is_made_with_its_directory_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run" / "dlfs" / "v.sock"
    listener = listen(str(path), AllowList(), make_directory=True)
    assert mode(path) == 0o660
    assert listener.group == path.stat().st_gid
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        server, _ = listener.socket.accept()
        with server:
            peer = peer_of(server)
    assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
    assert peer.groups >= {os.getegid(), *os.getgroups()}
    listener.close()
    listener.close()
    assert list(path.parent.iterdir()) == []


def test_the_directory_of_a_chosen_socket_must_exist(tmp_path: Path) -> None:
    path = tmp_path / "nodir" / "x"
    with pytest.raises(NotFoundError, match=f"expected an existing directory, got {path.parent}"):
        listen(str(path), AllowList())
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError, match="expected an existing directory"):
        listen(str(tmp_path / "file" / "x"), AllowList())
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_live_service_is_not_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "v.sock")
    first = listen(path, AllowList())
    with pytest.raises(ExistsError, match="a service listens there already"):
        listen(path, AllowList())
    first.close()
    listen(path, AllowList()).close()


def test_the_socket_of_a_killed_service_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "v.sock"
    done = subprocess.run([sys.executable, "-c", DEAD, str(path)], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-9, b"listening\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v.sock", "v.sock.lock"]
    listen(str(path), AllowList()).close()
    assert list(tmp_path.iterdir()) == []


def test_files_and_sockets_of_others_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ExistsError, match="expected nothing or a dead socket"):
        listen(str(file), AllowList())
    assert file.read_text() == "mine"
    other = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(other))
        foreign.listen()
        with pytest.raises(ExistsError, match="another process listens"):
            listen(str(other), AllowList())


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 107 bytes, got 200"):
        listen("/" + "x" * 199, AllowList())
    (tmp_path / "file").touch()
    with pytest.raises(DeviceError):
        listen(str(tmp_path / "file" / "v.sock"), AllowList(), make_directory=True)


def test_mode_and_group_follow_the_list(tmp_path: Path) -> None:
    path = tmp_path / "v.sock"
    group = os.getegid()
    for allow, expected in (
        (AllowList(groups=frozenset({group})), 0o660),
        (AllowList(groups=frozenset({group, group + 1})), 0o666),
        (AllowList(users=frozenset({os.geteuid(), 0})), 0o660),
        (AllowList(users=frozenset({54321})), 0o666),
    ):
        listener = listen(str(path), allow)
        assert mode(path) == expected
        listener.close()


@pytest.mark.root
def test_the_socket_is_given_to_its_group(tmp_path: Path) -> None:
    path = tmp_path / "v.sock"
    listener = listen(str(path), AllowList(groups=frozenset({54321})))
    assert (path.stat().st_gid, listener.group) == (54321, 54321)
    listener.close()


PEERS = """
import socket, sys
from dlfs.service.sockets import peer_of
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listening", flush=True)
    for _ in range(3):
        with listener.accept()[0] as connection:
            peer = peer_of(connection)
            print(peer.pid, peer.process, flush=True)
"""
CONNECT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.recv(1)
"""


@pytest.mark.root
def test_processes_of_other_pid_namespaces_are_distinguished(tmp_path: Path) -> None:
    """Seen from a PID namespace of its own, a service's clients all have the number 0."""
    path = str(tmp_path / "v.sock")
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", PEERS, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "listening\n"
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                connection.recv(1)
        subprocess.run([sys.executable, "-c", CONNECT, path], check=True)
        peers = [line.split(maxsplit=1) for line in service.stdout]
    assert [number for number, _ in peers] == ["0"] * 3
    first, second, other = (name for _, name in peers)
    assert other not in (first, second)
    if "pidfd" in first:  # since Linux 6.9; before, connections are distinguished
        assert first == second


def test_the_allow_list_decides_by_user_and_group() -> None:
    own = os.geteuid()
    stranger = Peer(1, 54321, frozenset({54321, 7}), "process 1")
    for allow, peer, group, expected in (
        (AllowList(), Peer(1, own, frozenset(), "process 1"), 5, True),
        (AllowList(), Peer(1, 0, frozenset(), "process 1"), 5, True),
        (AllowList(), stranger, 5, False),
        (AllowList(), stranger, 7, True),
        (AllowList(groups=frozenset({8})), stranger, 7, False),
        (AllowList(groups=frozenset({7})), stranger, 5, True),
        (AllowList(users=frozenset({54321})), stranger, 5, True),
        (AllowList(users=frozenset({54322})), stranger, 5, False),
    ):
        assert allow.allows(peer, group) is expected


def test_names_of_users_and_groups() -> None:
    assert user_number("root") == group_number("root") == 0
    assert user_number("12") == group_number("12") == 12
    with pytest.raises(NotFoundError, match="there is no such user"):
        user_number("nobody-of-this-name")
    with pytest.raises(NotFoundError, match="there is no such group"):
        group_number("nobody-of-this-name")


def test_allow_lists_in_words() -> None:
    assert parse_allow_list("user:root, group:12,user:7") == AllowList(
        frozenset({0, 7}), frozenset({12})
    )
    for wrong in ("", "root", "user:", "pod:a/b", "user:root,"):
        with pytest.raises(UsageError, match="expected user:NAME or group:NAME"):
            parse_allow_list(wrong)
    assert not AllowList(frozenset({0, os.geteuid()})).names_others
    assert AllowList(groups=frozenset({0})).names_others


def test_default_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_path("images") == "/run/dlfs/images.sock"
    assert default_path("../a b/ü\n") == "/run/dlfs/_a_b_ü_.sock"
    assert default_path("..") == "/run/dlfs/volume.sock"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert default_path("x") == "/run/user/1000/dlfs/x.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(UsageError, match="--socket"):
        default_path("x")


def test_uris() -> None:
    assert path_of("unix:/run/x.sock") == "/run/x.sock"
    for wrong in ("/run/x.sock", "unix:", "unix:/a\0b", "http://x"):
        with pytest.raises(UsageError, match="expected unix:"):
            path_of(wrong)


def test_a_socket_that_was_handed_over_stays(tmp_path: Path) -> None:
    path = tmp_path / "v.sock"
    with socket.socket(socket.AF_UNIX) as handed:
        handed.bind(str(path))
        handed.listen()
        listener = adopt(handed)
        assert (listener.path, listener.group) == (str(path), path.stat().st_gid)
        listener.close()
    assert path.exists()


@pytest.mark.parametrize("name", [b"\0abstract", b""])
def test_a_socket_without_a_file_is_not_adopted(name: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as handed:
        if name:
            handed.bind(name + str(os.getpid()).encode())
        with pytest.raises(UsageError, match="expected a socket with a path"):
            adopt(handed)
