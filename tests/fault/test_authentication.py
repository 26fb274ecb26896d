"""Authentication against a target that follows the protocol, or breaks it: one typed error."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlfs.base.units import MIB
from dlfs.block import NvmeTcpDevice, open_device
from dlfs.block.uri import NvmeTcpDiscoverUri, NvmeTcpOptions
from dlfs.errors import AuthenticationError, DeviceError, DeviceLostError, DeviceTimeoutError
from dlfs.fabric.discovery import discover
from tests.support.nvme import Event, Fault, FaultScript, Namespace, ScriptedTarget, Subsystem
from tests.support.nvme.authentication import GROUPS, HASHES, Authentication
from tests.support.nvme.faults import Cut, Silence
from tests.support.nvme.scripted import DEFAULT_NQN
from tests.support.scripts import hear, running, tell
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(60)

PAGE = 4096


def make_key(kind: int = 1) -> str:
    """Return the representation of a new key; kind as in its field hh."""
    secret = os.urandom({0: 32, 1: 32, 2: 48, 3: 64}[kind])
    code = base64.b64encode(secret + struct.pack("<I", zlib.crc32(secret))).decode()
    return f"DHHC-1:{kind:02}:{code}:"


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that writes a key into the directory of keys."""
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("DLFS_KEYS", str(folder))

    def write(name: str, text: str) -> None:
        new = folder / f".{name}"
        new.touch(0o600)
        new.write_text(text)
        new.rename(folder / name)

    return write


def target_of(terms: Authentication, script: FaultScript | None = None) -> ScriptedTarget:
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(2 * MIB)], authentication=terms)
    return ScriptedTarget([subsystem], script=script)


@pytest.fixture
def mutual(keys: Callable[[str, str], None]) -> Iterator[Authentication]:
    """Return the terms of a target whose keys this host has."""
    terms = Authentication(make_key(), make_key(2), group=0)
    keys("host", terms.host_key)
    assert terms.controller_key is not None
    keys("controller", terms.controller_key)
    return terms


def opened(target: ScriptedTarget, **options: object) -> NvmeTcpDevice:
    named = {"dhchap_key": "host", "dhchap_ctrl_key": "controller", **options}
    named = {name: value for name, value in named.items() if value is not None}
    device = open_device(target.uri(**named))
    assert isinstance(device, NvmeTcpDevice)
    return device


@pytest.mark.parametrize("kind", HASHES)
@pytest.mark.parametrize("group", [GROUPS[0], GROUPS[1], GROUPS[2]])
def test_both_sides_prove_themselves_on_every_queue(
    keys: Callable[[str, str], None], kind: int, group: int
) -> None:
    terms = Authentication(make_key(kind), make_key(0), hash=kind, group=group)
    keys("host", terms.host_key)
    keys("controller", terms.controller_key or "")
    with target_of(terms) as target, opened(target) as device:
        assert device.read(0, PAGE) == bytes(PAGE)
        assert terms.successes == 2  # the admin queue and one of I/O
        device.authenticate()
        assert terms.successes == 3
        assert not target.violations


def test_discovery_without_authentication_goes_on(mutual: Authentication) -> None:
    options = NvmeTcpOptions(dhchap_key="host", dhchap_ctrl_key="controller")
    with target_of(mutual) as target:
        found = discover(NvmeTcpDiscoverUri("127.0.0.1", target.port, options))
    assert [len(subsystem.namespaces) for subsystem in found.subsystems] == [1]
    assert mutual.successes == 1  # by the subsystem


def test_one_way(mutual: Authentication) -> None:
    with target_of(mutual) as target, opened(target, dhchap_ctrl_key=None) as device:
        assert device.read(0, PAGE) == bytes(PAGE)


def test_the_admin_queue_is_authenticated_anew_periodically(mutual: Authentication) -> None:
    with target_of(mutual) as target, opened(target, reauth_s=1) as device:
        wait_for(lambda: mutual.successes >= 3, "three authentications")
        assert device.status().reconnects == 0


