"""Error texts that users read, and the next step that each proposes.

Every text is provoked for real, through the command line and through the API, and compared with a
snapshot. What varies from run to run is replaced: folders, UUIDs, ports and users.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dlfs
from tests.service.serving import Service
from tests.support.forked import call_forked
from tests.support.volumes import new_volume

NOBODY = 65534
"""A user and a group without any rights."""

TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"

VARYING = [
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
    (r"127\.0\.0\.1:\d+", "HOST:PORT"),
    (r"of user \S+ and group \S+,", "of user USER and group GROUP,"),
]
PYTHON_WORDS = re.compile(r"\b(None|True|False)\b|\bb'|Error\b|\b\w+_\w+=|<class")
"""Words that no error text for a user of the command line may have."""


def plain(text: str, folder: Path) -> str:
    """A text without what varies."""
    text = text.replace(str(folder), "FOLDER")
    for pattern, name in VARYING:
        text = re.sub(pattern, name, text)
    return text


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that every user may look into."""
    made = Path(tempfile.mkdtemp(prefix="dlfs-texts-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def write(uri: str, name: str, count: int = 3, *, byte: bytes = b"x") -> None:
    """Add a version of a dataset, all of whose samples consist of one byte."""
    with dlfs.open(uri) as volume, volume.writer(name) as writer:
        for number in range(count):
            writer.add(f"train/cat/{number:03}.jpg", byte * number)


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    """The folder with volumes and files of all kinds in it."""
    volume = new_volume(str(folder / "v.img"), size_bytes=16 << 20, label="images")
    for name, byte in (("photos", b"x"), ("photos", b"y"), ("scans", b"z")):
        write(volume, name, byte=byte)
    many = new_volume(str(folder / "many.img"), size_bytes=16 << 20)
    for number in range(12):
        write(many, f"part-{number:02}", 1)
    write(many, "validation", 1)
    dlfs.format_volume(str(folder / "empty.img"), size_bytes=8 << 20)
    dlfs.format_volume([str(folder / "a.img"), str(folder / "b.img")], size_bytes=8 << 20)
    (folder / "zeros.img").write_bytes(bytes(1 << 20))
    (folder / "text.txt").write_text("no volume\n" * 2000)
    (folder / "source").mkdir()
    (folder / "source" / "one.txt").write_text("one")
    (folder / "point").mkdir()
    return folder


@pytest.fixture(scope="module")
def service(made: Path) -> Iterator[str]:
    """The URI of a service of the volume."""
    (made / "run").mkdir()
    service = Service([str(made / "v.img")], made / "run" / "s.sock")
    try:
        yield service.wait_ready().uri
    finally:
        service.close()


@pytest.fixture
def in_folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as the directory that relative paths begin in."""
    monkeypatch.chdir(made)
    return made


COMMANDS = {
    "no such dataset, a near one": "ls v.img foto",
    "no such dataset, nothing near": "ls v.img xyz",
    "no such dataset, many others": "ls many.img valdation",
    "no such dataset, none at all": "ls empty.img photos",
    "no such dataset to remove": "rm v.img foto --yes",
    "no such dataset to verify": "verify v.img foto",
    "no such dataset to export": "export v.img foto out",
    "no such version": "ls v.img photos@7",
    "no such sample, near ones": "cat v.img photos train/cat/01.jpg",
    "no such sample, without its folder": "cat v.img photos 001.jpg",
    "no such sample, with a slash too many": "cat v.img photos /train/cat/001.jpg/",
    "no such sample, nothing near": "stat v.img photos xyz",
    "a directory for a sample": "cat v.img photos train",
    "no such index": "cat v.img photos --index 3",
    "no such directory of samples": "ls v.img photos train/dog",
    "more replicas than devices": "format new.img --size 8MiB --replicas 2",
    "no such file, and no size": "format new.img",
    "a volume is there": "format v.img",
    "data is there": "format text.txt",
    "another size is there": "format v.img --size 8MiB",
    "no such device": "info nothing.img",
    "a socket without unix:, gone": "ls gone.sock",
    "a socket without unix:": "ls run/s.sock",
    "import into a service": "import source unix:run/s.sock --name new",
    "import into a service that is gone": "import source unix:gone.sock --name new",
    "rm through a service": "rm unix:run/s.sock photos@1 --yes",
    "verify through a service": "verify unix:run/s.sock",
    "repair through a service": "repair unix:run/s.sock",
    "format a service": "format unix:run/s.sock",
    "serve a service": "serve unix:run/s.sock",
    "import, swapped": "import v.img source --name new",
    "import, no volume": "import source zeros.img --name new",
    "import, no source": "import nothing v.img --name new",
    "import, one argument": "import v.img --name new",
    "export into a folder with files": "export v.img photos source",
    "no volume, zeros": "info zeros.img",
    "no volume, text": "info text.txt",
    "no volume, a folder": "info source",
    "a member is not named": "info a.img",
    "a member is gone": "info a.img,nothing.img",
    "a member of another volume": "info a.img,v.img",
    "one device too many": "info v.img,nothing.img",
    "a member twice": "info a.img,a.img",
    "mount on files": "mount v.img source",
    "mount on nothing": "mount v.img nothing",
    "mount on a file": "mount v.img text.txt",
    "mount, not mounted": "umount point",
    "no size": "stall v.img photos --memory lots",
    "a scheme that there is not": "info nvme:10.0.0.5",
}


@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_line_says_what_to_do(
    run: Callable[..., Any], in_folder: Path, service: str, snapshot: Any, case: str
) -> None:
    done = run(*COMMANDS[case].split())
    assert done.code not in (0, 1) or "is there" in case or "files" in case
    assert done.out == b""
    text = plain(done.err, in_folder)
    assert text.startswith("dlfs: ")
    assert text.count("\n") == 1
    assert not PYTHON_WORDS.search(text), text
    assert f"$ dlfs {COMMANDS[case]}\n{text}[exit {done.code}]" == snapshot


# ---- targets -------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A port of no NVMe/TCP target, which ends every connection with an answer; its URI."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer_all, args=(listening, answer))
        thread.start()
        host, port = listening.getsockname()
        try:
            yield f"nvme-tcp://{host}:{port}/nqn.2024-01.org.example:disk0?nsid=1&reconnect_ms=0"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def answer_all(listening: socket.socket, answer: bytes) -> None:
    """Answer every ICReq, until the socket is shut down."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.recv(128, socket.MSG_WAITALL)
                connection.sendall(answer)


@pytest.mark.parametrize("answer", [b"", TLS_ALERT, b"HTTP/1.1 400 Bad Request\r\n" * 6])
def test_a_port_of_no_target(
    run: Callable[..., Any], folder: Path, snapshot: Any, answer: bytes
) -> None:
    with answering(answer) as uri:
        done = run("info", uri)
    assert (done.code, plain(done.err, folder)) == snapshot


# ---- permissions ---------------------------------------------------------------------------------


def as_nobody(call: Callable[[], object]) -> str:
    """Return the error texts of a user without rights, from a separate process."""

    def fail() -> str:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        with pytest.raises(dlfs.DlfsError) as caught:
            call()
        return f"{caught.type.__name__}: {caught.value}"

    return call_forked(fail)


@pytest.mark.parametrize("mode", [0o660, 0o600])
def test_a_device_of_others(made: Path, snapshot: Any, mode: int) -> None:
    device = new_volume(made / f"mode-{mode:o}.img", size_bytes=8 << 20)
    device.chmod(mode if os.geteuid() == 0 else mode & 0o077)
    text = as_nobody(lambda: dlfs.open(str(device)))
    assert re.sub(r"mode \d+", "mode MODE", plain(text, made)) == snapshot
    device.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_service_of_others(made: Path, service: str, snapshot: Any) -> None:
    assert plain(as_nobody(lambda: dlfs.connect(service)), made) == snapshot
    os.chmod(service.removeprefix("unix:"), 0o666)
    text = plain(as_nobody(lambda: dlfs.connect(service)), made)
    os.chmod(service.removeprefix("unix:"), 0o660)
    assert re.sub(r"(user|process) \d+", r"\1 NUMBER", text) == snapshot


# ---- the API -------------------------------------------------------------------------------------


def error_text(call: Callable[[], object]) -> str:
    """The class and the text of the error that a call raises."""
    with pytest.raises((dlfs.DlfsError, IndexError)) as found:
        call()
    return f"{type(found.value).__name__}: {found.value}"


LOOKUPS: dict[str, Callable[[dlfs.Volume], object]] = {
    "no such dataset": lambda volume: volume["foto"],
    "no such version": lambda volume: volume.dataset("photos", 7),
    "no name, and several": lambda volume: volume.dataset(),
    "no such sample": lambda volume: volume["photos"].get("train/cat/01.jpg"),
    "no such path": lambda volume: volume["photos"].index(b"caf\xe9.jpg"),
    "no such index": lambda volume: volume["photos"][3],
    "no such indices": lambda volume: volume["photos"][[0, -4]],
    "no such column": lambda volume: volume["photos"].column("label"),
}


@pytest.mark.parametrize("case", LOOKUPS)
def test_a_volume_and_a_service_say_what_there_is(
    made: Path, service: str, snapshot: Any, case: str
) -> None:
    for uri, opener in ((str(made / "v.img"), dlfs.open), (service, dlfs.connect)):
        with opener(uri) as volume:
            assert plain(error_text(lambda: LOOKUPS[case](volume)), made) == snapshot


REFUSALS: dict[str, Callable[[dlfs.Volume], object]] = {
    "write": lambda volume: volume.writer("new"),
    "remove": lambda volume: volume.remove("photos", 1),
    "verify": lambda volume: list(volume.verify()),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_service_is_read_only(made: Path, service: str, snapshot: Any, case: str) -> None:
    with dlfs.connect(service) as volume:
        assert plain(error_text(lambda: REFUSALS[case](volume)), made) == snapshot


@pytest.mark.parametrize("way", ["devices", "service"])
def test_a_checkpoint_of_something_else(made: Path, service: str, snapshot: Any, way: str) -> None:
    uri, opener = {"devices": (str(made / "v.img"), dlfs.open), "service": (service, dlfs.connect)}[
        way
    ]
    with opener(uri) as volume, volume["photos"] as dataset:
        good = dataset.batches(2).state()
        older = volume.dataset("photos", 1).batches(2).state()
        other = volume["scans"].batches(2).state()
        chosen = dataset.batches(2, where=[0]).state()
        states: list[Any] = [
            *(older, other, {**good, "dataset": "0" * 32}, {**good, "dataset": "?"}, chosen),
            *({**good, "version": 9}, {**good, "position": 4}, {**good, "shuffle": "chunks"}),
            *({**good, "more": 1}, {}, 3, None),
        ]
        texts = [error_text(lambda: dataset.batches(2).resume(state)) for state in states]  # noqa: B023
        assert [re.sub("[0-9a-f]{32}", "PRINT", plain(text, made)) for text in texts] == snapshot


CALLS: dict[str, Callable[[Path], object]] = {
    "open a service": lambda folder: dlfs.open(f"unix:{folder}/run/s.sock"),
    "connect to a path": lambda folder: dlfs.connect(f"{folder}/run/s.sock"),
    "connect to nothing": lambda folder: dlfs.connect(f"unix:{folder}/gone.sock", timeout_s=0.01),
    "connect to another volume": lambda folder: dlfs.connect(
        f"unix:{folder}/run/s.sock", volume="imagse"
    ),
    "connect without time": lambda folder: dlfs.connect(
        f"unix:{folder}/gone.sock", timeout_s=float("nan")
    ),
    "too much memory": lambda folder: dlfs.open(f"{folder}/v.img", memory_bytes=1 << 62)["scans"],
    "no memory": lambda folder: dlfs.open(f"{folder}/v.img", memory_bytes=-1),
    "format over a volume": lambda folder: dlfs.format_volume(f"{folder}/v.img"),
    "format without a size": lambda folder: dlfs.format_volume(f"{folder}/new.img"),
    "more replicas than devices": lambda folder: dlfs.format_volume(
        f"{folder}/new.img", replicas=2, size_bytes=8 << 20
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_api_says_what_to_do(made: Path, service: str, snapshot: Any, case: str) -> None:
    assert plain(error_text(lambda: CALLS[case](made)), made) == snapshot
