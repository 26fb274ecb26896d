"""Recipes: refused arguments, quoting, and their changes to a folder like configfs."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlfs.errors import UsageError
from dlfs.fabric.keys import KeyKind, generate_key
from dlfs.fabric.recipes import (
    DISCOVERY_NQN,
    Export,
    nvmet_script,
    nvmetcli_json,
    spdk_script,
)
from tests.support.nvme.tls import psk_of
from tests.unit.fabric.configfs import FakeConfigfs

HOST = "nqn.2024-01.org.example:trainer"
OTHER_HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-1111-1111-111111111111"
NQN = "nqn.2024-01.org.example:storage-a"


def export_of(device: Path | str, /, **changes) -> Export:
    return Export(
        **{
            "device": str(device),
            "address": "10.0.0.11",
            "allowed_hosts": (HOST, OTHER_HOST),
            "nqn": NQN,
            **changes,
        }
    )


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / 'a disk\'s \\n "image" $(reboot)'
    path.write_bytes(bytes(4096))
    return path


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "disk.img"}, "absolute path"),
        ({"device": "/dev/x\ny"}, "printable"),
        ({"device": "/" + "x" * 4096}, "at most 4095"),
        ({"address": "storage-a"}, "IP address"),
        ({"address": "0.0.0.0"}, "one address"),
        ({"address": "::"}, "one address"),
        ({"address": "fe80::1%eth0"}, "one address"),
        ({"address": "224.0.0.1"}, "one address"),
        ({"allowed_hosts": ()}, "each host that may connect"),
        ({"allowed_hosts": ("trainer",)}, "expected an NQN"),
        ({"allowed_hosts": (f"{HOST} $(reboot)",)}, "expected an NQN"),
        ({"nqn": "nqn.2024-01.org.example:a/../b"}, "expected an NQN"),
        ({"nqn": "nqn.2014-08.org.nvmexpress.discovery"}, "expected an NQN"),
        ({"nqn": NQN + "x" * 223}, "at most 223"),
        ({"port": 0}, "1..65535"),
        ({"discovery_port": 65536}, "1..65535"),
    ],
)
def test_refuses(changes: dict, says: str) -> None:
    with pytest.raises(UsageError, match="make a recipe") as caught:
        export_of("/dev/x", **changes)
    assert says in str(caught.value)


def test_nvmetcli_has_a_highest_port() -> None:
    assert "9000" in nvmet_script(export_of("/dev/x", port=9000))
    with pytest.raises(UsageError, match="8192"):
        nvmetcli_json(export_of("/dev/x", port=9000))


def test_names_are_generated_by_default() -> None:
    made = {export_of("/dev/x", nqn="", address=address).nqn for address in ("10.0.0.1", "fd00::1")}
    assert len(made) == 2
    for nqn in made:
        UUID(nqn.removeprefix("nqn.2014-08.org.nvmexpress:uuid:"))
    assert export_of("/dev/x").uuid == export_of("/dev/y").uuid != export_of("/x", nqn="").uuid
    assert export_of("/dev/x", address="fd00::1").family == "ipv6"


def test_spdk_needs_its_target(tmp_path: Path) -> None:
    export = spdk_script(export_of("/dev/null"))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    (tmp_path / "spdk-rpc").write_text("#!/bin/sh\nexit 1\n")
    for mode, reason in ((0o644, "spdk-rpc is not installed"), (0o755, "no nvmf_tgt answers at")):
        (tmp_path / "spdk-rpc").chmod(mode)
        for verb in ("verify", "undo"):
            done = subprocess.run(
                ["sh", "-s", verb], input=export, capture_output=True, text=True, env=environment
            )
            assert (done.returncode, reason in done.stderr) == (1, True)


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=40))
@settings(max_examples=30)
def test_settings_are_quoted(name: str) -> None:
    """The shell reads the device's path unchanged, with any characters."""
    path = f"/dev/{name}"
    try:
        export = export_of(path)
    except UsageError:
        assert not path.isprintable()
        return
    for script in (nvmet_script(export), spdk_script(export)):
        head = script[: script.index("\n# ---", script.index("settings"))]
        done = subprocess.run(
            ["sh", "-s"], input=f'{head}\nprintf %s "$device"', capture_output=True, text=True
        )
        assert (done.stdout, done.stderr) == (path, "")


