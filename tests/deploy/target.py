"""The scripted target as a program: ``python -m tests.deploy.target ORDER``, until it is killed.

ORDER is a JSON object: the address and port to listen on, and subsystems of one namespace each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from uuid import UUID

from tests.support.nvme import Namespace, ScriptedTarget, Subsystem


def main() -> None:
    """Start the target and print a line on stdout when it serves."""
    order = json.loads(sys.argv[1])
    subsystems = [
        Subsystem(
            each["nqn"],
            [
                Namespace(
                    Path(each["path"]).stat().st_size,
                    path=Path(each["path"]),
                    identity=UUID(each["uuid"]),
                )
            ],
            hosts=each["hosts"],
        )
        for each in order["subsystems"]
    ]
    target = ScriptedTarget(subsystems, port=order["port"])
    target.addresses = [order["address"]]
    with target:
        print("listening", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
