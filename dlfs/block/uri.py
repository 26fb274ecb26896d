"""Device URIs: strings that name block devices.

::

    /data/vol0.img  vol0.img  ./vol0.img     a file or a disk
    file:PATH                                the same, %-escapes decoded: for odd names
    mem:64MiB  mem:NAME?size=64MiB           memory of this process
    nvme-tcp://host:4420/NQN?nsid=1          one namespace of an NVMe/TCP target
        &path=host2:4420&hdgst=1&ddgst=1     ... by another path too, with digests
    nvme-tcp+discover://host:8009            all namespaces of a volume, from a discovery controller
    spdk:trtype=PCIe traddr=... nsid=1       SPDK's own transport-ID strings

Several URIs, joined by commas, name the members of a volume; a comma in a file's name is written
``file:a%2Cb``. Parsing is strict and never opens a device. A URI has at most 8192 bytes.

libdlfs parses paths, ``file:`` and ``nvme-tcp:`` by the same rules, since programs in C open
volumes without Python. This module does not call it, since discovery has the same options, and
errors show text as Python writes it. A change here needs the same change in
``native/src/device/uri.c`` and ``uri_nvme.c``.

Source: NVM Express Base Specification 2.0, section 4.5 (NQNs: at most 223 bytes) and 3.2.1
(namespace IDs); SPDK ``spdk_nvme_transport_id_parse`` (keys, case-insensitive); RFC 8089 (file
URIs); RFC 6874 (the zone of an IPv6 address).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote_to_bytes
from uuid import UUID

from dlfs.base.units import parse_bytes
from dlfs.base.wording import redact
from dlfs.errors import UsageError

URI_BYTES_MAX = 8192
PATH_BYTES_MAX = 4095
MEMBERS_MAX = 64
NQN_BYTES_MAX = 223
NSID_MAX = 0xFFFFFFFE
NVME_TCP_PORT = 4420
DISCOVERY_PORT = 8009
KEY_NAME_FORM = "1 to 64 of A-Z a-z 0-9 . _ -"
PATHS_MAX = 4
"""Most paths to one subsystem."""

_DURATION_MS_MAX = 3_600_000
_BUSY_POLL_US_MAX = 1_000_000
_REAUTH_S_MAX = 604_800

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SIZE_DIGITS_MAX = 20
_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    r"(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)
_ZONE = re.compile(r"[A-Za-z0-9._~-]{1,15}")
"""Zone of a link-local address: an interface's name or number."""
_NQN = re.compile(r"nqn\.\d{4}-\d{2}\.[\x21-\x7e]+")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_KEY_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"DHHC-1|NVMeTLSkey-1")
"""Beginnings of the texts of keys; some other tools expect the key itself in their options."""
_DECIMAL = re.compile(r"[0-9]{1,10}")
_PCI = re.compile(r"([0-9a-fA-F]{1,8}[:.])?[0-9a-fA-F]{1,2}[:.][0-9a-fA-F]{1,2}\.[0-7]")


@dataclass(frozen=True)
class FileUri:
    """A file or a disk."""

    path: str

    def __str__(self) -> str:
        return format_path(self.path)


@dataclass(frozen=True)
class MemoryUri:
    """A device in memory of this process; without a size, it must exist."""

    name: str
    size_bytes: int | None = None
    block_bytes: int | None = None

    def __str__(self) -> str:
        options = {"size": self.size_bytes, "block": self.block_bytes}
        query = "&".join(f"{key}={value}" for key, value in options.items() if value is not None)
        return f"mem:{self.name}?{query}" if query else f"mem:{self.name}"


