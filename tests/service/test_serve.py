"""``dlfs serve``: starting, its mount, systemd, and the ends that it comes to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dlfs
from dlfs.cli.commands import app
from dlfs.errors import ServiceLostError
from dlfs.mount.mountpoint import find_mount
from tests.fuse.mounting import run_cli
from tests.service.serving import SECONDS_MAX, Hurry, Service, make_volume, memory_files
from tests.support.waiting import wait_for

PROGRAM = ("-m", "dlfs.cli")
"""The command as users start it."""

ACTIVATED = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "dlfs.cli", "serve", *sys.argv[1:]])
"""


def refused(*arguments: str) -> tuple[int, str]:
    """Run a service that cannot start; return its exit code and output."""
    done = run_cli("serve", *arguments, alone=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_and_clients_notice(
    serve: Callable[..., Service],
    volume: str,
    number: int,
    samples: dict[bytes, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Hurry(monkeypatch)
    service = serve(volume, program=PROGRAM)
    dataset = dlfs.connect(service.uri)["d"]
    batch = dataset.read(range(100))
    assert memory_files(service.pid)
    service.process.send_signal(number)
    assert service.process.wait(SECONDS_MAX) == 0
    assert not list(service.socket.parent.glob("s.sock*"))
    assert batch.to_list() == list(samples.values())[:100]
    with pytest.raises(ServiceLostError):
        dataset.read([0])
    assert f"{signal.Signals(number).name}: ending" in service.log.read_text()


def test_the_service_ends_while_clients_read(
    serve: Callable[..., Service], volume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hurry(monkeypatch)
    service = serve(volume, program=PROGRAM)
    dataset = dlfs.connect(service.uri)["d"]
    epoch = dataset.batches(10, seed=1)
    next(epoch).release()
    service.stop()
    with pytest.raises(ServiceLostError, match=service.uri):
        list(epoch)


def test_a_second_service_is_refused(serve: Callable[..., Service], volume: str) -> None:
    service = serve(volume)
    code, said = refused(volume, "--socket", str(service.socket))
    assert code != 0
    assert "a service listens there already" in said
    service.stop()


def test_a_service_takes_over_the_socket_of_a_killed_one(
    serve: Callable[..., Service], volume: str
) -> None:
    service = serve(volume)
    service.kill()
    assert service.socket.exists()
    serve(volume).stop()
    assert not list(service.socket.parent.glob("s.sock*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{volume}", "{volume}", "--socket", "{socket}"], "a volume is given twice"),
        (["{volume}.none", "--socket", "{socket}"], "No such file"),
        (["{volume}", "--nested", "--socket", "{socket}"], "expected a mount"),
        (
            ["{volume}", "--mount", "m", "--nested", "--incoming", "s", "--socket", "{socket}"],
            "dlfs mount --incoming",
        ),
        (["{volume}", "--incoming", "m", "--socket", "{socket}"], "expected a mount"),
        (["{volume}", "--mount", "{volume}.none", "--socket", "{socket}"], "no such directory"),
        (["{volume}", "--cache", "0", "--socket", "{socket}"], "0 bytes"),
        (["{volume}", "--socket", "{volume}"], "expected nothing or a dead socket there"),
        (["{volume}", "--allow-user", "no-one-here"], "there is no such user"),
    ],
)
def test_a_service_that_cannot_start_names_the_reason(
    arguments: list[str], said: str, volume: str, tmp_path: Path
) -> None:
    socket_path = tmp_path / "x.sock"
    words = [word.format(volume=volume, socket=socket_path) for word in arguments]
    done = CliRunner().invoke(app, ["serve", *words])
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code not in (0, 1) or "nothing or" in done.stderr
    assert said.lower() in done.stderr.lower()
    assert not socket_path.exists()


@pytest.mark.fuse
def test_sealing_at_a_service(serve: Callable[..., Service], volume: str, tmp_path: Path) -> None:
    mountpoint, staging = tmp_path / "mnt", tmp_path / "staging"
    mountpoint.mkdir()
    service = serve(volume, options=("--mount", str(mountpoint), "--incoming", str(staging)))
    for name, target in (("one", service.uri), ("two", str(mountpoint))):
        (mountpoint / "incoming" / name / "empty").mkdir(parents=True)
        (staging / name / "a").write_bytes(name.encode())
        assert name in run_cli("incoming", target).stdout
        with (staging / name / "a").open("ab"):
            refused = run_cli("seal", target, name)
            assert (refused.returncode, f"import {name}/a" in refused.stderr) == (5, True)
            assert run_cli("incoming", target, "--discard", name).returncode == 5
        done = run_cli("seal", target, name)
        assert done.returncode == 0, done.stderr
        with dlfs.connect(service.uri) as connected, connected[name] as dataset:
            assert dataset.get("a") == name.encode()
            assert dataset.empty_directories() == [b"empty"]
        assert os.listdir(staging) == [".dlfs"]
    (staging / "three").mkdir()
    assert run_cli("incoming", service.uri, "--discard", "three").returncode == 0
    service.stop()
    assert "is 'dlfs serve' running?" in run_cli("incoming", service.uri).stderr


def test_a_service_without_a_staging_area(serve: Callable[..., Service], volume: str) -> None:
    service = serve(volume)
    refused = run_cli("seal", service.uri, "x")
    assert (refused.returncode, "--mount DIR --incoming AREA" in refused.stderr) == (2, True)
    service.stop()


@pytest.mark.fuse
def test_the_mount_and_the_socket_share_datasets(
    serve: Callable[..., Service], volume: str, tmp_path: Path, samples: dict[bytes, bytes]
) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    service = serve(volume, options=("--mount", str(mountpoint)))
    assert (mountpoint / "d/class1/00001").read_bytes() == samples[b"class1/00001"]
    dataset = dlfs.connect(service.uri)["d"]
    assert dataset.get("class1/00001") == samples[b"class1/00001"]
    (counted,) = service.snapshot()["datasets"]
    assert (counted["users"], counted["reader"]["cache_hits"] > 0) == (2, True)
    dataset.close()
    with (mountpoint / "d/class2/00002").open("rb") as file:
        assert file.read(10) == samples[b"class2/00002"][:10]
        service.stop()
    assert find_mount(mountpoint) is None


@pytest.mark.fuse
def test_an_unmount_from_outside_ends_the_mount_alone(
    serve: Callable[..., Service], volume: str, tmp_path: Path
) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    service = serve(volume, options=("--mount", str(mountpoint)))
    subprocess.run(["fusermount3", "-u", str(mountpoint)], check=True)
    wait_for(lambda: "was unmounted" in service.log.read_text(), "the service to notice")
    assert len(dlfs.connect(service.uri)["d"]) == 607
    service.stop()


@pytest.mark.fuse
def test_the_mount_of_a_killed_service_is_taken_over(
    serve: Callable[..., Service], volume: str, tmp_path: Path
) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    service = serve(volume, options=("--mount", str(mountpoint)))
    service.kill()
    again = serve(volume, options=("--mount", str(mountpoint)))
    assert os.listdir(mountpoint) == ["d"]
    again.stop()
    assert find_mount(mountpoint) is None


def test_the_cache_is_one_for_all(
    serve: Callable[..., Service], volume: str, tmp_path: Path
) -> None:
    other = make_volume(tmp_path / "o.img", {b"%d" % n: bytes(5000) for n in range(900)}, label="o")
    service = serve(volume, other, options=("--cache", "5MiB"))
    first = dlfs.connect(service.uri, volume="images")["d"]
    second = dlfs.connect(service.uri, volume="o")["d"]
    batches = [dataset.read([0, 1, 2]) for dataset in (first, second)]
    for dataset in (first, second):
        dataset.read(range(len(dataset))).release()
    found = service.snapshot()
    taken = {f["volume"]: f["cache_bytes"] for f in found["datasets"]}
    assert len(taken) == 2
    assert all(cache_bytes > 0 for cache_bytes in taken.values())
    assert sum(taken.values()) == found["memory"]["held_bytes"]
    assert found["memory"]["held_bytes"] <= found["memory"]["memory_bytes"] == 5 << 20
    for batch in batches:
        batch.release()
    first.close()
    wait_for(lambda: 0 in [f["users"] for f in service.snapshot()["datasets"]], "the end of a loan")
    assert dlfs.connect(service.uri, volume="images")["d"][0] is not None


def test_systemd_passes_the_socket_and_is_notified(volume: str, tmp_path: Path) -> None:
    path, notify = tmp_path / "a.sock", tmp_path / "notify"
    with (
        socket.socket(socket.AF_UNIX) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        listening.bind(str(path))
        listening.listen()
        manager.bind(str(notify))
        manager.settimeout(SECONDS_MAX)
        process = subprocess.Popen(
            [sys.executable, "-c", ACTIVATED, volume],
            env={
                **os.environ,
                "LISTEN_FDS": "1",
                "NOTIFY_SOCKET": str(notify),
                # Seldom enough that the manager's queue, of 10 messages, never has no room.
                "WATCHDOG_USEC": "3000000",
            },
            preexec_fn=lambda: os.dup2(listening.fileno(), 3),
            close_fds=False,
            stderr=subprocess.PIPE,
        )
        try:
            heard = [manager.recv(1000).decode() for _ in range(3)]
            assert f"READY=1\nSTATUS=serving on {path}" in heard
            assert "WATCHDOG=1" in heard
            assert dlfs.connect(f"unix:{path}").label == "images"
            process.terminate()
            while manager.recv(1000) != b"STOPPING=1":
                pass
            assert process.wait(SECONDS_MAX) == 0
        finally:
            process.kill()
            process.communicate()
    assert path.exists()  # it is systemd's
