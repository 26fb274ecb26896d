"""Device URIs for the tests of both parsers, ``dlfs.block.uri`` and ``native/src/device/uri.c``."""

from __future__ import annotations

import os
from uuid import UUID

from dlfs.block.uri import (
    DeviceUri,
    FileUri,
    MemoryUri,
    NvmeTcpDiscoverUri,
    NvmeTcpOptions,
    NvmeTcpUri,
    SpdkUri,
)
from dlfs.units import MIB

NQN = "nqn.2024-01.org.example:disk0"
LONGEST_NQN = NQN + "x" * (223 - len(NQN))
HOST_ID = "6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a"

ACCEPTED: list[tuple[str, DeviceUri]] = [
    ("/data/vol0.img", FileUri("/data/vol0.img")),
    ("vol0.img", FileUri("vol0.img")),
    ("./mem:64MiB", FileUri("./mem:64MiB")),
    ("/data/a%2Cb", FileUri("/data/a%2Cb")),
    ("file:/data/a%2Cb.img", FileUri("/data/a,b.img")),
    ("FILE:a.img", FileUri("a.img")),
    ("file:a?b&c#d", FileUri("a?b&c#d")),
    ("a%zz", FileUri("a%zz")),
    ("1a:b", FileUri("1a:b")),
    ("x" * 4095, FileUri("x" * 4095)),
    ("file:" + "%61" * 1365, FileUri("a" * 1365)),
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
        NvmeTcpUri("a", 4420, NQN, 1, alternatives=(("b", 4420), ("::1", 7), ("10.0.0.5", 4421))),
    ),
    (
        f"nvme-tcp://a/{NQN}?nsid=1&hostid={HOST_ID}&timeout_ms=1&connect_ms=2&keepalive_ms=0"
        "&reconnect_ms=0&busy_poll_us=50",
        NvmeTcpUri(
            "a", 4420, NQN, 1, NvmeTcpOptions(None, UUID(HOST_ID), False, False, 1, 2, 0, 0, 50)
        ),
    ),
    (
        f"nvme-tcp://a/{NQN}?nsid=1&dhchap_key=host.1&dhchap_ctrl_key=A_-z&tls_psk=p&reauth_s=60",
        NvmeTcpUri(
            "a",
            4420,
            NQN,
            1,
            NvmeTcpOptions(dhchap_key="host.1", dhchap_ctrl_key="A_-z", tls_psk="p", reauth_s=60),
        ),
    ),
    (
        f"nvme-tcp://a/{NQN}?nsid=1&concat=1&dhchap_key=k",
        NvmeTcpUri("a", 4420, NQN, 1, NvmeTcpOptions(dhchap_key="k", concat=True)),
    ),
    (f"nvme-tcp://[fe80::1]:4420/{NQN}?nsid=1", NvmeTcpUri("fe80::1", 4420, NQN, 1)),
    (f"nvme-tcp://[fe80::1%eth0]/{NQN}?nsid=1", NvmeTcpUri("fe80::1%eth0", 4420, NQN, 1)),
    (f"nvme-tcp://[fe80::1%25e1]:1/{NQN}?nsid=1", NvmeTcpUri("fe80::1%e1", 1, NQN, 1)),
    (f"nvme-tcp://[fe80::1%2525]:1/{NQN}?nsid=1", NvmeTcpUri("fe80::1%25", 1, NQN, 1)),
    (
        f"nvme-tcp://a/{NQN}?path=[fe80::1%25e1]&nsid=1",
        NvmeTcpUri("a", 4420, NQN, 1, alternatives=(("fe80::1%e1", 4420),)),
    ),
    (
        f"nvme-tcp://a/{NQN}?path=[fe80::1%25eth0]:1&nsid=1",
        NvmeTcpUri("a", 4420, NQN, 1, alternatives=(("fe80::1%eth0", 1),)),
    ),
    (f"NVMe-TCP://[::ffff:1.2.3.4]/{NQN}?nsid=1", NvmeTcpUri("::ffff:1.2.3.4", 4420, NQN, 1)),
    (
        "nvme-tcp://h/nqn.2024-01.org%3Fa/b?nsid=%31&hdgst=%31",
        NvmeTcpUri("h", 4420, "nqn.2024-01.org?a/b", 1, NvmeTcpOptions(header_digest=True)),
    ),
    (f"nvme-tcp://h:00044/{NQN}?nsid=4294967294", NvmeTcpUri("h", 44, NQN, 0xFFFFFFFE)),
    (f"nvme-tcp://{'a' * 63}.b/{NQN}?nsid=1", NvmeTcpUri(f"{'a' * 63}.b", 4420, NQN, 1)),
    (f"nvme-tcp://h/{LONGEST_NQN}?nsid=1", NvmeTcpUri("h", 4420, LONGEST_NQN, 1)),
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
]
"""Accepted texts, each with the URI that it is parsed to."""

