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


def incoming(
    mountpoint: Annotated[
        str, typer.Argument(metavar="DIR", help="Mount point of 'dlfs mount --incoming'.")
    ],
    discard: Annotated[
        str | None, typer.Option(metavar="NAME", help="Delete this directory, with all its files.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the data in DIR/incoming, which is lost unless it is sealed."""
    from dlfs.format.names import INCOMING
    from dlfs.mount import incoming_client

    if discard is not None:
        incoming_client.discard(mountpoint, discard)
        note(f"discarded {discard}")
        return
    found = incoming_client.list_incoming(mountpoint)
    if json:
        print_json(
            {
                "incoming": [
                    {
                        "name": json_path(one.name),
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
        note(f"nothing is in {os.path.join(mountpoint, INCOMING)}")
        return
    titles = ("name", "files", "size", "since", "state")
    rows = Table(*titles, right=("files", "size"), drop=("since",))
    for one in found:
        error = one.status.error
        state = one.status.state if error is None else f"not sealed: {as_typed(error, 'seal')}"
        since = human_date(datetime.fromtimestamp(one.contents.since, UTC))
        rows.add_row(
            os.fsdecode(one.name),
            human_count(one.contents.files),
            human_size(one.contents.file_bytes),
            since,
            state,
        )
    print_data(rows)
