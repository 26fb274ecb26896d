"""libdlfs's parser of device URIs, and what it takes this host for: both as Python does.

The sources are compiled here into a library of their own, for libdlfs exports neither; arithmetic
without a defined result ends the test's process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from ctypes import (
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_uint8,
    c_uint32,
    create_string_buffer,
)
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlfs._native import abi
from dlfs.block import host, open_device
from dlfs.block.uri import DeviceUri, FileUri, NvmeTcpOptions, NvmeTcpUri, parse_uri
from dlfs.errors import UsageError
from dlfs.store.places import RefusedError, follow
from tests.native.test_native import ROOT, tool
from tests.unit.block.uris import ACCEPTED, NQN, REFUSED, SECRETS

MESSAGE_BYTES = 1024
SOURCES = [
    ROOT / "native/src/device" / name
    for name in ("uri.c", "uri_follow.c", "uri_nvme.c", "uri_text.c", "host.c")
]
PYTHON_ONLY = ("mem:", "nvme-tcp+discover:", "spdk:")
REFUSED_BY_BOTH = [  # without NUL and lone surrogates, which no C program's text has
    (text, says)
    for text, says in REFUSED
    if not text.startswith(PYTHON_ONLY) and "\0" not in text and "\ud800" not in text
]


class Uri(Structure):
    """``struct uri`` of ``native/src/device/uri.h``."""

    _fields_ = (
        ("kind", c_uint32),
        ("has_host_id", c_uint32),
        ("path", c_char * 4096),
        ("hosts", (c_char * 254) * abi.NVME_PATHS_MAX),
        ("subsystem_nqn", c_char * 224),
        ("host_nqn", c_char * 224),
        ("keys", (c_char * 65) * 3),
        ("nvme", abi.NvmeConfig),
    )


class HostIdentity(Structure):
    """``struct host_identity`` of ``native/src/device/host.h``."""

    _fields_ = (("nqn", c_char * 224), ("id", c_uint8 * 16))


@pytest.fixture(scope="module")
def c(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("uri")
    library = folder / "uri.so"
    sizes = folder / "sizes.c"
    sizes.write_text(
        '#include "device/uri.h"\n#include "device/host.h"\n'
        f'_Static_assert(sizeof(struct uri) == {ctypes.sizeof(Uri)}, "uri");\n'
        f'_Static_assert(sizeof(struct host_identity) == {ctypes.sizeof(HostIdentity)}, "host");\n'
    )
    flags = ["-std=c17", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-fsanitize=undefined"]
    flags += ["-fsanitize-undefined-trap-on-error", f"-I{ROOT}/native/include"]
    command = [tool("cc"), *flags, f"-I{ROOT}/native/src", sizes, *SOURCES, "-o", library]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.uri_parse.argtypes = [c_char_p, ctypes.POINTER(Uri), c_char_p, c_uint32]
    loaded.uri_parse.restype = c_int
    loaded.uri_follow.argtypes = [
        c_char_p, ctypes.POINTER(c_char_p), c_uint32, ctypes.POINTER(Uri), c_char_p, c_uint32,
    ]  # fmt: skip
    loaded.uri_follow.restype = c_int
    loaded.host_identity_read.argtypes = [
        c_char_p, c_char_p, c_char_p, ctypes.POINTER(HostIdentity), c_char_p, c_uint32,
    ]  # fmt: skip
    loaded.host_identity_read.restype = c_int
    return loaded


def parse(c: ctypes.CDLL, text: bytes) -> DeviceUri:
    """What the parser of libdlfs makes of a text, as Python's classes.

    Raises:
        UsageError: it refuses the text; NotImplementedError: only Python opens such a device.
    """
    uri, message = Uri(), create_string_buffer(MESSAGE_BYTES)
    code = c.uri_parse(text, byref(uri), message, MESSAGE_BYTES)
    return as_python(uri, code, message.value.decode("ascii"))


def as_python(uri: Uri, code: int, message: str) -> DeviceUri:
    """Return a URI of libdlfs as Python's classes have it; raise the error of its code."""
    if code == abi.E_NOT_FOUND:
        raise RefusedError(message)
    if code == -errno.ENOTSUP:
        raise NotImplementedError(message)
    if code < 0:
        assert code == -errno.EINVAL
        raise UsageError(message)
    if uri.kind == 0:
        return FileUri(os.fsdecode(uri.path))
    nvme = uri.nvme
    paths = [(nvme.hosts[i].decode("ascii"), int(nvme.ports[i])) for i in range(nvme.path_count)]
    options = NvmeTcpOptions(
        None if nvme.host_nqn is None else nvme.host_nqn.decode("ascii"),
        UUID(bytes=bytes(nvme.host_id)) if uri.has_host_id else None,
        bool(nvme.digests & abi.NVME_HEADER_DIGEST),
        bool(nvme.digests & abi.NVME_DATA_DIGEST),
        nvme.timeout_ms,
        nvme.connect_ms,
        nvme.keepalive_ms,
        nvme.reconnect_ms,
        nvme.busy_poll_us,
        *(
            None if name is None else name.decode("ascii")
            for name in (nvme.dhchap_key, nvme.dhchap_ctrl_key, nvme.tls_psk)
        ),
        nvme.reauth_s,
        bool(nvme.concat),
    )
    nqn = nvme.subsystem_nqn.decode("ascii")
    return NvmeTcpUri(*paths[0], nqn, nvme.nsid, options, tuple(paths[1:]))