REFUSED: list[tuple[str, str]] = [
    ("", "a path or a URI"),
    ("file:", "a path"),
    ("file://elsewhere/x", "file:///PATH"),
    ("file:a%2", "hexadecimal"),
    ("file:a%%41", "hexadecimal"),
    ("file:a%", "hexadecimal"),
    ("file://localhost", "file:///PATH"),
    ("file://LOCALHOST/x", "file:///PATH"),
    ("file:" + "%61" * 2730, "8192 bytes"),
    ("file:" + "\xe9" * 2048, "4095"),
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
    (f"nvme-tcp://[fe80::1%25]/{NQN}?nsid=1", "behind %25"),
    (f"nvme-tcp://[fe80::1%]/{NQN}?nsid=1", "behind %25"),
    (f"nvme-tcp://[fe80::1%25a%25b]/{NQN}?nsid=1", "behind %25"),
    (f"nvme-tcp://[fe80::1/{NQN}?nsid=1", "IPv6"),
    (f"nvme-tcp://[host]/{NQN}?nsid=1", "IPv6"),
    (f"nvme-tcp://[::1%]/{NQN}?nsid=1", "an interface's name"),
    (f"nvme-tcp://[::1%a%b]/{NQN}?nsid=1", "an interface's name"),
    (f"nvme-tcp://[::1%{'a' * 16}]/{NQN}?nsid=1", "an interface's name"),
    (f"nvme-tcp://h/{NQN}?nsid=1&path=[::1%25%00]", "an interface's name"),
    (f"nvme-tcp://h/{NQN}?nsid=1&path=[::1%25%E9]", "an interface's name"),
    (f"nvme-tcp://[::1]x/{NQN}?nsid=1", "IPv6"),
    (f"nvme-tcp://[1::2::3]/{NQN}?nsid=1", "IPv6"),
    (f"nvme-tcp://{'a' * 64}/{NQN}?nsid=1", "host name"),
    (f"nvme-tcp://{'a.' * 127}/{NQN}?nsid=1", "host name"),
    (f"nvme-tcp://a-/{NQN}?nsid=1", "host name"),
    (f"nvme-tcp://a..b/{NQN}?nsid=1", "host name"),
    (f"nvme-tcp://host\u2022/{NQN}?nsid=1", "ASCII"),
    (f"nvme-tcp://host/{NQN}?nsid=1\n", "ASCII"),
    (f"nvme-tcp://host/{NQN}%00?nsid=1", "NQN"),
    (f"nvme-tcp://host/{LONGEST_NQN}x?nsid=1", "NQN"),
    (f"nvme-tcp://host/{NQN}%E9?nsid=1", "NQN"),
    ("nvme-tcp://host/nqn.2024-1.x?nsid=1", "NQN"),
    ("nvme-tcp://host/nqn.2024-01.?nsid=1", "NQN"),
    ("nvme-tcp://host/NQN.2024-01.x?nsid=1", "NQN"),
    (f"nvme-tcp://host/{NQN}?", "nsid"),
    (f"nvme-tcp://host/{NQN}?nsid=1&", "options"),
    (f"nvme-tcp://host/{NQN}?&nsid=1", "options"),
    (f"nvme-tcp://host/{NQN}?nsid", "options"),
    (f"nvme-tcp://host/{NQN}?nsid=1&path", "options"),
    (f"nvme-tcp://host/{NQN}?nsid=1&NSID=1", "options"),
    (f"nvme-tcp://host/{NQN}?nsid=+1", "nsid"),
    (f"nvme-tcp://host/{NQN}?nsid=00000000001", "nsid"),
    (f"nvme-tcp://host/{NQN}?nsid=1&timeout_ms=3600001", "timeout_ms 1..3600000"),
    (f"nvme-tcp://host/{NQN}?nsid=1&dhchap_key=", "the name of a key"),
    (f"nvme-tcp://host/{NQN}?nsid=1&dhchap_key=../a", "the name of a key"),
    (f"nvme-tcp://host/{NQN}?nsid=1&dhchap_key=.a", "the name of a key"),
    (f"nvme-tcp://host/{NQN}?nsid=1&tls_psk={'a' * 65}", "the name of a key"),
    (f"nvme-tcp://host/{NQN}?nsid=1&dhchap_key=DHHC-1:00:c2VjcmV0:", "the name of a key"),
    (f"nvme-tcp://host/{NQN}?nsid=1&dhchap_ctrl_key=a", "dhchap_key with dhchap_ctrl_key"),
    (f"nvme-tcp://host/{NQN}?nsid=1&concat=2&dhchap_key=a", "concat=0 or concat=1"),
    (f"nvme-tcp://host/{NQN}?nsid=1&concat=1", "dhchap_key and no tls_psk"),
    (f"nvme-tcp://host/{NQN}?nsid=1&concat=1&dhchap_key=a&tls_psk=b", "no tls_psk with concat=1"),
    (f"nvme-tcp://host/{NQN}?nsid=1&reauth_s=604801", "reauth_s 0..604800"),
    (f"nvme-tcp://host/{NQN}?nsid=1&busy_poll_us=1000001", "busy_poll_us 0..1000000"),
    (f"nvme-tcp://host/{NQN}?nsid=1&hostnqn=host", "NQN"),
    (f"nvme-tcp://host/{NQN}?nsid=1&hostid={HOST_ID}0", "UUID"),
    (f"nvme-tcp://host/{NQN}?nsid=1&hdgst=%3", "hexadecimal"),
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
    ("unix:/run/dlfs.sock", "a service is read-only and no device"),
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
]
"""Refused texts, each with words of its error."""