@pytest.mark.parametrize("script", [nvmet_script, spdk_script])
def test_a_verb_is_needed(script, configfs: FakeConfigfs) -> None:
    for verb in ("", "stop", "fail"):
        done = configfs.run(script(export_of("/dev/x")), verb)
        assert done.code == 1
        assert "expected start, verify, rotate or undo" in done.out


# ---- the kernel's target -------------------------------------------------------------------------


def test_start_verify_undo(configfs: FakeConfigfs, device: Path) -> None:
    empty = configfs.content()
    script = nvmet_script(export_of(device))
    assert "is not exported" in configfs.run(script, "verify").out
    started = configfs.run(script, "start")
    assert started.code == 0, started.out
    assert sorted(started.out.splitlines()[1:]) == sorted((HOST, OTHER_HOST))
    content = configfs.content()
    assert content[f"subsystems/{NQN}/attr_allow_any_host"] == "0"
    assert content[f"subsystems/{NQN}/namespaces/1/device_path"] == str(device)
    assert configfs.run(script, "verify") == started
    again = configfs.run(script, "start")
    assert (again.code, configfs.content()) == (1, content)
    assert "exported already" in again.out
    assert configfs.run(script, "undo").code == 0
    assert configfs.content() == empty
    assert configfs.run(script, "undo").code == 0


def test_exports_share_ports_and_hosts(configfs: FakeConfigfs, device: Path) -> None:
    first = nvmet_script(export_of(device))
    second = nvmet_script(export_of(device, nqn="", allowed_hosts=(HOST,)))
    assert configfs.run(first, "start").code == 0
    content = configfs.content()
    assert configfs.run(second, "start").code == 0
    assert configfs.run(second, "undo").code == 0
    assert configfs.content() == content
    assert configfs.run(second, "start").code == 0
    assert configfs.run(first, "undo").code == 0
    assert configfs.run(second, "verify").code == 0
    assert f"hosts/{OTHER_HOST}" not in configfs.content()


def test_a_start_that_fails_is_undone(configfs: FakeConfigfs, device: Path) -> None:
    assert configfs.run(nvmet_script(export_of(device)), "start").code == 0
    content = configfs.content()
    elsewhere = nvmet_script(export_of(device, nqn="", address="10.0.0.12"))
    done = configfs.run(elsewhere, "start")
    assert done.code == 1
    assert "port 4420 is in use at 10.0.0.11" in done.out
    assert configfs.content() == content


