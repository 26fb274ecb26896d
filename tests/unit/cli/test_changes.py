"""Verbs that change, measure and compare datasets: ``mv``, ``prune``, ``du``."""

from __future__ import annotations

import dlfs


def add_version(volume, samples, name="small") -> None:
    with dlfs.open(str(volume)) as opened, opened.writer(name) as writer:
        for path, data in samples.items():
            writer.add(path, data)


# ---- mv ------------------------------------------------------------------------------------------


def test_mv(run, volume) -> None:
    done = run("mv", volume, "small", "large")
    assert (done.code, done.out, done.err) == (0, b"", "renamed small@1 to large@1\n")
    assert run("ls", volume).out == b"large@1\n"
    assert run("cat", volume, "large", "top").out == b"top"
    done = run("mv", volume, "large@1", "small", "--json")
    assert [(one["name"], one["version"]) for one in done.json["renamed"]] == [("small", 2)]
    assert done.err == "renamed large@1 to small@2\n"


def test_mv_says_why_it_cannot(run, volume, samples) -> None:
    add_version(volume, samples, "taken")
    done = run("mv", volume, "small", "taken")
    assert (done.code, "expected a name that no dataset has" in done.err) == (1, True)
    assert run("mv", volume, "nothing", "else").code == 3
    assert run("mv", volume, "small", "a@1").code == 2
    assert run("ls", volume).out == b"small@1\ntaken@1\n"


# ---- prune ---------------------------------------------------------------------------------------


def test_prune(run, volume, samples) -> None:
    for _ in range(3):
        add_version(volume, samples)
    done = run("prune", volume, "small", "--keep", 2)
    assert (done.code, "expected --yes to remove small@1 (6 samples" in done.err) == (2, True)
    done = run("prune", volume, "small", "--keep", 2, "--yes", "--json")
    assert [one["version"] for one in done.json["removed"]] == [1, 2]
    assert run("ls", volume).out == b"small@3\nsmall@4\n"
    done = run("prune", volume, "small", "--keep", 2)
    assert (done.code, done.err) == (0, "nothing to remove: small has 2 versions\n")
    assert run("prune", volume, "small", "--keep", 0).code == 2
    assert run("prune", volume, "small").code == 2
    assert run("prune", volume, "small@3", "--keep", 1).code == 2
    assert run("prune", volume, "nothing", "--keep", 1).code == 3


# ---- du ------------------------------------------------------------------------------------------


def test_du(run, volume, samples) -> None:
    add_version(volume, samples)
    found = run("du", volume, "--json").json
    assert [one["version"] for one in found["versions"]] == [1, 2]
    assert found["sample_bytes"] == 2 * sum(map(len, samples.values()))
    assert (
        found["stored_bytes"] + found["catalog_bytes"] + found["free_bytes"]
        == (found["capacity_bytes"])
    )
    lines = run("du", volume, "small@2").out.decode().splitlines()
    assert [line.split()[0] for line in lines] == [
        "dataset",
        lines[1],
        "small@2",
        "total",
        "volume:",
    ]
    assert run("du", volume, "nothing").code == 3