def same(c: ctypes.CDLL, text: str) -> None:
    """Both parsers make the same of a text that a C program can have."""
    try:
        expected: DeviceUri | None = parse_uri(text)
    except UsageError:
        expected = None
    try:
        got: DeviceUri | None = parse(c, text.encode("utf-8", "surrogateescape"))
    except UsageError:
        got = None
    except NotImplementedError:
        assert text.lower().startswith(PYTHON_ONLY)
        return
    assert got == expected


@pytest.mark.parametrize(("text", "expected"), ACCEPTED)
def test_accepts_what_python_accepts(c: ctypes.CDLL, text: str, expected: DeviceUri) -> None:
    if text.startswith(PYTHON_ONLY):
        with pytest.raises(NotImplementedError, match="needs the Python package") as caught:
            parse(c, os.fsencode(text))
        assert text.partition(":")[0] + ":" in str(caught.value)
    else:
        assert parse(c, os.fsencode(text)) == expected


@pytest.mark.parametrize(("text", "says"), REFUSED_BY_BOTH)
def test_refuses_what_python_refuses(c: ctypes.CDLL, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(c, text.encode("utf-8", "surrogateescape"))
    assert says in str(caught.value)
    assert len(str(caught.value)) < MESSAGE_BYTES - 1


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_no_message_contains_a_key(c: ctypes.CDLL, text: str, secret: str) -> None:
    with pytest.raises((UsageError, NotImplementedError)) as caught:
        parse(c, text.encode())
    assert secret[:8] not in str(caught.value)


def expected_words(message: str) -> str:
    return message.partition(": expected ")[2].partition(", got ")[0]


@pytest.mark.parametrize("text", [text for text, _ in REFUSED if text.startswith("nvme-tcp:")])
def test_expects_what_python_expects(c: ctypes.CDLL, text: str) -> None:
    with pytest.raises(UsageError) as in_python:
        parse_uri(text)
    with pytest.raises(UsageError) as in_c:
        parse(c, text.encode())
    assert expected_words(str(in_c.value)) == expected_words(str(in_python.value))


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=80)
PIECES = st.sampled_from(
    f"{NQN} nvme-tcp://h/{NQN}?nsid=1 nsid=1 path= hdgst= hostid= timeout_ms= nvme-tcp: file: é "
    "nqn.2024-01. [::1] fe80::1%eth0 1.2.3.4 localhost %41 %00 % & ? / // : :: [ ] "
    "- . = 0 1 a".split()
)


@given(st.lists(PIECES | TEXT, max_size=12).map("".join))
@example("nvme-tcp://[::1]:1/" + NQN + "?nsid=1&path=&path=")
@settings(max_examples=400)
def test_both_parsers_agree_on_any_text(c: ctypes.CDLL, text: str) -> None:
    for prefix in ("", "file:", f"nvme-tcp://h/{NQN}?nsid=1&", "nvme-tcp://"):
        same(c, prefix + text)


@given(st.text("0123456789abcdefA:.%", max_size=48))
@example("1:2:3:4:5:6:7::")
@example("1::2:3:4:5:6:7:8")
@example("::ffff:255.255.255.256")
@example("::01.2.3.4")
@example("0000:0000:0000:0000:0000:ffff:255.255.255.255")
@settings(max_examples=400)
def test_both_parsers_agree_on_addresses(c: ctypes.CDLL, address: str) -> None:
    same(c, f"nvme-tcp://[{address}]/{NQN}?nsid=1")
    same(c, f"nvme-tcp://[::{address}]/{NQN}?nsid=1")
    same(c, f"nvme-tcp://{address}/{NQN}?nsid=1")


@given(st.binary(max_size=40).filter(lambda path: b"\0" not in path))
def test_both_parsers_agree_on_any_bytes(c: ctypes.CDLL, path: bytes) -> None:
    for prefix in ("", "file:", "./"):
        same(c, prefix + os.fsdecode(path))


# ---- URIs that a device names --------------------------------------------------------------------

GIVEN = ("/data/v0", f"nvme-tcp://10.0.0.1/{NQN}?nsid=1&dhchap_key=own&path=[::1]:1", "v1")


def follow_in_c(c: ctypes.CDLL, recorded: str, given: tuple[str, ...]) -> DeviceUri:
    uri, message = Uri(), create_string_buffer(MESSAGE_BYTES)
    texts = (c_char_p * len(given))(*map(os.fsencode, given))
    code = c.uri_follow(
        os.fsencode(recorded), texts, len(given), byref(uri), message, MESSAGE_BYTES
    )
    return as_python(uri, code, message.value.decode("ascii"))


