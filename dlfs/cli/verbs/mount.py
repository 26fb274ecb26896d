"""``dlfs mount``: shows the datasets of volumes as files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from dlfs.base.memory_limit import MEMORY_VARIABLE
from dlfs.cli.environment import DEFAULTED
from dlfs.cli.options import JsonOption, parse_size, require_trio
from dlfs.cli.output import log_events, note, print_json
from dlfs.errors import UsageError

if TYPE_CHECKING:
    from dlfs.mount.supervise.background import Mounted

FuseOption = Annotated[
    str,
    typer.Option(
        "--fuse",
        metavar="SERVER",
        help="Server of the sealed datasets: 'native' (several threads of C), "
        "'pyfuse3' (the reference), or 'auto': native if possible.",
    ),
]
NestedOption = Annotated[
    bool, typer.Option("--nested", help="Show the volume at DIR/LABEL also if it is the only one.")
]
_EXPECTED = "VOLUME and DIR, --holder FOLDER and VOLUME, or --replace DIR"
_WITH_REPLACE = ("replace", "memory", "busy_poll", "log", "json", "quiet", "verbose")
"""Parameters that --replace takes."""


def _parse_mode(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError as error:
        raise UsageError(f"read a mode: expected octal digits such as 444, got {text!r}") from error


def mount(
    ctx: typer.Context,
    volumes: Annotated[list[str] | None, typer.Argument(metavar="VOLUME...")] = None,
    directory: Annotated[str | None, typer.Argument(metavar="DIR")] = None,
    foreground: Annotated[bool, typer.Option("--foreground", "-f")] = False,
    allow_other: Annotated[bool, typer.Option("--allow-other")] = False,
    uid: int | None = None,
    gid: int | None = None,
    mode: str = "444",
    memory: Annotated[str | None, typer.Option(metavar="SIZE", envvar=MEMORY_VARIABLE)] = None,
    nested: NestedOption = False,
    incoming: Annotated[str | None, typer.Option(metavar="STAGING")] = None,
    fuse: FuseOption = "auto",
    busy_poll: Annotated[int, typer.Option("--busy-poll-us", metavar="US")] = 200,
    no_restart: Annotated[bool, typer.Option("--no-restart")] = False,
    no_uring: Annotated[bool, typer.Option("--no-uring")] = False,
    replace: Annotated[str | None, typer.Option(metavar="DIR")] = None,
    fuse_fd: Annotated[int | None, typer.Option(metavar="N")] = None,
    holder: Annotated[str | None, typer.Option(metavar="FOLDER")] = None,
    log: Annotated[str | None, typer.Option(metavar="FILE")] = None,
    json: JsonOption = False,
) -> None:
    """Mount volumes: any program can read DIR/DATASET/PATH; of several, DIR/LABEL/DATASET/PATH.

    Args:
        volumes: The volume: its members' device URIs, joined by commas. Several: DIR/LABEL shows
            each. A service mounts its volumes itself ('dlfs serve --mount').
        directory: An empty directory.
        foreground: Serve until Ctrl-C or an unmount.
        allow_other: Give other users access, as the mode permits.
        uid: Owner of the files; you by default.
        gid: Group of the files; yours by default.
        mode: Permissions of files, octal; directories add x to r.
        memory: Memory for samples of all datasets, open files included [$DLFS_MEMORY, or 1GiB, at
            most an 8th of what the process may use]. A dataset that fits is read from the devices
            once.
        incoming: Make DIR/incoming a link to STAGING, a directory on a local disk, in which
            programs write what 'dlfs seal' makes a dataset.
        busy_poll: How long the native server polls for the next request before it sleeps, while one
            program reads. Files come sooner, for more processor time. 0: no polling.
        no_restart: Start no other server when the native server in the background dies.
        no_uring: Have the native server read its requests from /dev/fuse. By default they come over
            io_uring, which is faster, where the kernel offers it: Linux 6.14 or newer, with the
            parameter fuse.enable_uring on. A mount over io_uring is not restarted.
        replace: Instead of mounting, have this version of dlfs serve the mount on DIR from now on.
            What programs have open goes on. The volumes and the options stay, except --memory,
            --busy-poll-us and --log where given. For mounts in the background by the native server,
            not over io_uring (Linux 6.9 or newer).
        fuse_fd: Serve a mount that the caller has made: N is its descriptor of /dev/fuse, mounted
            on DIR with the type fuse.dlfs, of which the caller may keep a copy. For containers that
            may not mount. Not with --foreground, nor over io_uring.
        holder: Serve a mount that 'dlfs hold' keeps, without DIR and in the foreground: FOLDER is
            the mount's folder at the holder. The mount goes on when this command ends, and the next
            one serves it. For containers without any rights.
        log: Log file of the background server.

    Examples:
        dlfs mount photos.img /mnt/photos
        dlfs mount photos.img mnt --incoming staging
        dlfs mount photos.img sounds.img /mnt/data
        dlfs mount --replace /mnt/photos
        dlfs mount --holder /run/dlfs/mount photos.img
    """
    require_trio("mount", "mount")
    if foreground or holder is not None:
        log_events()
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # with --holder, this process forks
    from dlfs.mount.options import MountOptions
    from dlfs.mount.server import choose_server, serve
    from dlfs.mount.supervise.background import mount_volume, replace_server
    from dlfs.mount.supervise.held import serve_held

    memory_bytes = parse_size(memory)
    if replace is not None:
        _check_replace(ctx)
        changed = {"cache_bytes": memory_bytes if _is_given(ctx, "memory") else None}
        changed["busy_poll_us"] = busy_poll if _is_given(ctx, "busy_poll") else None
        _report(replace_server(replace, **changed, log=log), json=json)
        return
    if holder is not None:
        _check_holder(allow_other=allow_other, fuse_fd=fuse_fd, no_restart=no_restart)
        volumes, directory = _volumes_of(ctx, volumes, directory), holder
    if not volumes or directory is None:
        raise UsageError(f"mount: expected {_EXPECTED}")
    if foreground and fuse_fd is not None:
        raise UsageError("mount: expected one of --fuse-fd and --foreground, got both")
    defaults = MountOptions()
    options = MountOptions(
        uid=defaults.uid if uid is None else uid,
        gid=defaults.gid if gid is None else gid,
        file_mode=_parse_mode(mode),
        allow_other=allow_other,
        cache_bytes=defaults.cache_bytes if memory_bytes is None else memory_bytes,
        incoming=None if incoming is None else os.path.abspath(incoming),
        fuse=fuse,
        busy_poll_us=busy_poll,
        restart=not no_restart,
        uring=not no_uring,
        nested=nested or len(volumes) > 1,
    )
    choose_server(options)  # fails before anything is started
    if holder is not None:
        serve_held(volumes, holder, options, lambda name, _: note(f"serving the mount {name}"))
    elif foreground:
        serve(volumes, directory, options, lambda path, _: note(f"mounted on {path}"))
    else:
        first, *more = volumes
        mounted = mount_volume(
            first, directory, options, more_volume_uris=more, log=log, fuse_fd=fuse_fd
        )
        _report(mounted, json=json)


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Return True if a parameter is on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_replace(ctx: typer.Context) -> None:
    """Check that nothing is given that --replace cannot change.

    Raises:
        UsageError: it is.
    """
    for each in ctx.command.params:
        name = each.name or ""
        if name in _WITH_REPLACE or not _is_given(ctx, name):
            continue
        if name == "volumes" and DEFAULTED in ctx.meta:
            continue
        shown = each.opts[0] if each.param_type_name == "option" else "VOLUME"
        raise UsageError(
            f"mount --replace: the volumes and the options of a mount stay; leave {shown} out"
        )


def _check_holder(*, allow_other: bool, fuse_fd: int | None, no_restart: bool) -> None:
    """Check that nothing is given that the maker of a mount has chosen.

    Raises:
        UsageError: it is.
    """
    given = {"--allow-other": allow_other, "--fuse-fd": fuse_fd, "--no-restart": no_restart}
    for name, value in given.items():
        if value not in (None, False):
            raise UsageError(
                f"mount --holder: the mount is made already, and its servers restart; leave {name} "
                "out"
            )


def _volumes_of(ctx: typer.Context, first: list[str] | None, last: str | None) -> list[str]:
    """Return the volumes of a command line without DIR, whose last one was taken for it."""
    given = [] if first is None or DEFAULTED in ctx.meta else first
    return [*given, *([] if last is None else [last])]


def _report(mounted: Mounted, *, json: bool) -> None:
    """Print where volumes are mounted, and by which server."""
    from dlfs.mount.options import URING_TRANSPORT

    if json:
        print_json(
            {
                "mountpoint": mounted.mountpoint,
                "pid": mounted.pid,
                "log": mounted.log,
                "transport": mounted.transport,
            },
            result=True,
        )
    else:
        over = f"over {URING_TRANSPORT}, " if mounted.transport == URING_TRANSPORT else ""
        note(f"mounted on {mounted.mountpoint} (server {mounted.pid}, {over}log: {mounted.log})")
