"""``dlfs key``: files with the right modes, and no key in any output."""

from __future__ import annotations

import base64
import hmac
import json
import os
from pathlib import Path

import pytest

from dlfs.fabric.keys import KeyKind, check_key, generate_key, key_directory, list_keys
from tests.support.nvme.tls import key_text, psk_of

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep keys in a directory of the test, which does not exist yet."""
    folder = tmp_path / "a" / "keys"
    monkeypatch.setenv("DLFS_KEYS", str(folder))
    return folder


@pytest.mark.parametrize(("options", "kind", "bits"), [
    ((), KeyKind.DHCHAP, 256),
    (("--hash", 3), KeyKind.DHCHAP, 512),
    (("--tls", "--hash", 2), KeyKind.TLS, 384),
])  # fmt: skip
def test_generate(
    run, directory: Path, options: tuple[object, ...], kind: KeyKind, bits: int
) -> None:
    done = run("key", "generate", "trainer", *options)
    path = directory / "trainer"
    assert (done.code, done.out.decode()) == (0, f"{path}\n")
    text = path.read_text().strip()
    assert check_key(text) == (kind, bits)
    assert text.split(":")[2] not in done.out.decode() + done.err
    assert (directory.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert [entry.name for entry in directory.iterdir()] == ["trainer"]


def test_a_key_is_replaced_on_request_only(run, directory: Path) -> None:
    assert run("key", "generate", "trainer").code == 0
    before = (directory / "trainer").read_text()
    done = run("key", "generate", "trainer")
    assert done.code == 1
    assert "--replace" in done.err
    assert (directory / "trainer").read_text() == before
    assert run("key", "generate", "trainer", "--replace").code == 0
    assert (directory / "trainer").read_text() != before


@pytest.mark.parametrize(("hash_id", "name"), [(1, "sha256"), (2, "sha384"), (3, "sha512")])
def test_a_derived_key(run, directory: Path, tmp_path: Path, hash_id: int, name: str) -> None:
    text = generate_key(hash_id=hash_id)
    (tmp_path / "cluster").write_text(text)
    for job in ("job-7", "job-8"):
        done = run("key", "import", job, tmp_path / "cluster", "--derive", job)
        assert (done.code, done.out.decode()) == (0, f"{directory / job}\n")
        made = (directory / job).read_text()
        assert check_key(made) == check_key(text)
        secret = base64.b64decode(text.split(":")[2])[:-4]
        expected = hmac.new(secret, job.encode(), name).digest()
        assert base64.b64decode(made.split(":")[2])[:-4] == expected


def test_import_from_a_file(run, directory: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    text = generate_key(hash_id=2)
    source.write_text(text + "\n")
    assert run("key", "import", "node", source).code == 0
    assert (directory / "node").read_text() == text, "SPDK refuses a line feed at the end"


@pytest.mark.parametrize("change", [
    lambda text: text[:-1], lambda text: text[1:], lambda text: text.replace(":01:", ":02:"),
    lambda text: text[:12] + ("A" if text[12] != "A" else "B") + text[13:],
    lambda text: text[:20] + "!" + text[21:], lambda _text: "", lambda _text: "\u00e9",
    lambda _text: key_text(bytes(48), 2).replace("g==:", "h==:"),  # bits that no byte has
])  # fmt: skip
def test_a_malformed_key_is_refused_and_not_shown(
    run, directory: Path, tmp_path: Path, change
) -> None:
    source = tmp_path / "source"
    text = generate_key()
    source.write_text(change(text))
    done = run("key", "import", "node", source)
    assert done.code == 2
    assert text.split(":")[2][1:-1] not in done.err
    assert not (directory / "node").exists()


def test_a_key_as_an_argument_is_not_shown(run, directory: Path) -> None:
    text = generate_key()
    for arguments in (("node", text), (text, "-")):
        done = run("key", "import", *arguments)
        assert done.code == 2
        assert text.split(":")[2] not in done.out.decode() + done.err
    assert not directory.exists()


@pytest.mark.parametrize("name", ["../node", ".node", "a b", "", "x" * 65])
def test_a_malformed_name_is_refused(run, name: str) -> None:
    assert run("key", "generate", name).code == 2


def test_list_names_what_would_be_refused(run, directory: Path) -> None:
    assert run("key", "list").code == 3
    for name in ("fine", "open", "damaged"):
        assert run("key", "generate", name).code == 0
    (directory / "open").chmod(0o644)
    (directory / "damaged").write_text("DHHC-1:00:AAAA:")
    (directory / "folder").mkdir()
    found = {one.name: one.problem for one in list_keys()}
    assert found["fine"] == ""
    assert "chmod 0600" in found["open"]
    assert "length" in found["damaged"]
    assert found["folder"] == "not a regular file"
    done = run("key", "list", "--json")
    listed = json.loads(done.out)
    assert listed["directory"] == str(key_directory())
    assert {one["name"]: one["bits"] for one in listed["keys"]}["fine"] == 256
    assert "fine" in run("key", "list").out.decode()
    secret = (directory / "fine").read_text().split(":")[2]
    assert secret not in done.out.decode()


def test_list_has_the_directories_of_libdlfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty DLFS_KEYS is as none. The user's directory comes before the system's."""
    own, system = tmp_path / ".config" / "dlfs" / "keys", tmp_path / "etc"
    monkeypatch.setenv("DLFS_KEYS", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("dlfs.fabric.keys.SYSTEM_DIRECTORY", system)
    for folder, names in ((own, ("b", "both")), (system, ("a", "both"))):
        folder.mkdir(mode=0o700, parents=True)
        for name in names:
            (folder / name).touch(0o600)
            (folder / name).write_text(generate_key())
    found = [(one.directory, one.name, one.problem) for one in list_keys()]
    assert found == [
        (own, "b", ""), (own, "both", ""), (system, "a", ""),
        (system, "both", f"{own} has one of that name"),
    ]  # fmt: skip


@pytest.mark.parametrize("hash_number", [0, 1, 2])
def test_identity(run, directory: Path, hash_number: int) -> None:
    key = bytes(range(48 if hash_number == 2 else 32))
    directory.mkdir(parents=True, mode=0o700)
    (directory / "psk").write_text(key_text(key, hash_number))
    host, nqn = "nqn.2024-01.org.example:trainer", "nqn.2024-01.org.example:storage"
    done = run("key", "identity", "psk", "--subsystem", nqn, "--hostnqn", host)
    expected = [
        psk_of(key, hash_number, host, nqn, version=version).identity.decode() for version in (1, 0)
    ]
    assert (done.code, done.out.decode().splitlines()) == (0, expected)


def test_identity_of_another_kind_of_key(run) -> None:
    assert run("key", "generate", "trainer").code == 0
    done = run("key", "identity", "trainer", "-n", "nqn.2024-01.org.example:storage")
    assert (done.code, done.out) == (2, b"")
    assert "expected a key NVMeTLSkey-1, got DHHC-1" in done.err
    assert run("key", "identity", "none", "-n", "nqn.2024-01.org.example:storage").code == 3


@pytest.mark.root
@pytest.mark.parametrize("whole", [False, True])
def test_a_key_of_another_user_is_a_problem(run, directory: Path, whole: bool) -> None:
    assert run("key", "generate", "trainer").code == 0
    place = directory if whole else directory / "trainer"
    os.chown(place, 1234, -1)
    (found,) = json.loads(run("key", "list", "--json").out)["keys"]
    assert found["problem"] == f"chown 0 {place}"
