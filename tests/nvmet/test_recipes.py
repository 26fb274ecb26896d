"""Recipes for nvmet, on the real kernel: configfs accepts what they write, in their order."""

from __future__ import annotations

import pytest

from dlfs.fabric.keys import KeyKind, generate_key
from dlfs.fabric.recipes import Export, nvmet_script
from tests.nvmet.guest import run_in_guest

HOST = "nqn.2024-01.org.example:trainer"
KEY = generate_key(KeyKind.TLS)
NQN = "nqn.2024-01.org.example:storage"

SCRIPT = f"""
nvmet=/sys/kernel/config/nvmet
listeners() {{ netstat -ltn | grep -c '127.0.0.1:\\(4420\\|8009\\) '; }}
set -e
find $nvmet | sort >before
sh /first.sh start
cd $nvmet/subsystems/{NQN}
cat attr_allow_any_host namespaces/1/device_path namespaces/1/device_uuid namespaces/1/enable
ls allowed_hosts
cd /tmp
listeners
! sh /first.sh start 2>&1
sh /first.sh verify
sh /second.sh start >/dev/null
sh /first.sh undo
! sh /first.sh verify 2>&1
sh /second.sh verify >/dev/null
listeners
! sh /elsewhere.sh start 2>&1
sh /second.sh undo
mkswap /dev/ram1 >/dev/null
swapon /dev/ram1
! sh /second.sh start 2>&1
swapoff /dev/ram1
! sh /tls.sh start 2>&1
# The guest has no tlshd, no keyctl and no Python: of TLS, only the ports are real.
for tool in keyctl python3 tlshd; do
    printf '#!/bin/sh\n[ $0 != /bin/tlshd ] || sleep 1000\n' >/bin/$tool
    chmod +x /bin/$tool
done
/bin/tlshd &
umask 077
mkdir -p /etc/dlfs/keys
echo '{KEY}' >'/etc/dlfs/keys/{HOST}.tls'
sh /tls.sh start >/dev/null
cat $nvmet/ports/4431/addr_tsas $nvmet/ports/4431/addr_treq
sh /tls.sh undo
! listeners
find $nvmet | sort | diff before -
"""


@pytest.mark.qemu
def test_start_verify_undo() -> None:
    first = Export(device="/dev/ram0", address="127.0.0.1", allowed_hosts=(HOST,), nqn=NQN)
    second = Export(device="/dev/ram1", address="127.0.0.1", allowed_hosts=(HOST,))
    # No interface has this address: the kernel refuses the port, and start undoes everything.
    elsewhere = Export(device="/dev/ram0", address="10.9.9.9", allowed_hosts=(HOST,), port=4421)
    tls = Export(
        device="/dev/ram1", address="127.0.0.1", allowed_hosts=(HOST,), port=4431, tls=True
    )
    result = run_in_guest(
        SCRIPT,
        files={
            f"{name}.sh": nvmet_script(export).encode()
            for name, export in {
                "first": first,
                "second": second,
                "elsewhere": elsewhere,
                "tls": tls,
            }.items()
        },
    )
    assert result.code == 0, result.output
    output = f"exported /dev/ram0 as {NQN} at 127.0.0.1, ports 4420 8009, to:\n{HOST}\n"
    assert result.output == (
        f"{output}0\n/dev/ram0\n{first.uuid}\n1\n{HOST}\n2\n"
        f"export.sh: {NQN} is exported already; undo it first\n"
        f"{output}export.sh: {NQN} is not exported\n2\n"
        "ln: /sys/kernel/config/nvmet/ports/4421/subsystems/"
        f"{elsewhere.nqn}: Cannot assign requested address\n"
        "export.sh: /dev/ram1: this machine uses ram1\n"
        "export.sh: TLS needs keyctl on this machine\ntls1.3\nrequired\n0\n"
    )
