"""``dlfs target recipe``."""

from __future__ import annotations

import json

import pytest

from dlfs.block.host import host_nqn
from dlfs.fabric.recipes import RECIPES, Export
from tests.unit.cli.commands import VERBS

HOST = "nqn.2024-01.org.example:trainer"


@pytest.mark.parametrize("kind", RECIPES)
def test_recipe(run, kind: str) -> None:
    options = ("--address", "fd00::7", "--allow", HOST, "--allow", HOST + "2", "--port", 4421)
    done = run("target", "recipe", "/data/a disk", *options, "--kind", kind)
    export = Export(
        device="/data/a disk", address="fd00::7", allowed_hosts=(HOST, HOST + "2"), port=4421
    )
    assert (done.code, done.out.decode()) == (0, RECIPES[kind](export))
    assert "undo" in done.err
    if kind == "nvmetcli":
        assert [port["portid"] for port in json.loads(done.out)["ports"]] == [4421, 8009]


def test_every_kind_is_offered() -> None:
    kind = {each.name: each for each in VERBS["target recipe"].params}["kind"]
    assert set(kind.metavar.split("|")) == set(RECIPES)


def test_recipe_names_what_is_wrong(run) -> None:
    done = run("target", "recipe", "disk", "-a", "10.0.0.11", "--allow", HOST)
    assert (done.code, done.out) == (2, b"")
    assert "absolute path" in done.err
    assert run("target", "recipe", "/disk", "-a", "10.0.0.11").code == 2
    assert run("target").code == 2


def test_hostnqn(run) -> None:
    assert run("target", "hostnqn").out.decode() == f"{host_nqn()}\n"
