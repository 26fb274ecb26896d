"""At which address the coordinator of an import listens."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from dlfs.errors import DeviceError, UsageError
from dlfs.ingest.workers.addresses import (
    Address,
    address_towards,
    named_address,
    parse_listen,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", Address("node1")),
        ("10.0.0.1:4100", Address("10.0.0.1", 4100)),
        ("[fd00::2]", Address("fd00::2")),
        ("[fd00::2]:4100", Address("fd00::2", 4100)),
    ],
)
def test_listen(text: str, expected: Address) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize(
    "text", ["", ":1", "a:b", "a:65536", "fd00::2", "a b", "0.0.0.0:1", "[::]"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--listen .*expected"):
        parse_listen(text)


def name_has(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def answer(_name: str, _port: object, **_options: object) -> Sequence[tuple[object, ...]]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def test_the_address_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name_has(monkeypatch, "127.0.1.1", "::1", "fd00::2", "10.0.0.1", "fe80::1%eth0")
    assert named_address() == Address("10.0.0.1")


@pytest.mark.parametrize("addresses", [(), ("127.0.1.1", "::1")])
def test_a_name_that_other_hosts_do_not_reach(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    name_has(monkeypatch, *addresses)
    with pytest.raises(DeviceError, match=r"expected an address of .*--listen"):
        named_address()


def test_the_address_towards_a_host() -> None:
    assert address_towards("127.0.0.1") == Address("127.0.0.1")


def test_no_way_to_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    name_has(monkeypatch)
    with pytest.raises(DeviceError, match=r"expected a route to head: .*--listen"):
        address_towards("head")
