"""Tests clients that are refused and clients that are hostile: each ends only its own session."""

from __future__ import annotations

import os
import random
import socket
import struct
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlfs
from dlfs.base.units import MIB
from dlfs.errors import (
    ClosedError,
    FormatError,
    LimitError,
    NotFoundError,
    ServiceLostError,
    UsageError,
    VersionError,
)
from dlfs.service import server, session
from dlfs.service.control import ControlConnection
from dlfs.service.protocol import (
    ANSWERS,
    FRAME_BYTES_MAX,
    HEADER,
    PROTOCOL_VERSION,
    REQUESTS,
    ChannelState,
    DatasetState,
    Failure,
    GetSegment,
    GetVolume,
    Hello,
    ListVolumes,
    Message,
    OpenChannel,
    OpenDataset,
    OpenStep,
    Pending,
    Segment,
    Volumes,
    VolumeState,
    Welcome,
    body_bytes,
    decode,
    encode,
)
from tests.fuzz.test_fuzz_protocol import messages
from tests.service.serving import (
    SECONDS_MAX,
    Hurry,
    Service,
    be_stranger,
    make_samples,
    make_volume,
)
from tests.support.processes import PROCESSES
from tests.support.waiting import wait_for


def as_stranger(service: Service, groups: tuple[int, ...]) -> str:
    """Return what a client of another user gets."""
    receiving, sending = PROCESSES.Pipe(duplex=False)
    with receiving, sending:
        stranger = PROCESSES.Process(target=be_stranger, args=(sending, service.uri, groups))
        stranger.start()
        sending.close()
        return str(receiving.recv())


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "heard"),
    [
        ((), {(): "13 connect to unix:", (os.getegid(),): "v"}),
        (("--allow-user", "54321"), {(): "v"}),
        (("--allow-user", "54322"), {(): "13 use the service: user 54321 may not"}),
        (("--allow-group", "54323"), {(): "13 connect to unix:", (54323,): "v"}),
    ],
)
def test_other_users_are_refused_unless_they_are_allowed(
    options: tuple[str, ...], heard: dict[tuple[int, ...], str], tmp_path: Path
) -> None:
    uri = make_volume(tmp_path / "v.img", {b"a": b"b"}, label="v")
    with tempfile.TemporaryDirectory() as folder:  # which others may enter
        os.chmod(folder, 0o755)
        with closing(Service([uri], Path(folder) / "s.sock", *options)) as service:
            service.wait_ready()
            for groups, expected in heard.items():
                assert as_stranger(service, groups).startswith(expected)
            service.stop()


class Raw:
    """A client that sends arbitrary bytes. It is closed at the end of its test at the latest."""

    opened: ClassVar[list[Raw]] = []

    def __init__(self, path: Path) -> None:
        self.opened.append(self)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(SECONDS_MAX)
        self.socket.connect(str(path))

    def greet(self) -> Raw:
        self.socket.sendall(encode(Hello(PROTOCOL_VERSION, "raw")))
        assert isinstance(self.hear(), Welcome)
        return self

    def hear(self) -> Message | None:
        """Return the next message but ``Pending``, or None at the end of the connection."""
        while header := self._receive(HEADER.size):
            answer = decode(self._receive(body_bytes(header)), ANSWERS)
            if not isinstance(answer, Pending):
                return answer
        return None

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more, descriptors, _, _ = socket.recv_fds(self.socket, count - len(data), 8)
            for descriptor in descriptors:
                os.close(descriptor)
            if not more:
                return b""
            data += more
        return data

    def close(self) -> None:
        self.socket.close()