@dataclass(frozen=True)
class NvmeTcpOptions:
    """Options of a connection to an NVMe/TCP target."""

    host_nqn: str | None = None
    """NQN of this host; None: that of ``dlfs.block.host``, as for ``host_id``."""
    host_id: UUID | None = None
    header_digest: bool = False
    data_digest: bool = False
    timeout_ms: int = 5000
    """Time limit of one command, in milliseconds."""
    connect_ms: int = 3000
    """Time limit of one attempt to connect on one path, in milliseconds."""
    keepalive_ms: int = 10000
    """Silence after which the target ends the connections, in milliseconds; 0: no keep-alive."""
    reconnect_ms: int = 15000
    """Time for attempts to reconnect to a lost target, in milliseconds; 0: none are made.

    A read waits for the target for ``timeout_ms + reconnect_ms``. The reader fails it after 30
    seconds or a second more than that, whichever is later (``dlfs.reader.read_timeout_ms``).
    """
    busy_poll_us: int = 0
    """Idle time after which a thread that waits for completions stops busy-polling and sleeps."""
    dhchap_key: str | None = None
    """Name of this host's key for DH-HMAC-CHAP; None: no authentication (docs/storage-nodes.md)."""
    dhchap_ctrl_key: str | None = None
    """Name of the controller's key; None: the controller need not prove its identity."""
    tls_psk: str | None = None
    """Name of the pre-shared key for TLS; None: no TLS."""
    reauth_s: int = 0
    """Period after which the admin queue is authenticated anew, in seconds; 0: never."""
    concat: bool = False
    """Secure channel concatenation: TLS with a key that authentication generates."""

    def __str__(self) -> str:
        words: list[str] = []
        for key, (name, _) in _OPTION_FIELDS.items():
            value = getattr(self, name)
            if value != getattr(_NO_OPTIONS, name):
                text = str(int(value)) if isinstance(value, bool) else str(value)
                words.append(f"{key}={quote(text, safe=':')}")
        return "&".join(words)


@dataclass(frozen=True)
class NvmeTcpUri:
    """One namespace of an NVMe/TCP target."""

    host: str
    port: int
    subsystem_nqn: str
    nsid: int
    options: NvmeTcpOptions = NvmeTcpOptions()
    alternatives: tuple[tuple[str, int], ...] = ()
    """Further hosts and ports of the same subsystem, used when the first is lost."""

    @property
    def paths(self) -> tuple[tuple[str, int], ...]:
        """All hosts and ports of the subsystem, in the order in which they are tried."""
        return ((self.host, self.port), *self.alternatives)

    def __str__(self) -> str:
        query = f"nsid={self.nsid}"
        for host, port in self.alternatives:
            query += f"&path={_format_host(host)}:{port}"
        query += f"&{self.options}" if str(self.options) else ""
        nqn = quote(self.subsystem_nqn, safe=":")
        return f"nvme-tcp://{_format_host(self.host)}:{self.port}/{nqn}?{query}"


@dataclass(frozen=True)
class NvmeTcpDiscoverUri:
    """Every namespace that a discovery controller lists."""

    host: str
    port: int
    options: NvmeTcpOptions = NvmeTcpOptions()
    """Options of the connections to the discovery controller and to all listed subsystems."""
    volume: UUID | None = None
    """UUID of the volume; None: the listed namespaces belong to one volume."""

    def __str__(self) -> str:
        volume = f"volume={self.volume}" if self.volume is not None else ""
        query = "&".join(filter(None, (volume, str(self.options))))
        query = f"?{query}" if query else ""
        return f"nvme-tcp+discover://{_format_host(self.host)}:{self.port}{query}"


@dataclass(frozen=True)
class SpdkUri:
    """A namespace, named by SPDK's transport ID."""

    transport_id: tuple[tuple[str, str], ...]
    """Keys in lower case and values, in the order given, without nsid."""
    nsid: int
    options: tuple[tuple[str, int | str], ...] = ()
    """DLFS's own options, in the order given: ``SPDK_NUMBERS`` and ``cores``."""

    def __str__(self) -> str:
        words = (*self.transport_id, ("nsid", self.nsid), *self.options)
        return "spdk:" + " ".join(f"{key}={value}" for key, value in words)


