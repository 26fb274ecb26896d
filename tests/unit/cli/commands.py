"""All verbs of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from dlfs.cli.commands import app
from dlfs.cli.verb import Verb


def _verbs(group: Any, typed: str = "") -> Iterator[tuple[str, Verb]]:
    for name, command in group.commands.items():
        if isinstance(command, Verb):
            yield typed + name, command
        else:
            yield from _verbs(command, f"{typed}{name} ")


COMMAND: Any = typer.main.get_command(app)
VERBS = dict(_verbs(COMMAND))
"""The verbs, also those of groups, by what is typed: ``ls``, ``key list``."""