def test_a_rotated_key_costs_a_reconnect(
    mutual: Authentication, keys: Callable[[str, str], None]
) -> None:
    with target_of(mutual) as target, opened(target) as device:
        assert device.read(0, PAGE) == bytes(PAGE)
        for _ in range(5):
            mutual.host_key = make_key(3)
            target.drop_connections()  # the target has the new key before this host does
            keys("host", mutual.host_key)
            assert device.read(0, PAGE) == bytes(PAGE)
        assert device.status().reconnects >= 5


def test_a_key_that_stays_wrong_ends_the_device(mutual: Authentication) -> None:
    with target_of(mutual) as target, opened(target, reconnect_ms=300) as device:
        mutual.host_key = make_key()
        target.drop_connections()
        with pytest.raises(AuthenticationError, match="target refused this host"):
            device.read(0, PAGE)


# ---- refusals ------------------------------------------------------------------------------------


def refused(terms: Authentication, match: str, **options: object) -> str:
    """Check that opening fails at once with the typed error; return its text."""
    with target_of(terms) as target, pytest.raises(AuthenticationError, match=match) as caught:
        opened(target, **options)
    text = str(caught.value)
    for key in (terms.host_key, terms.controller_key or terms.host_key):
        assert key.split(":")[2] not in text
    return text


def test_a_wrong_host_key(mutual: Authentication, keys: Callable[[str, str], None]) -> None:
    keys("host", make_key())
    refused(mutual, "target refused this host: authentication failed")


def test_a_wrong_controller_key(mutual: Authentication, keys: Callable[[str, str], None]) -> None:
    keys("controller", make_key())
    refused(mutual, "this host refused the target: its response is wrong")
    assert mutual.failures == [1]


def test_a_controller_that_gives_no_response(mutual: Authentication) -> None:
    mutual.controller_key = None
    refused(mutual, "this host refused the target: it gave no response")


def test_no_key_is_named(mutual: Authentication) -> None:
    refused(mutual, "demands authentication", dhchap_key=None, dhchap_ctrl_key=None)


def test_a_key_that_is_not_there(mutual: Authentication) -> None:
    refused(mutual, "key elsewhere: no such file", dhchap_key="elsewhere")


def test_a_truncated_key(mutual: Authentication, keys: Callable[[str, str], None]) -> None:
    keys("host", mutual.host_key[:30])
    refused(mutual, "key host: .*cut")


def test_a_target_that_asks_for_nothing(mutual: Authentication) -> None:
    with ScriptedTarget() as target, pytest.raises(AuthenticationError, match="asks for no auth"):
        opened(target)
    assert mutual.successes == 0


def changed(at: int, value: bytes, name: str = "challenge") -> Callable[[str, bytes], bytes]:
    def change(which: str, message: bytes) -> bytes:
        if which != name:
            return message
        return message[:at] + value + message[at + len(value) :]

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (changed(8, b"\0"), "hash that was not offered"),
        (changed(8, b"\4"), "hash that was not offered"),
        (changed(6, b"\x10"), "hash that was not offered"),
        (changed(9, b"\6"), "group that was not offered"),
        (changed(10, b"\1"), "group that was not offered"),
        (changed(12, bytes(4)), "no sequence number"),
        (changed(4, b"\xff\xff"), "another transaction"),
        (changed(0, b"\1\3"), "unexpected message"),
        (changed(0, b"\2"), "unexpected message"),
        (lambda name, text: text[:-1] if name == "challenge" else text, "too short"),
        (lambda name, text: text[:15] if name == "challenge" else text, "too short"),
        (lambda name, text: text[:7] if name == "challenge" else text, "too short"),
        (changed(17, b"other", "success1"), "response is wrong"),
        (changed(6, b"\x10", "success1"), "too short"),
        (changed(4, b"\xff\xff", "success1"), "another transaction"),
        (lambda name, text: text[:-1] if name == "success1" else text, "too short"),
    ],
)
def test_a_message_that_breaks_the_protocol(
    mutual: Authentication, change: Callable[[str, bytes], bytes], match: str
) -> None:
    mutual.change = change
    refused(mutual, f"this host refused the target: .*{match}")


