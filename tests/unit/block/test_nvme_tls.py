"""Devices over NVMe/TCP with TLS, against a scripted target behind a TLS server.

The server and the keys of these tests are independent of libdlfs_security: OpenSSL through ctypes,
and a derivation in Python (``tests.support.nvme.tls``).
"""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlfs._native.library import library
from dlfs.base.units import KIB, MIB
from dlfs.block import BlockDevice, NvmeTcpDevice, open_device, parse_uri
from dlfs.block.device import Kind, aligned_buffer
from dlfs.block.uri import NvmeTcpDiscoverUri
from dlfs.errors import AuthenticationError, DeviceError, DeviceTimeoutError
from dlfs.fabric.discovery import discover
from dlfs.fabric.keys import generate_key
from tests.support.nvme import (
    DEFAULT_NQN,
    DISCOVERY_NQN,
    Namespace,
    ScriptedTarget,
    Settings,
    Subsystem,
)
from tests.support.nvme.authentication import Authentication
from tests.support.nvme.tls import TlsProxy, key_text, lacks_openssl, psk_of

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(lacks_openssl() is not None, reason=str(lacks_openssl())),
]

HOST_NQN = "nqn.2026-11.org.dlfs:tls-host"
KEY = random.Random(1).randbytes(32)
LONG_KEY = random.Random(2).randbytes(48)
DATA = random.Random(3).randbytes(MIB)
QUICK = {"timeout_ms": 5000, "reconnect_ms": 5000}