def test_keys_are_demanded_and_rotated(
    configfs: FakeConfigfs, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys of hosts"
    keys.mkdir()
    monkeypatch.setattr("dlfs.fabric.recipes.KEYS", str(keys))
    script = nvmet_script(export_of(device, auth=True))
    empty = configfs.content()
    missing = configfs.run(script, "start")
    assert (missing.code, "there is no such key" in missing.out) == (1, True)
    assert configfs.content() == empty
    texts = {name: generate_key() for name in (HOST, OTHER_HOST, NQN)}
    for name, text in texts.items():
        (keys / name).write_text(text + "\n")
    exposed = configfs.run(script, "start")
    assert (exposed.code, "chmod 0600" in exposed.out) == (1, True)
    for name in texts:
        (keys / name).chmod(0o600)
    started = configfs.run(script, "start")
    assert started.code == 0, started.out
    assert not any(text in started.out for text in texts.values())
    assert configfs.content()[f"hosts/{HOST}/dhchap_key"] == texts[HOST]
    assert configfs.content()[f"hosts/{OTHER_HOST}/dhchap_ctrl_key"] == texts[NQN]
    (keys / HOST).write_text(new := generate_key(hash_id=3))
    assert configfs.run(script, "rotate").code == 0
    assert configfs.content()[f"hosts/{HOST}/dhchap_key"] == new
    (keys / HOST).write_text("DHHC-1:00:AAAA:")  # which the kernel would accept
    damaged = configfs.run(script, "rotate")
    assert (damaged.code, "no DHHC-1 key" in damaged.out) == (1, True)
    assert configfs.content()[f"hosts/{HOST}/dhchap_key"] == new
    assert configfs.run(script, "undo").code == 0
    assert configfs.content() == empty


def test_a_recipe_without_keys_rotates_none(configfs: FakeConfigfs, device: Path) -> None:
    assert "demands no keys" in configfs.run(nvmet_script(export_of(device)), "rotate").out
    with pytest.raises(UsageError, match="nvmetcli does not set keys"):
        nvmetcli_json(export_of(device, auth=True))
    with pytest.raises(UsageError, match="nvmetcli does not set keys"):
        nvmetcli_json(export_of(device, tls=True))


def test_tls_keys_are_demanded_and_rotated(
    configfs: FakeConfigfs, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    monkeypatch.setattr("dlfs.fabric.recipes.KEYS", str(keys))

    def store(host: str, hash_id: int) -> None:
        path = keys / f"{host}.tls"
        path.touch(0o600)
        path.write_text(generate_key(KeyKind.TLS, hash_id=hash_id))

    def expected(*hosts: str, nqns: tuple[str, ...] = (NQN, DISCOVERY_NQN)) -> dict[str, bytes]:
        found = {}
        for host in hosts:
            _, kind, encoded, _ = (keys / f"{host}.tls").read_text().split(":")
            key = base64.b64decode(encoded)[:-4]
            for nqn in nqns:
                psk = psk_of(key, int(kind), host, nqn, version=1)
                found[psk.identity.decode()] = psk.key
        return found

    script = nvmet_script(export_of(device, tls=True))
    empty = configfs.content()
    store(HOST, 1)
    missing = configfs.run(script, "start")
    assert (missing.code, f"{OTHER_HOST}.tls: there is no such key" in missing.out) == (1, True)
    assert (configfs.content(), configfs.tls_keys()) == (empty, {})
    store(OTHER_HOST, 2)
    started = configfs.run(script, "start")
    assert started.code == 0, started.out
    assert configfs.tls_keys() == expected(HOST, OTHER_HOST)
    for port in (4420, 8009):
        assert configfs.content()[f"ports/{port}/addr_tsas"] == "tls1.3"
    plain = nvmet_script(export_of(device, nqn=f"{NQN}-plain"))
    assert "port 4420 is in use by exports with TLS" in configfs.run(plain, "start").out
    second = nvmet_script(export_of(device, nqn=f"{NQN}-2", allowed_hosts=(HOST,), tls=True))
    assert configfs.run(second, "start").code == 0
    store(HOST, 2)
    assert configfs.run(script, "rotate").code == 0
    assert configfs.run(second, "rotate").code == 0
    assert configfs.tls_keys() == expected(HOST, OTHER_HOST) | expected(HOST, nqns=(f"{NQN}-2",))
    damaged = (keys / f"{HOST}.tls").read_text()
    (keys / f"{HOST}.tls").write_text(damaged[:20] + "AAAA" + damaged[24:])
    rotated = configfs.run(script, "rotate")
    assert (rotated.code, "its CRC does not match" in rotated.out) == (1, True)
    assert damaged[16:40] not in rotated.out
    (keys / f"{HOST}.tls").write_text(damaged)
    assert configfs.run(script, "undo").code == 0
    assert configfs.tls_keys() == expected(HOST, nqns=(f"{NQN}-2", DISCOVERY_NQN))
    assert configfs.run(second, "undo").code == 0
    assert (configfs.content(), configfs.tls_keys()) == (empty, {})
    assert configfs.run(plain, "start").code == 0
    assert "port 4420 is in use by exports without TLS" in configfs.run(second, "start").out


def mounted_disks() -> list[Path]:
    """Return the mounted disks of this machine that have a node in /dev, also by partition."""
    numbers = {line.split()[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    blocks = [Path(f"/sys/dev/block/{number}").resolve() for number in numbers]
    names = [block.name for block in blocks] + [block.parent.name for block in blocks]
    return [path for path in (Path("/dev", name) for name in names) if path.is_block_device()]


def test_a_device_that_is_missing_or_in_use_is_refused(configfs: FakeConfigfs) -> None:
    empty = configfs.content()
    done = configfs.run(nvmet_script(export_of("/no/such/disk")), "start")
    assert (done.code, "no such block device" in done.out) == (1, True)
    for disk in mounted_disks():
        done = configfs.run(nvmet_script(export_of(disk)), "start")
        assert (done.code, f"{disk}: this machine uses" in done.out) == (1, True)
    assert configfs.content() == empty


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("attr_allow_any_host", "1", "any host may connect"),
        ("namespaces/1/enable", "0", "not enabled"),
        ("namespaces/1/device_path", "/dev/null", "another device"),
        (f"allowed_hosts/{HOST}", None, "may not connect"),
        (f"../../ports/8009/subsystems/{NQN}", None, "nothing listens at port 8009"),
    ],
)
def test_verify_reports_changes(
    configfs: FakeConfigfs, device: Path, name: str, value: str | None, says: str
) -> None:
    script = nvmet_script(export_of(device))
    assert configfs.run(script, "start").code == 0
    path = configfs.root / "subsystems" / NQN / name
    path.unlink() if value is None else path.write_text(value)
    done = configfs.run(script, "verify")
    assert (done.code, says in done.out) == (1, True)
    assert configfs.run(script, "undo").code == 0


def test_reservations_where_the_kernel_has_them(configfs: FakeConfigfs, device: Path) -> None:
    mkdir = configfs.root.parent / "bin" / "mkdir"
    mkdir.write_text(
        mkdir.read_text().replace('echo 0 >"$1/enable"', 'echo 0 >"$1/enable"; >"$1/resv_enable"')
    )
    assert configfs.run(nvmet_script(export_of(device)), "start").code == 0
    assert configfs.content()[f"subsystems/{NQN}/namespaces/1/resv_enable"] == "1"


# ---- nvmetcli ------------------------------------------------------------------------------------


def interpret(config: dict) -> dict[str, str]:
    """Return the attributes and links that ``nvmetcli restore`` creates from a configuration."""
    made: dict[str, str] = {}

    def attributes(place: str, node: dict, *groups: str) -> None:
        for group in groups:
            for name, value in node.get(group, {}).items():
                made[f"{place}/{group}_{name}"] = value
        if "enable" in node:
            made[f"{place}/enable"] = str(node["enable"])

    for host in config["hosts"]:
        made[f"hosts/{host['nqn']}"] = ""
    for subsystem in config["subsystems"]:
        place = f"subsystems/{subsystem['nqn']}"
        for namespace in subsystem["namespaces"]:
            attributes(f"{place}/namespaces/{namespace['nsid']}", namespace, "device")
        for host in subsystem["allowed_hosts"]:
            made[f"{place}/allowed_hosts/{host}"] = f"-> hosts/{host}"
        attributes(place, subsystem, "attr")
    for port in config["ports"]:
        place = f"ports/{port['portid']}"
        attributes(place, port, "addr")
        for nqn in port["subsystems"]:
            made[f"{place}/subsystems/{nqn}"] = f"-> subsystems/{nqn}"
    return made


def test_nvmetcli_restores_what_the_script_does(configfs: FakeConfigfs, device: Path) -> None:
    empty = configfs.content()
    export = export_of(device)
    assert configfs.run(nvmet_script(export), "start").code == 0
    content = configfs.content()
    written = {
        name: value
        for name, value in content.items()
        if name not in empty and (value or name.startswith("hosts/"))
        # recipes without keys leave these alone
        if "/dhchap_" not in name
        and not name.endswith(("/attr_model", "/revalidate_size", "/addr_tsas"))
    }
    assert interpret(json.loads(nvmetcli_json(export))) == written