DeviceUri = FileUri | MemoryUri | NvmeTcpUri | NvmeTcpDiscoverUri | SpdkUri


# ---- parsing -------------------------------------------------------------------------------------


def _reject(uri: str, expected: str, got: str) -> UsageError:
    got = "something else" if _KEY.search(uri) else got
    return UsageError(f"parse device URI {_show(uri)}: expected {expected}, got {_show(got)}")


def _show(text: str) -> str:
    shown = _KEY.split(redact(text), maxsplit=1)[0][:200]  # no message contains a part of a key
    return ascii(text if shown == text else shown + "...")


def parse_uri(uri: str) -> DeviceUri:
    """Parse one device URI.

    Args:
        uri: any text; bytes that are not UTF-8 are surrogates, as ``os.fsdecode`` returns them.

    Raises:
        UsageError: the text names no device; the message says what was expected.
    """
    try:
        size_bytes = len(uri.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as error:
        raise _reject(uri, "text that can be a path", uri) from error
    if size_bytes > URI_BYTES_MAX:
        raise _reject(uri, f"at most {URI_BYTES_MAX} bytes", f"{size_bytes}")
    if not uri:
        raise _reject(uri, "a path or a URI", uri)
    match = None if uri[0] in "/." else _SCHEME.match(uri)
    if match is None:
        return _file(uri, uri)
    scheme = match[1].lower()
    if scheme == "unix":
        raise UsageError(
            f"open {_show(uri)}: a service is read-only and no device; name its volume's devices"
        )
    parser = _PARSERS.get(scheme)
    if parser is None:
        known = ", ".join(f"{scheme}:" for scheme in _PARSERS)
        name = "NAME" if _KEY.search(uri) or redact(uri) != uri else uri[:50]
        expected = f"a path or one of {known} (a file of that name is ./{name})"
        raise _reject(uri, expected, match[0])
    body = uri[match.end() :]
    if scheme != "file" and not (body.isascii() and body.isprintable()):
        raise _reject(uri, "printable ASCII", body)
    return parser(uri, body)


def split_members(text: str) -> tuple[str, ...]:
    """Split the URIs of a volume's members at commas.

    Args:
        text: 1 to 64 URIs. Spaces around them are dropped.

    Raises:
        UsageError: a URI is empty, or there are too many.
    """
    members = tuple(part.strip(" ") for part in text.split(","))
    if not all(members):
        raise _reject(text, "device URIs separated by single commas", text)
    if len(members) > MEMBERS_MAX:
        raise _reject(text, f"at most {MEMBERS_MAX} members", f"{len(members)}")
    return members


def format_path(path: str) -> str:
    """Return the URI of a file, which ``split_members`` and ``parse_uri`` turn into the path."""
    plain = path[:1] in ("/", ".") or _SCHEME.match(path) is None
    if path and plain and "," not in path and path == path.strip(" "):
        return path
    # quote() escapes each byte that is not UTF-8.
    return "file:" + quote(path.encode("utf-8", "surrogateescape"), safe="/")


def _file(uri: str, path: str) -> FileUri:
    size = len(path.encode("utf-8", "surrogateescape"))
    if "\0" in path:
        raise _reject(uri, "a path without NUL", path)
    if size > PATH_BYTES_MAX:
        raise _reject(uri, f"a path of at most {PATH_BYTES_MAX} bytes", f"{size} bytes")
    return FileUri(path)


def _parse_file(uri: str, body: str) -> FileUri:
    if body.startswith("//"):
        host, slash, path = body[2:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise _reject(uri, "file:PATH or file:///PATH", body)
        body = "/" + path
    path = _unescape(uri, body).decode("utf-8", "surrogateescape")
    if not path:
        raise _reject(uri, "a path", path)
    return _file(uri, path)


def _unescape(uri: str, text: str) -> bytes:
    if re.search(r"%(?![0-9A-Fa-f]{2})", text):
        raise _reject(uri, "two hexadecimal digits after each %", text)
    return unquote_to_bytes(text.encode("utf-8", "surrogateescape"))


def _options(uri: str, query: str, allowed: tuple[str, ...]) -> dict[str, str]:
    """Parse the key=value pairs of a query, each key at most once."""
    found: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        key, equals, value = pair.partition("=")
        if key not in allowed or not equals or key in found:
            raise _reject(uri, f"options {', '.join(allowed)}, each once, as key=value", pair)
        found[key] = _unescape(uri, value).decode("ascii", "replace")
    return found


def _size(uri: str, text: str) -> int:
    if len(text) > _SIZE_DIGITS_MAX:
        raise _reject(uri, "a size", text)
    try:
        size = parse_bytes(text)
    except UsageError as error:
        raise _reject(uri, "a size such as 64MiB", text) from error
    if not 0 < size < 1 << 63:
        raise _reject(uri, "a size of 1 byte to 8 EiB", text)
    return size


def _parse_memory(uri: str, body: str) -> MemoryUri:
    name, separator, query = body.partition("?")
    if not _MEMORY_NAME.fullmatch(name):
        raise _reject(uri, "a size or a name of letters, digits, '.', '_' and '-'", name)
    options = _options(uri, query, ("size", "block"))
    size = _size(uri, options["size"]) if "size" in options else None
    block = _size(uri, options["block"]) if "block" in options else None
    if block is not None and (not 512 <= block <= 65536 or block & (block - 1)):
        raise _reject(uri, "a block that is a power of two, 512..65536", options["block"])
    if separator and not query:
        raise _reject(uri, "options after ?", body)
    if size is None and name[0].isdigit():
        size = _size(uri, name)  # mem:64MiB is its own name
    return MemoryUri(name, size, block)


def _number(uri: str, what: str, text: str, low: int, high: int) -> int:
    if not _DECIMAL.fullmatch(text) or not low <= int(text) <= high:
        raise _reject(uri, f"{what} {low}..{high}", text)
    return int(text)


def _format_host(host: str) -> str:
    return f"[{quote(host, safe=':')}]" if ":" in host else host


def _parse_authority(uri: str, text: str, port: int) -> tuple[str, int]:
    """Parse ``host``, ``host:port``, ``[v6]`` or ``[v6]:port``; the zone follows %25, or just %."""
    if text.startswith("["):
        host, bracket, tail = text[1:].replace("%25", "%", 1).partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise _reject(uri, "[IPv6 address]:port", text)
        address, percent, zone = host.partition("%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError as error:
            raise _reject(uri, "an IPv6 address in brackets", host) from error
        if percent and not _ZONE.fullmatch(zone):
            raise _reject(uri, "an interface's name of at most 15 characters behind %25", host)
    else:
        host, _, _ = text.partition(":")
        tail = text[len(host) :]
        if not _HOST_NAME.fullmatch(host):
            raise _reject(uri, "a host name or address (IPv6 in brackets)", host)
    if tail:
        port = _number(uri, "a port", tail[1:], 1, 65535)
    return host, port


def _nqn(uri: str, text: str) -> str:
    if len(text) > NQN_BYTES_MAX or not _NQN.fullmatch(text):
        raise _reject(uri, f"an NQN (nqn.yyyy-mm...), at most {NQN_BYTES_MAX} bytes", text)
    return text


def _flag(uri: str, key: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise _reject(uri, f"{key}=0 or {key}=1", text)
    return text == "1"


def _network_parts(uri: str, body: str) -> tuple[str, str, str]:
    """Split the text after a scheme into authority, path without its slash, and query."""
    if not body.startswith("//"):
        raise _reject(uri, "// after the scheme", body)
    location, _, query = body[2:].partition("?")
    authority, _, path = location.partition("/")
    return authority, path, query


def _uuid(uri: str, text: str) -> UUID:
    if not _UUID.fullmatch(text):
        raise _reject(uri, "a UUID such as 6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a", text)
    return UUID(text)


# Each option of NVMe/TCP: the field it sets, and the range of a number (None: not a number).
_OPTION_FIELDS: dict[str, tuple[str, tuple[int, int] | None]] = {
    "hostnqn": ("host_nqn", None),
    "hostid": ("host_id", None),
    "hdgst": ("header_digest", None),
    "ddgst": ("data_digest", None),
    "timeout_ms": ("timeout_ms", (1, _DURATION_MS_MAX)),
    "connect_ms": ("connect_ms", (1, _DURATION_MS_MAX)),
    "keepalive_ms": ("keepalive_ms", (0, _DURATION_MS_MAX)),
    "reconnect_ms": ("reconnect_ms", (0, _DURATION_MS_MAX)),
    "busy_poll_us": ("busy_poll_us", (0, _BUSY_POLL_US_MAX)),
    "dhchap_key": ("dhchap_key", None),
    "dhchap_ctrl_key": ("dhchap_ctrl_key", None),
    "tls_psk": ("tls_psk", None),
    "reauth_s": ("reauth_s", (0, _REAUTH_S_MAX)),
    "concat": ("concat", None),
}
_KEY_OPTIONS = ("dhchap_key", "dhchap_ctrl_key", "tls_psk")
_NO_OPTIONS = NvmeTcpOptions()


def _key_name(uri: str, text: str) -> str:
    if not is_key_name(text):
        # The value is not shown: it may be a key.
        uri = uri.partition("?")[0]
        raise _reject(uri, f"the name of a key, {KEY_NAME_FORM}", "something else")
    return text


def is_key_name(text: str) -> bool:
    """Return True if a text is the name of a key."""
    return _KEY_NAME.fullmatch(text) is not None


def _nvme_options(uri: str, options: dict[str, str]) -> NvmeTcpOptions:
    fields: dict[str, Any] = {}
    for key, text in options.items():
        name, limits = _OPTION_FIELDS[key]
        if limits is not None:
            fields[name] = _number(uri, key, text, *limits)
        elif key == "hostnqn":
            fields[name] = _nqn(uri, text)
        elif key == "hostid":
            fields[name] = _uuid(uri, text)
        elif key in _KEY_OPTIONS:
            fields[name] = _key_name(uri, text)
        else:
            fields[name] = _flag(uri, key, text)
    if "dhchap_ctrl_key" in fields and "dhchap_key" not in fields:
        raise _reject(uri, "dhchap_key with dhchap_ctrl_key", "dhchap_ctrl_key alone")
    if fields.get("concat") and ("dhchap_key" not in fields or "tls_psk" in fields):
        raise _reject(uri, "dhchap_key and no tls_psk with concat=1", "concat=1")
    return NvmeTcpOptions(**fields)


def _take_paths(uri: str, query: str) -> tuple[tuple[tuple[str, int], ...], str]:
    """Return the repeatable path= options of a query, and the query without them."""
    pairs = query.split("&")
    given = [pair.removeprefix("path=") for pair in pairs if pair.startswith("path=")]
    if len(given) >= PATHS_MAX:
        raise _reject(uri, f"at most {PATHS_MAX - 1} further paths", f"{len(given)}")
    texts = [_unescape(uri, text).decode("ascii", "replace") for text in given]
    paths = tuple(_parse_authority(uri, text, NVME_TCP_PORT) for text in texts)
    return paths, "&".join(pair for pair in pairs if not pair.startswith("path="))


def _parse_nvme_tcp(uri: str, body: str) -> NvmeTcpUri:
    authority, path, query = _network_parts(uri, body)
    host, port = _parse_authority(uri, authority, NVME_TCP_PORT)
    nqn = _nqn(uri, _unescape(uri, path).decode("ascii", "replace"))
    alternatives, query = _take_paths(uri, query)
    options = _options(uri, query, ("nsid", *_OPTION_FIELDS, "path"))
    if "nsid" not in options:
        raise _reject(uri, "?nsid=N, the namespace", query)
    nsid = _number(uri, "nsid", options.pop("nsid"), 1, NSID_MAX)
    return NvmeTcpUri(host, port, nqn, nsid, _nvme_options(uri, options), alternatives)


def _parse_discover(uri: str, body: str) -> NvmeTcpDiscoverUri:
    authority, path, query = _network_parts(uri, body)
    host, port = _parse_authority(uri, authority, DISCOVERY_PORT)
    if path:
        raise _reject(uri, "nothing after the port: the controller lists its subsystems", path)
    options = _options(uri, query, ("volume", *_OPTION_FIELDS))
    volume = _uuid(uri, options.pop("volume")) if "volume" in options else None
    return NvmeTcpDiscoverUri(host, port, _nvme_options(uri, options), volume)


_SPDK_KEYS = (
    "trtype", "adrfam", "traddr", "trsvcid", "subnqn", "hostaddr", "hostsvcid", "hostnqn",
    "priority", "nsid",
)  # fmt: skip
_SPDK_TRANSPORTS = ("pcie", "tcp", "rdma")
SPDK_NUMBERS = {
    "bounce": (0, 1),  # copy all data through SPDK's memory
    "huge": (0, 1),
    "memory_mib": (16, 1 << 20),
    "shm_id": (0, 1 << 20),
    "timeout_ms": (1, _DURATION_MS_MAX),
    "connect_ms": (1, _DURATION_MS_MAX),
    "reconnect_ms": (0, _DURATION_MS_MAX),
    "keepalive_ms": (0, _DURATION_MS_MAX),
}
"""DLFS's own keys of an SPDK URI that are numbers, with their ranges."""
_CORES_CHARACTERS_MAX = 500
_CORES = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(\+[0-9]{1,5}(-[0-9]{1,5})?)*")


def _parse_spdk(uri: str, body: str) -> SpdkUri:
    found: dict[str, str] = {}
    for word in body.split():
        key, equals, value = word.partition("=")
        key = key.lower()
        known = (*_SPDK_KEYS, *SPDK_NUMBERS, "cores")
        if key not in known or not equals or not value or key in found:
            raise _reject(uri, f"words key=value, each key of {', '.join(known)} once", word)
        found[key] = value
    transport = found.get("trtype", "")
    if transport.lower() not in _SPDK_TRANSPORTS:
        raise _reject(uri, "trtype=PCIe, trtype=TCP or trtype=RDMA", transport)
    address = found.get("traddr", "")
    if not address or (transport.lower() == "pcie" and not _PCI.fullmatch(address)):
        raise _reject(uri, "traddr=, an address such as 0000:5e:00.0 or 10.0.0.5", address)
    if transport.lower() != "pcie":
        _nqn(uri, found.get("subnqn", ""))
    if "hostnqn" in found:
        _nqn(uri, found["hostnqn"])
    nsid = _number(uri, "nsid", found.pop("nsid", "1"), 1, NSID_MAX)
    options = tuple(
        (key, _spdk_option(uri, key, value))
        for key, value in found.items()
        if key not in _SPDK_KEYS
    )
    return SpdkUri(tuple(pair for pair in found.items() if pair[0] in _SPDK_KEYS), nsid, options)


def _spdk_option(uri: str, key: str, value: str) -> int | str:
    if key != "cores":
        return _number(uri, key, value, *SPDK_NUMBERS[key])
    if len(value) > _CORES_CHARACTERS_MAX or not _CORES.fullmatch(value):
        raise _reject(uri, "cores=, CPUs such as 0-3+8", value)
    return value


_PARSERS: dict[str, Callable[[str, str], DeviceUri]] = {
    "file": _parse_file,
    "mem": _parse_memory,
    "nvme-tcp": _parse_nvme_tcp,
    "nvme-tcp+discover": _parse_discover,
    "spdk": _parse_spdk,
}