_SECRET = "c2VjcmV0" * 4
_KEYS = (f"DHHC-1:00:{_SECRET}:", f"NVMeTLSkey-1:01:{_SECRET}:", f"DHHC-1%3A00%3A{_SECRET}%3A")
SECRETS: list[tuple[str, str]] = [
    *((key, _SECRET) for key in _KEYS[:2]),
    *(
        (form.format(key=key, nqn=NQN), _SECRET)
        for key in _KEYS
        for form in (
            "ftp:{key}",
            "unix:{key}",
            "nvme-tcp:{key}",
            "nvme-tcp://{key}",
            "nvme-tcp://host/{key}",
            "nvme-tcp://host/{nqn}?nsid=1&dhchap_secret={key}",
            "nvme-tcp://host/{nqn}?nsid=x&dhchap_key={key}",
            "nvme-tcp://host/{nqn}?dhchap_key={key}",
            "nvme-tcp://host/{nqn}?nsid=1&dhchap_key=a&dhchap_key={key}",
            "nvme-tcp://host/{nqn}?nsid=1&hostnqn={key}",
            "nvme-tcp+discover://host?tls_key={key}",
            "spdk:trtype=TCP traddr=10.0.0.5 psk={key}",
        )
    ),
]
"""Refused texts with a key, each with the part of the key that no message may contain."""
