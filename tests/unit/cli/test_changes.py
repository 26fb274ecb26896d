"""Verbs that change, copy, measure and compare whole datasets: ``mv``, ``cp``, ``du``, ..."""

from __future__ import annotations

import dlfs
from tests.support.volumes import write_dataset

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
    write_dataset(volume, "taken", samples)
    done = run("mv", volume, "small", "taken")
    assert (done.code, "expected a name that no dataset has" in done.err) == (1, True)
    assert run("mv", volume, "nothing", "else").code == 3
    assert run("mv", volume, "small", "a@1").code == 2
    assert run("ls", volume).out == b"small@1\ntaken@1\n"


# ---- prune ---------------------------------------------------------------------------------------


def test_prune(run, volume, samples) -> None:
    for _ in range(3):
        write_dataset(volume, "small", samples)
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


def test_prune_removes_what_it_showed_or_nothing(run, volume, samples, monkeypatch) -> None:
    write_dataset(volume, "small", samples)

    def confirm(question: str, **_: str) -> None:
        assert "small@1 (" in question
        write_dataset(volume, "small", samples)

    monkeypatch.setattr("dlfs.cli.verbs.remove.confirm", confirm)
    done = run("prune", volume, "small", "--keep", 1)
    assert (done.code, "these now: 1, 2; nothing was removed" in done.err) == (1, True)
    assert run("ls", volume).out == b"small@1\nsmall@2\nsmall@3\n"


# ---- du ------------------------------------------------------------------------------------------


def test_du(run, volume, samples) -> None:
    write_dataset(volume, "small", samples)
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


# ---- diff ----------------------------------------------------------------------------------------


def test_diff(run, volume, samples) -> None:
    assert run("diff", volume, "small", "small@1").code == 0
    others = {**samples, b"top": b"TOP", b"z": b"new"}
    del others[b"a/one.txt"]
    write_dataset(volume, "small", others)
    done = run("diff", volume, "small@1", "small")
    assert (done.code, done.err) == (1, "")
    fields = dict(line.split("  ", 1) for line in map(str.strip, done.out.decode().splitlines()))
    assert fields["a"] == "small@1"
    assert fields["added"] == "1 sample, 3 B"
    assert fields["removed"] == "1 sample, 3 B"
    assert (fields["changed"], fields["same"]) == ("1 sample", "4 samples")
    done = run("diff", volume, "small@1", "small@2", "--long")
    assert (done.code, done.out) == (1, b"- a/one.txt\n~ top\n+ z\n")
    found = run("diff", volume, "small@2", "small@1", "--json", "--long").json
    assert (found["added"], found["removed"], found["changed"], found["same"]) == (1, 1, 1, 4)
    assert found["differ"]
    assert found["samples"][0] == {
        "path": "a/one.txt",
        "difference": "added",
        "length_bytes_a": None,
        "length_bytes_b": 3,
    }
    assert run("diff", volume, "small", "small@7").code == 3


def test_diff_of_attributes(run, volume, tmp_path) -> None:
    with dlfs.open(str(volume)) as opened:
        for version in range(2):
            with opened.writer("d") as writer:
                for path in (b"a", b"odd \xff"):
                    values = {"same": 1, "label": f"{path!r} {version}", "kind": 1.0}
                    values["kind"] = "x" if version else 1.0
                    writer.add(path, path, attributes=values | {f"only {version}": True})
    done = run("diff", volume, "d@1", "d@2")
    assert done.code == 1
    for part in (
        "attributes  changed in 2 samples of equal bytes",
        "only 1: added",
        "only 0: removed",
        "kind: float64 in A, string in B",
        "label: changed in 2 samples",
    ):
        assert part in done.out.decode()
    assert run("diff", volume, "d@1", "d@2", "-l").out == b"@ a\n@ odd \xff\n"
    found = run("diff", volume, "d@1", "d@2", "--json").json
    assert found["columns_retyped"] == {"kind": ["float64", "string"]}
    assert "samples" not in found


# ---- cp ------------------------------------------------------------------------------------------


def test_cp(run, volume, tmp_path) -> None:
    target = f"{tmp_path}/a.img,{tmp_path}/b.img"
    assert run("format", target, "--size", "16MiB").code == 0
    done = run("cp", volume, "small", target)
    assert (done.code, done.out) == (0, b"")
    assert done.err.startswith("copied small@1 to small@1: 6 samples, 295.9 KiB in ")
    done = run("cp", volume, "small@1", target, "other", "--json")
    assert done.json["source"]["version"] == 1
    assert done.json["dataset"]["name"] == "other"
    assert run("cp", volume, "small", volume).code == 0
    assert run("ls", volume).out == b"small@1\nsmall@2\n"
    assert run("diff", volume, "small", "other", "--other", target).code == 0
    assert run("cp", volume, "small@1", target, "other").err.startswith("copied small@1 to other@2")


def test_cp_says_why_it_cannot(run, volume, tmp_path) -> None:
    small = tmp_path / "small.img"
    assert run("format", small, "--size", "1100KiB", "--chunk", "4KiB").code == 0
    assert run("cp", volume, "nothing", small).code == 3
    assert run("cp", volume, "small", tmp_path / "nowhere.img").code == 3
    assert run("cp", volume, "small", small, "a@1").code == 2
    done = run("cp", volume, "small", small)
    assert (done.code, "of free space" in done.err) == (6, True)
    assert run("ls", small).out == b""