@pytest.fixture(autouse=True)
def _no_client_is_left() -> Iterator[None]:
    yield
    while Raw.opened:
        Raw.opened.pop().close()


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start a service for all tests of this module; check that it still serves in the end."""
    folder = tmp_path_factory.mktemp("patient")
    uri = make_volume(folder / "v.img", make_samples(50), label="v")
    with closing(Service([uri], folder / "p.sock")) as service:
        yield service.wait_ready()
        with dlfs.connect(service.uri)["d"] as dataset:
            assert len(dataset.read(range(10)).to_list()) == 10
        wait_for(lambda: service.clients() == [], "clients to be forgotten")
        service.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        struct.pack("<I", FRAME_BYTES_MAX + 1),
        struct.pack("<I", 10) + b"not json!!",
        b"GET / HTTP/1.1\r\n\r\n",
        encode(ListVolumes()),
        encode(Hello(PROTOCOL_VERSION, "x")) + encode(Hello(PROTOCOL_VERSION, "x")),
    ],
)
def test_a_breach_of_the_protocol_is_answered_and_ends_the_session(
    patient: Service, data: bytes
) -> None:
    raw = Raw(patient.socket)
    raw.socket.sendall(data)
    answers = []
    while (answer := raw.hear()) is not None:
        answers.append(answer)
    assert isinstance(answers[-1], Failure)
    assert answers[-1].error in (FormatError.__name__, "TruncatedError")
    raw.close()


def test_another_version_is_refused(patient: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlfs.service.control.PROTOCOL_VERSION", 99)
    with pytest.raises(
        VersionError, match=rf"it speaks protocol {PROTOCOL_VERSION} .*, the client 99"
    ):
        ControlConnection(str(patient.socket), SECONDS_MAX)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.binary(min_size=1, max_size=200), greeted=st.booleans(), whole=st.booleans())
def test_wild_bytes(patient: Service, data: bytes, greeted: bool, whole: bool) -> None:
    raw = Raw(patient.socket)
    if greeted:
        raw.greet()
    raw.socket.sendall(HEADER.pack(len(data)) + data if whole else data)
    raw.socket.shutdown(socket.SHUT_WR)
    answer = raw.hear()
    assert answer is None or isinstance(answer, Failure)
    raw.close()


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(REQUESTS[1:]).flatmap(messages), max_size=5))
def test_any_requests(patient: Service, requests: list[Message]) -> None:
    others = [request for request in REQUESTS if request is not OpenStep]
    answer_of = {**dict(zip(others, ANSWERS, strict=False)), OpenStep: DatasetState}
    raw = Raw(patient.socket).greet()
    for request in (*requests, ListVolumes()):
        raw.socket.sendall(encode(request))
        answer = raw.hear()
        assert isinstance(answer, (Failure, answer_of[type(request)]))
    assert isinstance(answer, Volumes)  # no request before it has harmed the connection
    assert [volume.label for volume in answer.volumes] == ["v"]
    raw.close()


def test_descriptors_that_clients_attach_go_nowhere(patient: Service) -> None:
    raw = Raw(patient.socket).greet()
    before = 0
    for number in range(20):
        socket.send_fds(raw.socket, [encode(ListVolumes())], [0, 1, 2])
        raw.hear()
        if number == 0:  # the service has opened what it needs for a client
            before = len(os.listdir(f"/proc/{patient.pid}/fd"))
    assert len(os.listdir(f"/proc/{patient.pid}/fd")) <= before + 1
    raw.close()


def test_clients_that_die_in_mid_frame(patient: Service) -> None:
    draw = random.Random(3)
    frame = encode(Hello(PROTOCOL_VERSION, "x")) + encode(ListVolumes())
    for _ in range(20):
        raw = Raw(patient.socket)
        raw.socket.sendall(frame[: draw.randrange(len(frame))])
        raw.close()


def test_requests_for_missing_objects_are_refused(patient: Service) -> None:
    connection = patient.connection()
    (entry,) = patient.snapshot()["volumes"]
    here, nowhere = uuid.UUID(entry["uuid"]), uuid.uuid4()
    volume = dlfs.connect(patient.uri)
    found = volume.dataset().uuid
    for request, error in (
        (GetVolume(nowhere), NotFoundError),
        (OpenDataset(nowhere, found), NotFoundError),
        (OpenDataset(here, nowhere), dlfs.StaleError),
        (OpenChannel(found), ClosedError),
        (GetSegment(here, found, "everything"), NotFoundError),
        (GetSegment(here, nowhere, "names"), dlfs.StaleError),
    ):
        with pytest.raises(error):
            connection.request(request, Segment, 1)
    state, descriptors = connection.request(OpenDataset(here, found), DatasetState, 2)
    with descriptors:
        assert os.fstat(descriptors[1]).st_size == state.arena_bytes
        with pytest.raises(PermissionError):
            os.pwrite(descriptors[1], b"x", 0)
    with pytest.raises(UsageError, match="has it open"):
        connection.request(OpenDataset(here, found), DatasetState, 2)
    connection.close()
    with pytest.raises(ServiceLostError, match="the connection is lost"):
        connection.request(ListVolumes(), VolumeState)


def test_channels_are_counted_per_process(patient: Service) -> None:
    volume = dlfs.connect(patient.uri)
    connections = [patient.connection() for _ in range(2)]
    found = volume.dataset().uuid
    unreleased = []
    for connection in connections:
        _, descriptors = connection.request(OpenDataset(volume.uuid, found), DatasetState, 2)
        descriptors.__exit__(None, None, None)
    for number in range(session.CHANNELS_MAX):
        connection = connections[number % 2]
        unreleased.append(connection.request(OpenChannel(found), ChannelState, 2)[1])
    for connection in connections:
        with pytest.raises(LimitError, match=rf"at most {session.CHANNELS_MAX} in one process"):
            connection.request(OpenChannel(found), ChannelState, 2)
    with unreleased.pop():
        pass

    def again() -> bool:
        try:
            unreleased.append(connections[1].request(OpenChannel(found), ChannelState, 2)[1])
        except LimitError:
            return False
        return True

    wait_for(again, "a channel that was closed to be counted no more")
    for descriptors in unreleased:
        with descriptors:
            pass
    for connection in connections:
        connection.close()


def test_connections_are_counted_per_process(patient: Service) -> None:
    unreleased: list[ControlConnection] = []
    refusals: set[str] = set()

    def connects() -> bool:
        try:
            unreleased.append(patient.connection())
        except LimitError as error:
            refusals.add(str(error))
            return False
        return True

    while connects():
        assert len(unreleased) <= server.CLIENTS_OF_PROCESS_MAX
    assert len(unreleased) > server.CLIENTS_OF_PROCESS_MAX // 2
    unreleased.pop().close()
    wait_for(connects, "a connection that was closed to be counted no more")
    for connection in unreleased:
        connection.close()
    wait_for(connects, "all of them")
    unreleased[-1].close()
    most = server.CLIENTS_OF_PROCESS_MAX
    assert refusals == {f"use the service: expected at most {most} connections of one process"}


@pytest.mark.parametrize(
    ("answer", "kind", "problem"),
    [
        (b"\xff\xff\xff\xff", ServiceLostError, r"expected 2\.\.1048576 bytes"),
        (encode(ListVolumes()), ServiceLostError, "expected a known kind"),
        (encode(ChannelState()), ServiceLostError, "expected Welcome with 0 descriptors, got Cha"),
        (b"", ServiceLostError, "has ended the connection"),
        (
            encode(Welcome(PROTOCOL_VERSION + 1, "", 1)),
            VersionError,
            f"expected protocol {PROTOCOL_VERSION}, got {PROTOCOL_VERSION + 1}",
        ),
    ],
)
def test_an_answer_that_makes_no_sense_ends_the_connection(
    answer: bytes,
    kind: type[Exception],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Hurry(monkeypatch)
    path = tmp_path / "liar.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def lie() -> None:
            while True:
                connection, _ = listening.accept()
                with connection:
                    if not connection.recv(1000):
                        return
                    connection.sendall(answer)

        liar = threading.Thread(target=lie)
        liar.start()
        with pytest.raises(kind, match=problem):
            ControlConnection(str(path))
        last = Raw(path)
        last.socket.shutdown(socket.SHUT_WR)
        liar.join()
        last.close()


def test_a_client_waits_for_a_service_that_works_on_its_request(tmp_path: Path) -> None:
    path = tmp_path / "slow.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        ended = threading.Event()

        def work() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(encode(Welcome(PROTOCOL_VERSION, "", 1)))
                connection.recv(1000)
                for _ in range(20):
                    connection.sendall(encode(Pending()))
                    ended.wait(0.1)
                connection.sendall(encode(Volumes(())))
                connection.recv(1000)
                ended.wait(SECONDS_MAX)

        service = threading.Thread(target=work)
        service.start()
        connection = ControlConnection(str(path), timeout_s=1)
        try:
            assert connection.request(ListVolumes(), Volumes)[0] == Volumes(())
            with pytest.raises(ServiceLostError, match="nothing came from it within 1 s"):
                connection.request(ListVolumes(), Volumes)
        finally:
            ended.set()
            connection.close()
            service.join()


@pytest.mark.parametrize("seed", range(2))
def test_the_memory_that_a_client_can_take_is_limited(
    seed: int, serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    """A list of one index repeated pins few bytes, but the service needs memory for its arrays."""
    draw = random.Random(seed)
    service = serve(volume)
    with dlfs.connect(service.uri) as connected, connected.dataset() as dataset:
        dataset[0]
        before = resident_bytes(service.pid)
        batches: deque[dlfs.Batch] = deque()
        lists = (
            np.full(1 << draw.randrange(17, 21), draw.randrange(len(samples))) for _ in range(256)
        )
        with pytest.raises(LimitError, match="more memory than the service has for this client"):
            batches.extend(map(dataset.read, lists))
        assert resident_bytes(service.pid) - before < session.MEMORY_BYTES_MAX + 64 * MIB
        taken = sum(client["memory_bytes"] for client in service.clients())
        assert 0 < taken < session.MEMORY_BYTES_MAX + MIB
        for batch in batches:
            batch.release()
        assert dataset[0] == next(iter(samples.values()))
        # The pages of large answers are freed when the client has been idle for a while.
        spare = 64 * MIB
        wait_for(lambda: resident_bytes(service.pid) - before < spare, "the service's memory")


def test_the_memory_of_closed_clients_is_freed(
    serve: Callable[..., Service], volume: str, samples: dict[bytes, bytes]
) -> None:
    """Arrays of all sizes, some released and some not, leave holes in the memory of malloc."""
    draw = random.Random(11)
    service = serve(volume)
    with dlfs.connect(service.uri) as connected, connected.dataset() as dataset:
        dataset[0]
    before = resident_bytes(service.pid)
    for _ in range(8):
        with dlfs.connect(service.uri) as connected, connected.dataset() as dataset:
            unreleased: deque[dlfs.Batch] = deque(maxlen=3)
            for _ in range(20):
                number = draw.randrange(len(samples))
                with suppress(LimitError):
                    unreleased.append(dataset.read(np.full(1 << draw.randrange(10, 20), number)))
    del unreleased  # the last client's batches are in memory until then
    spare = 32 * MIB
    wait_for(lambda: resident_bytes(service.pid) - before < spare, "the service's memory")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, including shared pages."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
