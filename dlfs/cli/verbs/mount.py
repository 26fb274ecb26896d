"""``dlfs mount``: show a volume's datasets as files."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dlfs.cli.environment import MEMORY_VARIABLE
from dlfs.cli.options import JsonOption, VolumeArgument, parse_size
from dlfs.cli.output import log_events, note, print_json
from dlfs.errors import NotFoundError, UsageError
from dlfs.extras import install_command

FuseOption = Annotated[
    str,
    typer.Option(
        "--fuse",
        metavar="SERVER",
        help="Which server answers: 'native' (built with libfuse3: several threads of C; what is "
        "sealed only), 'pyfuse3' (the reference; the only one for --incoming), or 'auto': native "
        "where it can.",
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        envvar=MEMORY_VARIABLE,
        help="Memory for samples of open files [$DLFS_MEMORY, or 256MiB].",
    ),
]


def check_installed() -> None:
    """Refuse to go on without what a mount needs."""
    try:
        import trio  # noqa: F401
    except ImportError as error:
        raise NotFoundError(
            f"mount: trio cannot be loaded ({error}); {install_command('mount')}"
        ) from error


def _parse_mode(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError as error:
        raise UsageError(f"read a mode: expected octal digits such as 444, got {text!r}") from error


def mount(
    volume: VolumeArgument,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="An empty directory.")],
    foreground: Annotated[
        bool, typer.Option("--foreground", "-f", help="Serve here until Ctrl-C or an unmount.")
    ] = False,
    allow_other: Annotated[
        bool, typer.Option("--allow-other", help="Let other users in, as the mode permits.")
    ] = False,
    uid: Annotated[int | None, typer.Option(help="Owner of the files; you by default.")] = None,
    gid: Annotated[int | None, typer.Option(help="Group of the files; yours by default.")] = None,
    mode: Annotated[
        str, typer.Option(help="Permissions of files, octal; directories add x to r.")
    ] = "444",
    memory: MemoryOption = None,
    incoming: Annotated[
        str | None,
        typer.Option(
            metavar="SPOOL",
            help="Let programs write to DIR/incoming, for 'dlfs seal'; until then it lies in "
            "SPOOL, a directory on a local disk.",
        ),
    ] = None,
    fuse: FuseOption = "auto",
    busy_poll: Annotated[
        int,
        typer.Option(
            "--busy-poll-us",
            metavar="US",
            help="How long the native server stays awake for what is about to come, as long as one "
            "program asks: files come sooner, for more processor time. 0: not at all.",
        ),
    ] = 200,
    log: Annotated[
        str | None, typer.Option(metavar="FILE", help="Log of the server in the background.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Mount a volume: every program reads DIR/DATASET/PATH."""
    check_installed()
    from dlfs.mount.background import mount_volume
    from dlfs.mount.server import CACHE_BYTES, MountOptions, choose_server, serve

    held = parse_size(memory)
    defaults = MountOptions()
    options = MountOptions(
        uid=defaults.uid if uid is None else uid,
        gid=defaults.gid if gid is None else gid,
        file_mode=_parse_mode(mode),
        allow_other=allow_other,
        cache_bytes=CACHE_BYTES if held is None else held,
        incoming=None if incoming is None else os.path.abspath(incoming),
        fuse=fuse,
        busy_poll_us=busy_poll,
    )
    choose_server(options)  # says what is missing before anything is started
    if foreground:
        log_events()
        serve(volume, directory, options, lambda path: note(f"mounted on {path}"))
        return
    mounted = mount_volume(volume, directory, options, log=log)
    if json:
        print_json({"mountpoint": mounted.mountpoint, "pid": mounted.pid, "log": mounted.log})
    else:
        note(f"mounted on {mounted.mountpoint} (server {mounted.pid}, log: {mounted.log})")
