"""A folder that behaves like nvmet's configfs, as far as recipes use it.

``mkdir`` and ``rmdir`` stand before the real ones on the PATH: the first makes a node's attributes
and inner folders, as the kernel does, the second removes a node that holds nothing. A test with
the real kernel is in tests/nvmet. ``keyctl`` and ``pidof`` stand for the kernel's keyring of TLS
keys and for tlshd, which that kernel lacks.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_NODES = {
    "hosts": (("dhchap_key", "dhchap_ctrl_key", "dhchap_hash", "dhchap_dhgroup"), ()),
    "ports": (
        ("addr_adrfam", "addr_trtype", "addr_traddr", "addr_trsvcid", "addr_tsas"),
        ("subsystems", "referrals"),
    ),
    "subsystems": (("attr_allow_any_host", "attr_model"), ("namespaces", "allowed_hosts")),
    "namespaces": (("device_path", "device_uuid", "enable", "revalidate_size"), ()),
}
"""Attributes and inner folders of a node, by the name of the folder that it is made in."""


def _tools() -> dict[str, str]:
    cases = ""
    for parent, (attributes, folders) in _NODES.items():
        made = "".join(
            f'echo {"" if name.endswith("_key") else "0"} >"$1/{name}"; ' for name in attributes
        )
        made += "".join(f'/bin/mkdir "$1/{name}"; ' for name in folders)
        cases += f"*/{parent}/*) {made};;\n" if made else f"*/{parent}/*) ;;\n"
    # The innermost parent decides: subsystems/NQN/namespaces/1 is a namespace.
    order = "\n".join(reversed(cases.strip().split("\n")))
    return {
        "mkdir": f'#!/bin/sh\n[ -d "${{1%/*}}" ] && /bin/mkdir "$1" || exit 1\n'
        f'case "$1" in\n{order}\nesac\n',
        "rmdir": "#!/bin/sh\n"
        '[ -z "$(find "$1" -mindepth 2)" ] || exit 1  # it holds a node or a link\n'
        '[ -z "$(find "$NVMET_CONFIGFS" -lname "$1")" ] || exit 1  # or is linked to\n'
        'rm -r "$1"\n',
        "pidof": '#!/bin/sh\n[ "$1" = tlshd ]\n',
        "keyctl": _KEYCTL,
    }


_KEYCTL = """#!/bin/sh
cd "$NVMET_CONFIGFS/../keyring"
case $1 in
padd) number=$(date +%s%N); cat >$number; echo "$2;0;0;3f010000;$3" >$number.text; echo $number ;;
rlist) ls | grep -v text | xargs ;;
rdescribe) cat "$2.text" ;;
unlink) rm "$2" "$2.text" ;;
esac
"""


@dataclass(frozen=True)
class Done:
    """The exit code and output of a script."""

    code: int
    out: str


class FakeConfigfs:
    """A folder that behaves like configfs, and the runs of scripts in it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "nvmet"
        self._tools = folder / "bin"
        self._tools.mkdir()
        self._keyring = folder / "keyring"
        self._keyring.mkdir()
        for name in ("hosts", "ports", "subsystems"):
            (self.root / name).mkdir(parents=True)
        for name, text in _tools().items():
            (self._tools / name).write_text(text)
            (self._tools / name).chmod(0o755)

    def environment(self, other: Mapping[str, str]) -> dict[str, str]:
        """Environment of a shell in which the folder stands for configfs."""
        path = f"{self._tools}:{other['PATH']}"
        return {**other, "PATH": path, "NVMET_CONFIGFS": str(self.root)}

    def run(self, script: str, verb: str) -> Done:
        """Run a verb of a recipe."""
        done = subprocess.run(
            ["sh", "-s", verb],
            input=script,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(os.environ),
        )
        return Done(done.returncode, done.stdout)

    def tls_keys(self) -> dict[str, bytes]:
        """Return the secrets of the keyring by their identities."""
        return {
            path.read_text().strip().split(";")[-1]: path.with_suffix("").read_bytes()
            for path in self._keyring.glob("*.text")
        }

    def content(self) -> dict[str, str]:
        """Return attribute values, link targets and nodes (empty text) by path."""
        found = {}
        for path in self.root.rglob("*"):
            name = str(path.relative_to(self.root))
            if path.is_symlink():
                found[name] = "-> " + os.path.relpath(os.readlink(path), self.root)
            else:
                found[name] = path.read_text().rstrip("\n") if path.is_file() else ""
        return found
