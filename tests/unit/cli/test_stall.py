"""``dlfs stall``: what it measures is what was read."""

import pytest

import dlfs


@pytest.mark.parametrize("shuffle", ["global", "chunk", "none"])
def test_stall_tells_where_the_time_goes(run, volume, shuffle):
    command = ("stall", volume, "small", "--seconds", 0.1, "--batch", 2, "--shuffle", shuffle)
    found = run(*command, "--json").json
    assert found["dataset"] == "small@1"
    assert found["seconds"] >= 0.1
    # On a busy machine the first batch may take all of the time.
    assert found["batches"] >= 1
    assert found["samples"] >= 2 * found["batches"]
    assert 0 < found["waited_seconds"] <= found["seconds"]
    assert found["requests"] >= 1
    assert found["errors"] == 0
    assert set(found["phase_seconds"]) == {"device", "checking", "planning", "rest"}
    assert [member["uri"] for member in found["members"]] == [str(volume)]
    assert "is the limit" in found["verdict"]


def test_a_consumer_that_works_on_its_batches(run, volume):
    done = run("stall", volume, "small", "--seconds", 0.2, "--step-ms", 50)
    assert done.code == 0
    text = done.out.decode()
    assert "is the limit" in text
    assert "small@1: " in text
    assert str(volume) in text
    found = run("stall", volume, "small", "--seconds", 0.2, "--step-ms", 50, "--json").json
    assert found["seconds"] - found["waited_seconds"] >= 0.05 * found["batches"] > 0


def test_an_empty_dataset_is_nothing_to_read(run, volume):
    with dlfs.open(str(volume)) as opened, opened.writer("empty"):
        pass
    done = run("stall", volume, "empty", "--seconds", 0.1)
    assert done.code == 0
    assert "nothing was read" in done.out.decode()


def test_a_dataset_that_is_not_there(run, volume):
    assert run("stall", volume, "nothing").code == 3
