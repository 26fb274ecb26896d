"""The kinds of device URIs in words, for ``dlfs uri help``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchemeHelp:
    """The help text of one kind of device URI, for ``dlfs uri help``."""

    scheme: str
    form: str
    example: str
    summary: str


def describe_schemes() -> tuple[SchemeHelp, ...]:
    """Return the help texts of all kinds of device URIs."""
    return (
        SchemeHelp(
            "file", "PATH or file:PATH", "/data/vol0.img",
            "a file or a disk of this machine; file: decodes %-escapes, as in a%2Cb",
        ),
        SchemeHelp(
            "mem", "mem:SIZE or mem:NAME?size=SIZE[&block=BYTES]", "mem:64MiB",
            "memory of this process, for tests and trials",
        ),
        SchemeHelp(
            "nvme-tcp", "nvme-tcp://HOST[:PORT]/NQN?nsid=N[&path=HOST[:PORT]][&OPTION=VALUE]",
            "nvme-tcp://10.0.0.5:4420/nqn.2024-01.org.example:disk0?nsid=1",
            "one namespace of an NVMe/TCP target; options: hostnqn, hostid, hdgst, ddgst, "
            "timeout_ms, connect_ms, keepalive_ms, reconnect_ms, busy_poll_us, dhchap_key, "
            "dhchap_ctrl_key, tls_psk, reauth_s, concat",
        ),
        SchemeHelp(
            "nvme-tcp+discover", "nvme-tcp+discover://HOST[:PORT][?volume=UUID][&OPTION=VALUE]",
            "nvme-tcp+discover://10.0.0.5:8009",
            "the members of a volume among the namespaces that a discovery controller lists; "
            "options as for nvme-tcp",
        ),
        SchemeHelp(
            "spdk", "spdk:trtype=PCIe|TCP|RDMA traddr=ADDRESS [KEY=VALUE ...] nsid=N",
            "spdk:trtype=PCIe traddr=0000:5e:00.0 nsid=1",
            "a namespace by SPDK's own transport ID, where dlfs was built with SPDK",
        ),
    )  # fmt: skip
