"""Device URIs: what is accepted, what is refused, and that nothing crashes the parser."""

from __future__ import annotations

import os
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs.block.uri import (
    FileUri,
    MemoryUri,
    NvmeTcpDiscoverUri,
    NvmeTcpOptions,
    NvmeTcpUri,
    SpdkUri,
    describe_schemes,
    format_path,
    parse_uri,
    split_members,
)
from dlfs.errors import UsageError
from dlfs.units import MIB

NQN = "nqn.2024-01.org.example:disk0"
HOST_ID = "6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/vol0.img", FileUri("/data/vol0.img")),
        ("vol0.img", FileUri("vol0.img")),
        ("./mem:64MiB", FileUri("./mem:64MiB")),
        ("/data/a%2Cb", FileUri("/data/a%2Cb")),
        ("file:/data/a%2Cb.img", FileUri("/data/a,b.img")),
        ("FILE:a.img", FileUri("a.img")),
        ("file:///data/x", FileUri("/data/x")),
        ("file://localhost/data/x", FileUri("/data/x")),
        ("file:%FF", FileUri(os.fsdecode(b"\xff"))),
        ("/caf\N{LATIN SMALL LETTER E WITH ACUTE}", FileUri("/caf\xe9")),
        ("mem:64MiB", MemoryUri("64MiB", 64 * MIB)),
        ("mem:scratch", MemoryUri("scratch")),
        ("mem:a-b_c.d?size=1MiB&block=4096", MemoryUri("a-b_c.d", MIB, 4096)),
        (f"nvme-tcp://host/{NQN}?nsid=1", NvmeTcpUri("host", 4420, NQN, 1)),
        (
            f"nvme-tcp://10.0.0.5:4421/{NQN}?nsid=7&hostnqn={NQN}&hdgst=1&ddgst=1",
            NvmeTcpUri("10.0.0.5", 4421, NQN, 7, NvmeTcpOptions(NQN, None, True, True)),
        ),
        (
            f"nvme-tcp://a/{NQN}?nsid=1&path=b&path=[::1]:7&path=10.0.0.5:4421",
            NvmeTcpUri(
                "a", 4420, NQN, 1, alternatives=(("b", 4420), ("::1", 7), ("10.0.0.5", 4421))
            ),
        ),
        (
            f"nvme-tcp://a/{NQN}?nsid=1&hostid={HOST_ID}&timeout_ms=1&connect_ms=2&keepalive_ms=0"
            "&reconnect_ms=0&busy_poll_us=50",
            NvmeTcpUri(
                "a", 4420, NQN, 1, NvmeTcpOptions(None, UUID(HOST_ID), False, False, 1, 2, 0, 0, 50)
            ),
        ),
        (f"nvme-tcp://[fe80::1]:4420/{NQN}?nsid=1", NvmeTcpUri("fe80::1", 4420, NQN, 1)),
        ("nvme-tcp+discover://host", NvmeTcpDiscoverUri("host", 8009)),
        (f"nvme-tcp+discover://h:1?hostnqn={NQN}", NvmeTcpDiscoverUri("h", 1, NvmeTcpOptions(NQN))),
        (
            f"nvme-tcp+discover://h?volume={HOST_ID}&hdgst=1",
            NvmeTcpDiscoverUri("h", 8009, NvmeTcpOptions(header_digest=True), UUID(HOST_ID)),
        ),
        (
            "nvme-tcp+discover://h?ddgst=1&connect_ms=9",
            NvmeTcpDiscoverUri("h", 8009, NvmeTcpOptions(data_digest=True, connect_ms=9)),
        ),
        (
            "spdk:trtype=PCIe traddr=0000:5e:00.0 nsid=2",
            SpdkUri((("trtype", "PCIe"), ("traddr", "0000:5e:00.0")), 2),
        ),
        (
            f"spdk:TRTYPE=tcp adrfam=IPv4 traddr=10.0.0.5 trsvcid=4420 subnqn={NQN}",
            SpdkUri(
                (
                    ("trtype", "tcp"),
                    ("adrfam", "IPv4"),
                    ("traddr", "10.0.0.5"),
                    ("trsvcid", "4420"),
                    ("subnqn", NQN),
                ),
                1,
            ),
        ),
        (
            "spdk:trtype=PCIe traddr=0000:5e:00.0 nsid=2 huge=1 cores=0-3+8 bounce=1 timeout_ms=50",
            SpdkUri(
                (("trtype", "PCIe"), ("traddr", "0000:5e:00.0")),
                2,
                (("huge", 1), ("cores", "0-3+8"), ("bounce", 1), ("timeout_ms", 50)),
            ),
        ),
    ],
)
def test_accepts(text: str, expected: object) -> None:
    parsed = parse_uri(text)
    assert parsed == expected
    assert parse_uri(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a path or a URI"),
        ("file:", "a path"),
        ("file://elsewhere/x", "file:///PATH"),
        ("file:a%2", "hexadecimal"),
        ("a\0b", "without NUL"),
        ("file:a%00b", "without NUL"),
        ("/" + "x" * 4095, "4095"),
        ("x" * 9000, "8192"),
        ("\ud800", "can be a path"),
        ("ftp://x/y", "nvme-tcp:"),
        ("mem:", "a size or a name"),
        ("mem:?size=1MiB", "a size or a name"),
        ("mem:a/b", "a size or a name"),
        ("mem:64XiB", "a size"),
        ("mem:0MiB", "a size"),
        ("mem:99999999999999999999", "a size"),
        ("mem:a?", "options"),
        ("mem:a?size=1&size=2", "once"),
        ("mem:a?sice=1", "options size, block"),
        ("mem:a?size=" + "9" * 400, "a size"),
        ("mem:a?size=1MiB&block=1000", "power of two"),
        ("mem:\N{BULLET}", "ASCII"),
        ("nvme-tcp:host", "//"),
        (f"nvme-tcp://host/{NQN}", "nsid"),
        (f"nvme-tcp://host/{NQN}?nsid=0", "nsid"),
        (f"nvme-tcp://host/{NQN}?nsid=4294967295", "nsid"),
        (f"nvme-tcp://host/{NQN}?nsid=1&key=secret", "options"),
        (f"nvme-tcp://host/{NQN}?nsid=1&hdgst=yes", "hdgst"),
        ("nvme-tcp://host/disk0?nsid=1", "NQN"),
        (f"nvme-tcp://host/{NQN}{'x' * 223}?nsid=1", "223"),
        (f"nvme-tcp://-host/{NQN}?nsid=1", "host name"),
        (f"nvme-tcp:///{NQN}?nsid=1", "host name"),
        (f"nvme-tcp://fe80::1/{NQN}?nsid=1", "a port"),
        (f"nvme-tcp://[fe80::1/{NQN}?nsid=1", "IPv6"),
        (f"nvme-tcp://[host]/{NQN}?nsid=1", "IPv6"),
        (f"nvme-tcp://host:0/{NQN}?nsid=1", "a port"),
        (f"nvme-tcp://host:65536/{NQN}?nsid=1", "a port"),
        (f"nvme-tcp://host:/{NQN}?nsid=1", "a port"),
        (f"nvme-tcp://host/{NQN}?nsid=1&path=", "host name"),
        (f"nvme-tcp://host/{NQN}?nsid=1&path=a&path=b&path=c&path=d", "3 further paths"),
        (f"nvme-tcp://host/{NQN}?nsid=1&timeout_ms=0", "timeout_ms 1..3600000"),
        (f"nvme-tcp://host/{NQN}?nsid=1&timeout_ms=1&timeout_ms=1", "once"),
        (f"nvme-tcp://host/{NQN}?nsid=1&hostid=7", "UUID"),
        ("nvme-tcp+discover://host?nsid=1", "options"),
        ("nvme-tcp+discover://host?volume=pool", "a UUID"),
        ("nvme-tcp+discover://host?path=b", "options"),
        ("nvme-tcp+discover://host/x", "nothing after the port"),
        ("unix:/run/dlfs.sock", "unix:, a service and no device"),
        ("spdk:", "trtype"),
        ("spdk:trtype=FC traddr=x", "trtype"),
        ("spdk:trtype=PCIe", "traddr"),
        ("spdk:trtype=PCIe traddr=hello", "traddr"),
        ("spdk:trtype=TCP traddr=10.0.0.5", "NQN"),
        ("spdk:trtype=PCIe traddr=0000:5e:00.0 color=red", "key=value"),
        ("spdk:trtype=PCIe trtype=PCIe traddr=0000:5e:00.0", "once"),
        ("spdk:trtype=PCIe traddr=0000:5e:00.0 hdgst=2", "hdgst 0..1"),
        ("spdk:trtype=PCIe traddr=0000:5e:00.0 timeout_ms=0", "timeout_ms 1.."),
        ("spdk:trtype=PCIe traddr=0000:5e:00.0 cores=0-", "CPUs"),
        ("spdk:trtype=PCIe traddr=0000:5e:00.0 cores=" + "1+" * 300 + "1", "CPUs"),
    ],
)
def test_refuses(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_uri(text)
    assert says in str(caught.value)
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 1000


@given(st.text(max_size=200))
@settings(deadline=None)
def test_any_text_parses_or_is_refused(text: str) -> None:
    for prefix in ("", "file:", "mem:", "nvme-tcp://", "nvme-tcp+discover://", "spdk:"):
        try:
            parsed = parse_uri(prefix + text)
        except UsageError:
            continue
        assert parse_uri(str(parsed)) == parsed


@given(st.binary(min_size=1, max_size=60).filter(lambda path: b"\0" not in path))
@settings(deadline=None)
def test_any_file_name_has_a_uri(path: bytes) -> None:
    text = os.fsdecode(path)
    (member,) = split_members(format_path(text))
    assert parse_uri(member) == FileUri(text)


def test_members_are_split_at_commas() -> None:
    assert split_members("a.img") == ("a.img",)
    assert split_members("a.img, mem:1MiB,b") == ("a.img", "mem:1MiB", "b")
    for bad in ("", ",", "a,,b", "a,", " "):
        with pytest.raises(UsageError, match="single commas"):
            split_members(bad)
    assert len(split_members(",".join(["x"] * 64))) == 64
    with pytest.raises(UsageError, match="64"):
        split_members(",".join(["x"] * 65))


def test_every_scheme_is_described_by_an_example_that_parses() -> None:
    schemes = describe_schemes()
    assert all(scheme.available for scheme in schemes)
    assert len({type(parse_uri(scheme.example)) for scheme in schemes}) == len(schemes) == 5