def test_a_public_value_outside_its_group(mutual: Authentication) -> None:
    mutual.group = 1
    mutual.change = lambda name, text: text[:48] + bytes(256) if name == "challenge" else text
    refused(mutual, "this host refused the target: .*public value")


def test_a_replayed_challenge(mutual: Authentication) -> None:
    recorded: list[bytes] = []

    def replay(name: str, message: bytes) -> bytes:
        if name != "challenge":
            return message
        recorded.append(message)
        return message[:6] + recorded[0][6:]  # of the present transaction

    mutual.change = replay
    with (
        target_of(mutual) as target,
        opened(target, reconnect_ms=0) as device,
    ):
        with pytest.raises(AuthenticationError):
            device.authenticate()
        assert "its challenge was used before" in device.status().last_error


@pytest.mark.parametrize("event", [Event.AUTHENTICATION_SEND, Event.AUTHENTICATION_RECEIVE])
@pytest.mark.parametrize("number", [1, 2])
def test_silence_in_the_middle(mutual: Authentication, event: Event, number: int) -> None:
    script = FaultScript([Fault(event, Silence(), nth=number)])
    with target_of(mutual, script) as target, pytest.raises(DeviceTimeoutError, match="Authentic"):
        opened(target, connect_ms=200)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_target_that_is_restarted_in_the_middle(mutual: Authentication, number: int) -> None:
    """It authenticates at the next attempt, or is away: it has refused nothing."""
    script = FaultScript([Fault(Event.AUTHENTICATION_RECEIVE, Cut(0), nth=number)])
    with target_of(mutual, script) as target, opened(target) as device:
        assert device.read(0, PAGE) == bytes(PAGE)
        assert script.played == 1

        def restart(name: str, message: bytes) -> bytes:
            if name == "challenge":
                mutual.change = None
                target._unlisten()
                target.server.drop_all(reset=True)
            return message

        mutual.change = restart
        with pytest.raises(DeviceLostError):
            opened(target)


@pytest.mark.parametrize("number", [1, 2])
def test_connections_that_are_closed_in_place_of_an_answer(
    mutual: Authentication, number: int
) -> None:
    """Linux's target may close them before its Failure1 has arrived."""
    script = FaultScript(
        [
            Fault(Event.AUTHENTICATION_RECEIVE, Cut(0), nth=number),
            Fault(Event.AUTHENTICATION_RECEIVE, Cut(0), nth=2 * number),
        ]
    )
    with (
        target_of(mutual, script) as target,
        pytest.raises(AuthenticationError, match="the target refused this host, or was restarted"),
    ):
        opened(target)


def test_a_device_without_a_key_has_nothing_to_authenticate() -> None:
    with ScriptedTarget() as target, open_device(target.uri()) as device:
        assert isinstance(device, NvmeTcpDevice)
        with pytest.raises(DeviceError):
            device.authenticate()


HOLDER = """
import sys, time
from dlfs.block import open_device
with open_device(sys.argv[1]) as device:
    while sys.stdin.readline():
        device.authenticate()
        device.read(0, 4096)
        print(flush=True)
"""


def memory_of(pid: int) -> Iterator[bytes]:
    """Yield the contents of a process's writable memory, a mapping at a time."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            where, rights, *_ = line.split()
            start, end = (int(text, 16) for text in where.split("-"))
            if rights.startswith("rw"):
                memory.seek(start)
                yield memory.read(end - start)


@pytest.mark.root
def test_keys_do_not_stay_in_memory_after_an_authentication(mutual: Authentication) -> None:
    assert mutual.controller_key is not None
    texts = [key.split(":")[2].encode() for key in (mutual.host_key, mutual.controller_key)]
    secrets = [base64.b64decode(text)[:-4] for text in texts]
    with target_of(mutual) as target:
        uri = target.uri(dhchap_key="host", dhchap_ctrl_key="controller")
        with running(HOLDER, uri) as process:
            for _ in range(3):
                tell(process)
                assert hear(process) == ""
            seen = b"".join(memory_of(process.pid))
        assert DEFAULT_NQN.encode() in seen  # it was looked at
        assert not [piece for piece in (*texts, *secrets) if piece[:16] in seen]