def store(folder: Path, name: str, text: str) -> None:
    """Store a key as an administrator would: replaced at once, readable by its owner only."""
    new = folder / f"{name}.new"
    new.touch(0o600)
    new.write_text(text)
    new.rename(folder / name)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of keys with the keys ``short`` and ``long``."""
    folder = tmp_path / "keys"
    folder.mkdir(0o700)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    monkeypatch.setenv("DLFS_KEYS", str(folder))
    store(folder, "short", key_text(KEY, 1))
    store(folder, "long", key_text(LONG_KEY, 2))
    store(folder, "plain", key_text(KEY, 0))
    return folder


@pytest.fixture
def target() -> Iterator[ScriptedTarget]:
    with ScriptedTarget() as running:
        yield running


@contextmanager
def encrypted(
    target: ScriptedTarget, key: bytes = KEY, hash_number: int = 1, version: int = 0
) -> Iterator[TlsProxy]:
    """Run a TLS server that knows one key for every subsystem of a target."""
    nqns = (DEFAULT_NQN, DISCOVERY_NQN)
    psks = [psk_of(key, hash_number, HOST_NQN, nqn, version=version) for nqn in nqns]
    with TlsProxy(target.port, psks) as proxy:
        yield proxy


def opened(proxy: TlsProxy, key: str = "short", **options: object) -> NvmeTcpDevice:
    words = "".join(f"&{name}={value}" for name, value in ({**QUICK, **options}).items())
    device = open_device(
        f"nvme-tcp://127.0.0.1:{proxy.port}/{DEFAULT_NQN}?nsid=1&hostnqn={HOST_NQN}"
        f"&tls_psk={key}{words}",
        writable=True,
    )
    assert isinstance(device, NvmeTcpDevice)
    return device


def check_transfers(device: BlockDevice) -> None:
    device.write(0, DATA)
    assert device.read(0, len(DATA)) == DATA
    assert device.read(512, 512) == DATA[512:1024]


# ---- keys and identities -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "hash_number"),
    [("short", KEY, 1), ("long", LONG_KEY, 2), ("plain", KEY, 0)],
    ids=["short", "long", "plain"],
)
@pytest.mark.parametrize("version", [0, 1])
def test_both_suites_and_identities(
    keys: Path, target: ScriptedTarget, name: str, key: bytes, hash_number: int, version: int
) -> None:
    with encrypted(target, key, hash_number, version) as proxy, opened(proxy, name) as device:
        check_transfers(device)
        versions = [identity[4:5] for identity in proxy.offered]
        # After one refusal of version 1, all later connections begin with version 0.
        assert versions == ([b"1"] if version == 0 else []) + [str(version).encode()] * (
            proxy.handshakes
        )
        assert proxy.handshakes >= 2
        assert target.violations == []


def test_digests_over_tls(keys: Path, target: ScriptedTarget) -> None:
    with encrypted(target) as proxy, opened(proxy, hdgst=1, ddgst=1) as device:
        check_transfers(device)


def test_the_key_is_read_at_every_connection(keys: Path, target: ScriptedTarget) -> None:
    with encrypted(target) as proxy, opened(proxy) as device:
        device.write(0, DATA)
        for round_number in range(5):
            key = random.Random(round_number).randbytes(32)
            proxy.psks = [psk_of(key, 1, HOST_NQN, DEFAULT_NQN, version=round_number % 2)]
            store(keys, "short", key_text(key, 1))
            target.drop_connections()
            assert device.read(0, len(DATA)) == DATA


# ---- refusals ------------------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str:
    """Return the message of the AuthenticationError that a call raises."""
    with pytest.raises(AuthenticationError) as caught:
        call()
    text = str(caught.value)
    assert all(secret not in text for secret in (key_text(KEY, 1)[16:30], KEY.hex()))
    return text


def test_a_wrong_key_and_an_unknown_identity(keys: Path, target: ScriptedTarget) -> None:
    with encrypted(target, LONG_KEY[:32]) as proxy:
        assert "the target refused identity NVMe1R01" in refusal(lambda: opened(proxy))
        assert [identity[4:5] for identity in proxy.offered] == [b"1", b"0"]
        proxy.psks = []
        assert "no TLS key for this host and subsystem" in refusal(lambda: opened(proxy))
        assert target.counters.connections == 0


def test_keys_that_this_host_cannot_use(keys: Path, target: ScriptedTarget) -> None:
    store(keys, "cut", key_text(KEY, 1)[:-8])
    store(keys, "mismatched", key_text(KEY, 2))
    (keys / "exposed").write_text(key_text(KEY, 1))
    (keys / "exposed").chmod(0o644)
    with encrypted(target) as proxy:
        for name in ("missing", "cut", "mismatched", "exposed"):
            assert name in refusal(lambda name=name: opened(proxy, name))  # type: ignore[misc]
        assert proxy.offered == []


def test_a_port_without_tls_gets_no_plaintext(keys: Path, target: ScriptedTarget) -> None:
    uri = target.uri(hostnqn=HOST_NQN, tls_psk="short", **QUICK)
    refusal(lambda: open_device(uri))
    assert not target.counters.commands
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received: list[bytes] = []

        def serve() -> None:
            for answer in (b"\x03\0\x18\0\x18\0\0\0" + bytes(16), b""):
                connection, _ = listener.accept()
                with connection:
                    received.append(connection.recv(1 << 16))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        other = uri.replace(f":{target.port}/", f":{listener.getsockname()[1]}/")
        assert "answered a TLS handshake without TLS" in refusal(lambda: open_device(other))
        thread.join()
    assert [data[0] for data in received] == [22, 22]  # handshake records
    assert HOST_NQN.encode() in received[0]  # in the identity


def test_a_port_that_demands_tls_is_named(keys: Path, target: ScriptedTarget) -> None:
    with encrypted(target) as proxy:
        uri = f"nvme-tcp://127.0.0.1:{proxy.port}/{DEFAULT_NQN}?nsid=1"
        assert "the port demands TLS" in refusal(lambda: open_device(uri))


@pytest.mark.parametrize("version", [0, 1])
def test_a_target_that_closes_in_a_handshake_is_asked_once_more(
    keys: Path, target: ScriptedTarget, version: int
) -> None:
    """One that was restarted answers then; one that refuses this host closes again."""
    with encrypted(target, version=version) as proxy:
        proxy.closes = 2  # one for each version of the identity
        with opened(proxy) as device:
            check_transfers(device)
        proxy.closes = 1 << 20
        text = refusal(lambda: opened(proxy))
        assert "refused identity NVMe1R01, or was restarted: it closed the connection" in text


def test_silence_in_the_handshake(keys: Path, target: ScriptedTarget) -> None:
    with encrypted(target) as proxy:
        proxy.silent = True
        with pytest.raises(DeviceTimeoutError, match="no answer in the TLS handshake"):
            opened(proxy, connect_ms=200)


# ---- established sessions ------------------------------------------------------------------------


def test_a_changed_record(keys: Path, target: ScriptedTarget) -> None:
    with encrypted(target) as proxy, opened(proxy) as device:
        device.write(0, DATA)
        proxy.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        assert device.read(0, len(DATA)) == DATA
        assert "this host refused a TLS record" in device.status().last_error
        proxy.change = lambda data: None  # an end within a record
        assert device.read(0, len(DATA)) == DATA
        assert device.status().reconnects == 2


def test_records_that_are_changed_for_ever(keys: Path, target: ScriptedTarget) -> None:
    def spoil(data: bytes) -> bytes:
        if len(data) > 16 * KIB:
            data = data[:-1] + bytes([data[-1] ^ 1])
        proxy.change = spoil
        return data

    with encrypted(target) as proxy, opened(proxy, reconnect_ms=20000) as device:
        proxy.change = spoil
        assert "this host refused a TLS record" in refusal(lambda: device.read(0, 64 * KIB))
        proxy.change = None
        assert device.read(0, 512) == bytes(512)


def test_key_updates(keys: Path, target: ScriptedTarget) -> None:
    with encrypted(target) as proxy, opened(proxy) as device:
        proxy.update_each = 3
        for _ in range(5):
            check_transfers(device)
        assert proxy.updates > 5
        assert device.status().reconnects == 0


def test_a_stopped_target(keys: Path, target: ScriptedTarget) -> None:
    with encrypted(target) as proxy, opened(proxy, timeout_ms=300, reconnect_ms=100) as device:
        device.write(0, DATA)
        target.pause()
        with pytest.raises(DeviceError):
            device.read(0, 4096)
        target.resume()

    with encrypted(target) as proxy, opened(proxy) as device:
        assert device.read(0, len(DATA)) == DATA


def test_64_queue_pairs(keys: Path) -> None:
    settings = Settings(io_queues=80)
    with (
        ScriptedTarget([Subsystem(DEFAULT_NQN, [Namespace(2 * MIB)], settings=settings)]) as target,
        encrypted(target) as proxy,
        opened(proxy) as device,
    ):
        device.write(0, DATA)
        queues = [device.queue_pair(2) for _ in range(64)]
        buffers = [aligned_buffer(8 * KIB, 4096) for _ in queues]
        for number, (queue, buffer) in enumerate(zip(queues, buffers, strict=True)):
            assert queue.submit(Kind.READ, buffer, number * 8 * KIB, number)
        for number, (queue, buffer) in enumerate(zip(queues, buffers, strict=True)):
            assert queue.poll(-1) == [(number, 8 * KIB)]
            assert buffer.tobytes() == DATA[number * 8 * KIB : (number + 1) * 8 * KIB]
        assert proxy.handshakes >= 65
        for queue in queues:
            queue.close()


def test_a_thread_that_waits_for_the_descriptor(keys: Path, target: ScriptedTarget) -> None:
    """Bytes that the TLS session has buffered wake it, and it does not spin without any."""
    with encrypted(target) as proxy, opened(proxy) as device, device.queue_pair(32) as queue:
        device.write(0, DATA)
        descriptor = library().dlfs_queue_descriptor(queue.handle)
        buffers = [aligned_buffer(4 * KIB, 4096) for _ in range(32)]
        for number, buffer in enumerate(buffers):
            assert queue.submit(Kind.READ, buffer, number * 4 * KIB, number)
        done = 0
        while done < 500:
            assert select.select([descriptor], [], [], 10)[0], "nothing woke the thread"
            for number, result in queue.poll(0):
                assert result == 4 * KIB
                assert buffers[number].tobytes() == DATA[number * 4 * KIB :][: 4 * KIB]
                done += 1
                if done <= 500 - 32:
                    assert queue.submit(Kind.READ, buffers[number], number * 4 * KIB, number)
        while select.select([descriptor], [], [], 0)[0]:
            assert queue.poll(0) == []


# ---- discovery -----------------------------------------------------------------------------------


def test_discovery_over_tls(keys: Path, target: ScriptedTarget) -> None:
    with encrypted(target) as proxy:
        text = f"nvme-tcp+discover://127.0.0.1:{proxy.port}?hostnqn={HOST_NQN}"
        request = parse_uri(f"{text}&tls_psk=short")
        assert isinstance(request, NvmeTcpDiscoverUri)
        # The log names the port without TLS; the discovery controller's own port is tried next.
        found = discover(request)
        assert [subsystem.nqn for subsystem in found.subsystems] == [DEFAULT_NQN]
        assert found.subsystems[0].problem is None
        without = parse_uri(text)
        assert isinstance(without, NvmeTcpDiscoverUri)
        assert "the port demands TLS" in refusal(lambda: discover(without))


# ---- secure channel concatenation ----------------------------------------------------------------


@contextmanager
def concatenating(
    keys: Path, target: ScriptedTarget | None = None, **terms: object
) -> Iterator[tuple[Authentication, TlsProxy]]:
    """Run a target that authenticates hosts on its port, and speaks TLS with the generated keys.

    Args:
        target: serves the connections with TLS, without another authentication; None: the same.
    """
    host_key, controller_key = generate_key(), generate_key()
    store(keys, "host", host_key)
    store(keys, "controller", controller_key)
    authentication = Authentication(host_key, controller_key, **terms)  # type: ignore[arg-type]
    subsystem = Subsystem(DEFAULT_NQN, [Namespace(2 * MIB)], authentication=authentication)
    with ScriptedTarget([subsystem]) as plain:
        encrypted = plain if target is None else target
        psks = authentication.generated
        with TlsProxy(encrypted.port, psks, plain_port=plain.port) as proxy:
            yield authentication, proxy
        assert not plain.violations


def concatenated(proxy: TlsProxy, **options: object) -> NvmeTcpDevice:
    named = {"dhchap_key": "host", "dhchap_ctrl_key": "controller", "concat": 1, **QUICK, **options}
    words = "".join(f"&{name}={value}" for name, value in named.items() if value is not None)
    uri = f"nvme-tcp://127.0.0.1:{proxy.port}/{DEFAULT_NQN}?nsid=1&hostnqn={HOST_NQN}{words}"
    device = open_device(uri, writable=True)
    assert isinstance(device, NvmeTcpDevice)
    return device


@pytest.mark.parametrize("digest", [1, 2])
@pytest.mark.parametrize("controller", ["controller", None])
def test_a_generated_key_encrypts_all_further_connections(
    keys: Path, target: ScriptedTarget, digest: int, controller: str | None
) -> None:
    with (
        concatenating(keys, target, hash=digest, secure_channel=True) as (terms, proxy),
        concatenated(proxy, dhchap_ctrl_key=controller) as device,
    ):
        check_transfers(device)
        (psk,) = terms.generated
        assert psk.identity.startswith(b"NVMe1G%02d %s " % (digest, HOST_NQN.encode()))
        assert proxy.offered == [psk.identity] * proxy.handshakes
        assert proxy.handshakes >= 2
        target.drop_connections()  # each reconnection generates another key
        assert device.read(0, len(DATA)) == DATA
        assert len(terms.generated) == 2
        assert terms.successes == 2


def test_a_target_that_authenticates_over_tls_too(keys: Path) -> None:
    with concatenating(keys) as (terms, proxy), concatenated(proxy) as device:
        check_transfers(device)
        assert len(terms.generated) == 1
        assert terms.successes >= 3
        device.authenticate()  # replaces the key
        assert len(terms.generated) == 2
        with device.queue_pair(2):  # connects another queue
            assert proxy.offered[-1] == terms.generated[-1].identity
        assert device.status().reconnects == 0


def test_concatenation_that_is_refused(keys: Path, target: ScriptedTarget) -> None:
    with concatenating(keys, target, secure_channel=True) as (terms, proxy):
        with pytest.raises(AuthenticationError, match="concat=1 generates a TLS key"):
            concatenated(proxy, concat=0)
        terms.group = 0
        with pytest.raises(AuthenticationError, match="status 0x2"):  # it accepts no offer
            concatenated(proxy)
        terms.group = 1
        for at, value, match in ((8, b"\3", "hash that was not"), (9, b"\0", "group that was not")):
            terms.change = lambda name, text, at=at, value=value: (
                text[:at] + value + text[at + 1 :] if name == "challenge" else text
            )
            with pytest.raises(AuthenticationError, match=match):
                concatenated(proxy)
        terms.change = None
        proxy.psks = []
        with pytest.raises(AuthenticationError, match="target refused identity NVMe1G01"):
            concatenated(proxy)
        assert not target.counters.commands
    with (
        TlsProxy(target.port, [], plain_port=target.port) as proxy,
        pytest.raises(AuthenticationError, match="asks for no authentication"),
    ):
        concatenated(proxy)
