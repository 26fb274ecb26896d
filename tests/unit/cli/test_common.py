"""Tests of all verbs: -q, -v, defaults from the environment, examples, messages."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

import dlfs
from dlfs.base.memory_limit import MEMORY_VARIABLE, default_memory_bytes
from dlfs.base.units import format_bytes
from dlfs.cli.environment import complete_arguments
from dlfs.cli.verb import Verb
from dlfs.service.control import ControlConnection
from tests.support.files import write_files
from tests.unit.cli.commands import COMMAND, VERBS


def find(words: list[str]) -> tuple[Verb, list[str]]:
    """The verb that a command line runs, and its arguments."""
    group = COMMAND
    while words and words[0] in getattr(group, "commands", {}):
        group, words = group.commands[words[0]], words[1:]
    return group, words


# ---- --help --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_everything_is_described(verb: str) -> None:
    assert VERBS[verb].help
    assert all(parameter.help for parameter in VERBS[verb].params)
    described = inspect.getdoc(VERBS[verb].callback).partition("Args:\n")[2]
    names = re.findall(r"^    (\w+): ", described.partition("Examples:\n")[0], re.MULTILINE)
    assert set(names) <= {parameter.name for parameter in VERBS[verb].params}


@pytest.mark.parametrize("verb", VERBS)
def test_examples_parse(verb: str) -> None:
    examples = VERBS[verb].examples
    assert examples
    for example in examples.replace("\\\n", "").replace("\n", " ").split("dlfs ")[1:]:
        words = shlex.split(example.split(" | ")[0].split(" >")[0])
        command, arguments = find(words)
        assert words[: len(verb.split())] == verb.split()
        if "--formats" not in arguments:
            assert command.make_context(verb, arguments).params


# ---- -q and -v -----------------------------------------------------------------------------------


def test_quiet(run, volume, tmp_path) -> None:
    write_files(tmp_path / "in", {"a": b"x"})
    done = run("import", tmp_path / "in", volume, "--name", "one", "--quiet")
    assert (done.code, done.out, done.err) == (0, b"", "")
    assert run("-q", "verify", volume).err == ""
    assert run("verify", volume).err.startswith("verified")
    assert run("-q", "cat", volume, "one", "nowhere").err.startswith("dlfs: ")


def test_verbose(run, volume) -> None:
    for done in (
        run("-v", "cat", volume, "small", "top"),
        run("cat", volume, "small", "top", "-v"),
    ):
        assert done.out == b"top"
        assert f"dlfs: opened {volume} for reading by " in done.err
        assert "1 member, 1 dataset\n" in done.err
        memory = format_bytes(default_memory_bytes())
        assert f"opened dataset small@1: 6 samples, at most {memory} of memory" in done.err
    assert run("cat", volume, "small", "top").err == ""
    assert run("cat", volume, "small", "top", "-q", "-v").code == 2


# ---- defaults ------------------------------------------------------------------------------------


@pytest.fixture
def default(volume, monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("DLFS_VOLUME", str(volume))
    monkeypatch.chdir(tmp_path)
    return volume


def test_the_volume_may_be_left_out(run, default, tmp_path) -> None:
    assert run("ls").out == b"small@1\n"
    assert run("ls", "small").out.startswith(b"a/\n")
    assert run("ls", "small", "b/").out == b"c/\nempty\n"
    assert run("ls", "-l", "small", "b").out.endswith(b"  empty\n")
    assert run("cat", "small", "top").out == b"top"
    assert run("cat", "small", "--index", "-1").out == b"top"
    assert run("stat", "small@1", "top", "--json").json["samples"][0]["index"] == 5
    assert run("verify", "small").code == 0
    assert run("verify").code == 0
    assert run("info", "--json").json["label"] == "tests"
    assert run("export", "small", tmp_path / "out").code == 0
    assert run("import", tmp_path / "out", "--name", "again").code == 0
    assert run("rm", "again", "--yes").code == 0
    assert run("stall", "small", "--seconds", 0.1, "--json").code == 0
    assert "much" in run("serve", "--cache", "much").err  # options stay


def test_the_volume_may_be_given_all_the_same(run, default, tmp_path) -> None:
    write_files(tmp_path / "in", {"a": b"x"})
    other = tmp_path / "other.img"
    assert run("format", other, "--size", "8MiB").code == 0
    assert run("import", "in", "other.img", "--name", "other").code == 0
    assert run("ls", "other.img").out == b"other@1\n"
    assert run("ls", "./other.img", "other").out == b"a\n"
    assert run("cat", other, "other", "a").out == b"x"
    assert run("rm", "other.img", "other", "--yes").code == 0
    assert run("info", "other.img", "--json").json["datasets"] == []


def test_what_could_be_either_is_an_error(run, default, tmp_path) -> None:
    (tmp_path / "small").write_bytes(b"a file with a dataset's name")
    done = run("ls", "small")
    assert done.code == 2
    assert "small is a file here and a dataset of" in done.err
    assert "write ./small for the file" in done.err
    assert run("ls", "./small").code == 4
    assert run("ls", default, "small").code == 0


def test_a_default_is_named_where_it_leads_astray(run, default, tmp_path) -> None:
    done = run("ls", "photos")
    assert done.code == 3
    assert f"DLFS_VOLUME names the volume {default}" in done.err
    done = run("import", tmp_path, tmp_path / "nothing.img", "--name", "x")
    assert (done.code, "nothing.img" in done.err) == (3, True)
    assert run("format", "--size", "1MiB").code == 2


def test_no_default(run) -> None:
    assert run("ls").code == 2


def test_memory(run, volume, monkeypatch) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, "32MiB")
    assert "at most 32.0 MiB of memory" in run("cat", volume, "small", "top", "-v").err
    done = run("stall", volume, "small", "--seconds", 0.1, "--memory", "16MiB", "-v")
    assert "at most 16.0 MiB of memory" in done.err
    monkeypatch.setenv(MEMORY_VARIABLE, "much")
    done = run("ls", volume)
    assert (done.code, f"{MEMORY_VARIABLE}: read a size" in done.err) == (2, True)
    with dlfs.open(str(volume), memory_bytes=1 << 24) as opened:  # what is said, holds
        assert opened.uri == str(volume)


def test_completion_does_not_need_a_volume(default) -> None:
    command, _ = find(["ls"])
    context = command.make_context("ls", [], resilient_parsing=True)
    assert context.params["volume"] is None
    assert complete_arguments(command, context, [], {}) == [str(default)]


# ---- JSON ----------------------------------------------------------------------------------------


def test_formats_as_json(run) -> None:
    for order in (["--formats", "--json"], ["--json", "--formats"]):
        formats = {row["name"]: row for row in run("import", *order).json["formats"]}
        assert formats["parquet"]["extra"] == "arrow"
        assert "links" in {option["name"] for option in formats["folder"]["options"]}


@pytest.mark.parametrize("verb", VERBS)
def test_no_json_is_ignored(run, volume, tmp_path, verb) -> None:
    """With --json, all that verbs print on stdout is one document, and there is one."""
    write_files(tmp_path / "in", {"a": b"x"})
    commands = {
        "format": ["format", tmp_path / "new.img", "--size", "4MiB"],
        "import": ["import", tmp_path / "in", volume, "--name", "new"],
        "export": ["export", volume, "small", tmp_path / "out"],
        "rm": ["rm", volume, "small", "--yes"],
        "stall": ["stall", volume, "small", "--seconds", 0.1],
        "stat": ["stat", volume, "small"],
        "ls": ["ls", volume, "small"],
        "info": ["info", volume],
        "verify": ["verify", volume],
        "uri": ["uri"],
        "version": ["version"],
        "doctor": ["doctor"],
    }
    # Other verbs with --json need a mount, a service, a node or a lost member.
    if verb in commands:
        assert isinstance(run(*commands[verb], "--json").json, dict)


# ---- messages ------------------------------------------------------------------------------------

WRONG = [
    ["format", "DIR/new.img", "--size", "1KiB"],
    ["format", "DIR/new.img", "--size", "4MiB", "--chunk", "3KiB"],
    ["format", "DIR/new.img", "--size", "4MiB", "--replicas", "2"],
    ["format", "VOLUME", "--size", "4MiB"],
    ["format", "DIR/new.img", "--size", "4MiB", "--label", "x" * 100],
    ["info", "DIR/nothing"],
    ["info", "DIR"],
    ["info", "unix:DIR/no.sock"],
    ["info", "nvme-tcp://127.0.0.1:1/nqn.2024-01.org.example:x?nsid=1&connect_ms=10"],
    ["info", "what:ever"],
    ["info", "VOLUME,VOLUME"],
    ["verify", "VOLUME", "nothing"],
    ["verify", "VOLUME", "small@7"],
    ["repair", "VOLUME"],
    ["repair", "VOLUME", "--member", "7", "--with", "DIR/new.img"],
    ["import", "DIR/nothing", "VOLUME", "-n", "x"],
    ["import", "VOLUME", "-n", "x"],
    ["import", "DIR", "VOLUME", "-n", "a/b"],
    ["import", "DIR", "VOLUME", "-n", ""],
    ["import", "DIR", "VOLUME", "-n", "x", "--option", "colour=red"],
    ["import", "DIR", "VOLUME", "-n", "x", "--option", "colour"],
    ["import", "DIR", "VOLUME", "-n", "x", "--format", "floppy"],
    ["import", "DIR", "VOLUME", "-n", "x", "--array-dtype", "f4"],
    ["import", "DIR", "VOLUME", "-n", "x", "--array-dtype", "f4", "--array-shape", "a"],
    ["import", "DIR", "VOLUME", "-n", "x", "--layout", "random"],
    ["import", "DIR", "VOLUME", "-n", "x", "--attribute", "label"],
    ["import", "DIR", "VOLUME", "-n", "x", "--attributes", "DIR/nothing.csv"],
    ["ls", "VOLUME", "small", "nowhere"],
    ["cat", "VOLUME", "small", "odd \n\udcff nowhere"],
    ["cat", "VOLUME", "sm\udcffall", "top"],
    ["cat", "VOLUME", "small", "--index", "x"],
    ["cat", "VOLUME", "small", "--index", "99999999999999999999"],
    ["stat", "VOLUME", "small", "-i", "6"],
    ["export", "VOLUME", "small", "/proc/nowhere"],
    ["export", "VOLUME", "small", "DIR"],
    ["rm", "VOLUME", "small"],
    ["rm", "VOLUME", "nothing", "-y"],
    ["mount", "VOLUME", "DIR/nothing"],
    ["mount", "VOLUME", "DIR", "--mode", "999"],
    ["mount", "VOLUME"],
    ["mount", "--replace", "DIR"],
    ["umount", "DIR"],
    ["seal", "DIR", "x"],
    ["incoming", "DIR"],
    ["top", "VOLUME"],
    ["top", "unix:DIR/no.sock"],
    ["stall", "VOLUME", "small", "--batch", "0"],
    ["stall", "VOLUME", "small", "--shuffle", "twice"],
    ["serve", "DIR/nothing", "--socket", "DIR/no/where.sock"],
    ["serve", "VOLUME", "--cache", "much"],
    ["attach", "VOLUME", "VOLUME"],
    ["attach", "unix:DIR/no.sock", "VOLUME"],
    ["detach", "unix:DIR/no.sock", "photos"],
    ["stop", "VOLUME"],
    ["stop", "unix:DIR/no.sock", "--timeout", "-1"],
    ["stop", "unix:DIR/no.sock", "--timeout", "inf"],
    ["serve", "VOLUME", "--log", "DIR/log"],
    ["serve", "VOLUME", "--allow-user", "nobody-of-that-name"],
    ["serve", "VOLUME", "--allow", "user:root"],
    ["serve", "VOLUME", "--allow", "another=user:root", "--socket", "DIR/s"],
    ["serve", "VOLUME", "--sockets", "DIR"],
    ["serve"],
    ["attach", "unix:DIR/no.sock", "VOLUME", "--allow", "everybody"],
    ["publish", "unix:DIR/no.sock", "pod", "photos"],
    ["unpublish", "unix:DIR/no.sock", "pod"],
    ["discover", "a host"],
    ["discover", "127.0.0.1:1"],
    ["target", "recipe", "disk", "-a", "10.0.0.1", "--allow", "nqn.2024-01.org.example:x"],
    ["target", "recipe", "/dev/x", "-a", "here", "--allow", "me"],
    ["compose", "create", "a", "-s", "1", "--store", "/srv", "-a", "10.0.0.1", "--allow", "me"],
    ["compose", "ls", "-t", "nvmet+ssh://"],
    ["compose", "withdraw"],
    ["uri", "what:ever"],
    ["uri", "nvme-tcp://"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=lambda words: " ".join(words)[:60])
def test_messages(run, volume, tmp_path, monkeypatch, arguments) -> None:
    """One line that begins with dlfs, without Python's words: see ``check_message``."""
    connect = ControlConnection._connect  # tries once, instead of for ten seconds
    monkeypatch.setattr(ControlConnection, "_connect", lambda self, _deadline: connect(self, 0.0))
    folder = write_files(tmp_path / "folder", {"a": b"x"})
    words = [word.replace("VOLUME", str(volume)).replace("DIR", str(folder)) for word in arguments]
    done = run(*words)
    assert done.code != 0
    assert done.out == b""
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("dlfs: ")
