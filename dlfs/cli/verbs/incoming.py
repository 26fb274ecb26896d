"""``dlfs incoming``: lists the data that was written to a mount and is not sealed."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Annotated

import typer

from dlfs.cli.options import JsonOption, as_typed
from dlfs.cli.output import (
    Table,
    human_count,
    human_date,
    human_size,
    json_path,
    note,
    print_data,
    print_json,
)
from dlfs.cli.staging import TargetArgument, connect_incoming


def incoming(
    target: TargetArgument,
    discard: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    json: JsonOption = False,
) -> None:
    """List the data in DIR/incoming, which is lost unless it is sealed.

    Args:
        discard: Delete this directory, with all its files.

    Examples:
        dlfs incoming mnt
        dlfs incoming mnt --discard pets
    """
    from dlfs.format.names import INCOMING, dataset_name_bytes
    from dlfs.staging import client

    if discard is not None:
        raw = dataset_name_bytes(discard)
        client.discard(connect_incoming(target, f"discard {discard!r}"), raw)
        note(f"discarded {discard}")
        return
    found = client.list_incoming(connect_incoming(target, "list the staged datasets"))
    if json:
        print_json(
            {
                "incoming": [
                    {
                        "name": json_path(os.fsencode(one.name)),
                        "files": one.contents.files,
                        "bytes": one.contents.file_bytes,
                        "since": datetime.fromtimestamp(one.contents.since, UTC),
                        "state": one.status.state,
                        "error": one.status.error,
                    }
                    for one in found
                ]
            }
        )
        return
    if not found:
        note(f"nothing is in {os.path.join(target, INCOMING)}")
        return
    titles = ("name", "files", "size", "since", "state")
    rows = Table(*titles, right=("files", "size"), drop=("since",))
    for one in found:
        error = one.status.error
        state = one.status.state if error is None else f"not sealed: {as_typed(error, 'seal')}"
        since = human_date(datetime.fromtimestamp(one.contents.since, UTC))
        rows.add_row(
            one.name,
            human_count(one.contents.files),
            human_size(one.contents.file_bytes),
            since,
            state,
        )
    print_data(rows)