PLACES = st.lists(
    st.sampled_from(
        "/ /data .. . v1 v0 data //etc file: nvme-tcp://10.0.0.1 nvme-tcp://[::1] [0:0::1] "
        f"nvme-tcp://h /{NQN} /{NQN}x ?nsid=2 &path=10.0.0.1 &path=h &dhchap_key=x &hostnqn={NQN} "
        "&tls_psk=y &hdgst=1 :9".split()
    ),
    max_size=8,
).map("".join)


def both_follow(c: ctypes.CDLL, recorded: str, uris: tuple[str, ...]) -> None:
    try:
        expected: DeviceUri | None = parse_uri(follow(recorded, uris, open_device)[0])
    except RefusedError:
        expected = None
    try:
        found: DeviceUri | None = follow_in_c(c, recorded, uris)
    except (RefusedError, UsageError, NotImplementedError):
        found = None
    assert found == expected


@given(PLACES, st.permutations(GIVEN).map(tuple), st.integers(0, 3))
@example(f"nvme-tcp://h/{NQN}?nsid=2&path=[0:0::1]&tls_psk=y", GIVEN, 3)
@example("/data/x/../v1", GIVEN, 3)
@settings(max_examples=600)
def test_both_follow_a_device_to_the_same_places(
    c: ctypes.CDLL, recorded: str, given: tuple[str, ...], count: int
) -> None:
    both_follow(c, recorded, given[:count])


def test_both_follow_the_links_of_given_names_alone(c: ctypes.CDLL, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "root").symlink_to("/")
    for name, uri in (("x", "link/v0"), ("link/x", "v0"), ("x", "root/v0"), ("x", "none/v0")):
        both_follow(c, f"{tmp_path}/{name}", (f"{tmp_path}/{uri}",))
    assert follow_in_c(c, "/x", (f"{tmp_path}/root/v0",)) == parse_uri("/x")


# ---- the host ------------------------------------------------------------------------------------

ID = "6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a"
OTHER = "0d1f4b7a-0c2f-4f0a-9d0e-2f6f6d1f4b7a"
MACHINE = "0123456789abcdef0123456789abcdef"
FORM = "nqn.2014-08.org.nvmexpress:uuid:"


@pytest.mark.parametrize(
    "files",
    [
        {"machine-id": MACHINE},
        {"machine-id": f"{MACHINE}\n"},
        {},
        {"machine-id": "uninitialized\n"},
        {"nvme/hostid": f"{ID}\n"},
        {"nvme/hostid": f"{ID}\n", "machine-id": MACHINE},
        {"nvme/hostnqn": f"{FORM}{OTHER}\n", "nvme/hostid": f"{ID}\n"},
        {"nvme/hostnqn": "nqn.2024-01.org.example:trainer\n", "nvme/hostid": f"{ID}\n"},
        {"nvme/hostnqn": "nqn.2024-01.org.example:trainer\n", "machine-id": MACHINE},
        {"nvme/hostnqn": f"  {FORM}{ID.upper()} \r\nmore\n"},
        {"nvme/hostnqn": f"{FORM}{ID}", "nvme/hostid": ID.replace("-", ""), "machine-id": MACHINE},
        {"nvme/hostnqn": f"{FORM}{ID}", "nvme/hostid": f"{{{ID}}}"},
        {"nvme/hostnqn": "nqn.2024-01." + "x" * 300, "machine-id": MACHINE},
        {"nvme/hostnqn": "nqn.2024-01." + "x" * 2000, "machine-id": MACHINE},
        {"nvme/hostnqn": "nqn.2024-01." + "x" * 211, "machine-id": MACHINE},
        {"nvme/hostnqn": "\xff", "nvme/hostid": "hello", "machine-id": MACHINE},
    ],
)
def test_this_host_is_the_one_that_python_says(
    c: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    (tmp_path / "nvme").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    files = host.HostFiles(
        tmp_path / "nvme/hostnqn", tmp_path / "nvme/hostid", tmp_path / "machine-id"
    )
    monkeypatch.setattr(host, "_FILES", files)
    for nqn in (None, f"{FORM}{OTHER}", "nqn.2024-01.org.example:trainer", f"{FORM}{ID}"):
        for own in (None, UUID(OTHER)):
            try:
                expected = host.host_identity(nqn, own)
            except UsageError:
                expected = None
            assert read_host(c, tmp_path, nqn, own) == expected


def read_host(
    c: ctypes.CDLL, folder: Path, nqn: str | None, own: UUID | None
) -> tuple[str, UUID] | None:
    """Return what libdlfs takes this host for; None if it has no identity."""
    got, message = HostIdentity(), create_string_buffer(MESSAGE_BYTES)
    code = c.host_identity_read(
        os.fsencode(folder),
        None if nqn is None else nqn.encode(),
        None if own is None else own.bytes,
        byref(got),
        message,
        MESSAGE_BYTES,
    )
    assert (code, code < 0) in ((0, False), (-errno.EINVAL, bool(message.value)))
    return None if code < 0 else (got.nqn.decode(), UUID(bytes=bytes(got.id)))
