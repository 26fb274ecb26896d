from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("pyfuse3")

import dlfs
from dlfs.base.json_records import from_json, to_json
from dlfs.errors import DeviceError, NativeError, NotFoundError, UsageError
from dlfs.mount.options import MountOptions
from dlfs.mount.supervise.background import MountRequest, absolute_uri, mount_volume, replace_server
from dlfs.mount.supervise.reporting import SYSLOG


def test_requests_survive_serialisation() -> None:
    options = MountOptions(uid=1, gid=2, file_mode=0o440, allow_other=True, cache_bytes=5)
    for log in (None, "/var/log/dlfs"):
        request = MountRequest(["/data/odd\udcff name"], "/mnt/x\n", options, log)
        assert from_json(to_json(request), MountRequest) == request


def test_options_are_checked() -> None:
    for wrong in ({"file_mode": 0o644}, {"file_mode": 0o4555}, {"uid": -1}, {"cache_bytes": -1}):
        with pytest.raises(UsageError):
            MountOptions(**wrong)  # type: ignore[arg-type]
    for wrong_us in (-1, 10_001):
        with pytest.raises(UsageError, match=f"busy polling of 0 to 10000 us, got {wrong_us}"):
            MountOptions(busy_poll_us=wrong_us)
    options = MountOptions()
    assert (options.uid, options.gid, options.file_mode) == (os.getuid(), os.getgid(), 0o444)


def test_a_server_that_ends_before_it_reads_its_request_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec <&-\nsleep 0.2\necho no such module\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    for log_bytes in (1, 1 << 20):  # more than a pipe takes: the write itself fails
        with pytest.raises(NativeError, match="the server ended early: no such module"):
            mount_volume("v.img", tmp_path, log="l" * log_bytes)


def test_uris_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        absolute_uri("a.img,/b.img,mem:64MiB") == f"{tmp_path}/a.img,/b.img,mem:64MiB?size=67108864"
    )


def test_an_error_before_there_is_a_log_is_reported_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        replace_server(tmp_path)
    assert str(raised.value).count("got nothing mounted there") == 1
    with pytest.raises(DeviceError) as missing:
        mount_volume(str(tmp_path / "volume.img"), tmp_path, log=tmp_path / "none/log")
    assert str(missing.value).count("none/log") == 1


def test_a_log_that_cannot_be_written_is_not_part_of_an_error(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    with pytest.raises(NotFoundError) as raised:
        mount_volume(str(tmp_path / "volume.img"), tmp_path / "mnt", log="/dev/full")
    assert "\n" not in str(raised.value)


@pytest.mark.fuse
@pytest.mark.parametrize("where", ["log", "state", "home"])
def test_a_log_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    uri, directory = str(tmp_path / "volume.img"), tmp_path / "mnt"
    directory.mkdir()
    dlfs.format_volume(uri, size_bytes=16 << 20)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    if where != "log":
        if SYSLOG.exists():
            pytest.skip("the default log is syslog here")
        monkeypatch.setenv("XDG_STATE_HOME" if where == "state" else "HOME", "/proc/none")
    log = "/proc/none/log" if where == "log" else None
    with pytest.raises(DeviceError, match=r"log to /proc/none/.*; --log FILE"):
        mount_volume(uri, directory, log=log)
    assert not os.path.ismount(directory)
