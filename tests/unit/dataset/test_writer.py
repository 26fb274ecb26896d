import contextlib
import uuid

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import MemoryDevice
from tests.support.volumes import new_volume, read_dataset, write_dataset


@pytest.fixture
def make_volume():
    """Makes volumes in memory: ``make_volume(size_bytes, chunk_bytes=...)``."""
    names, volumes = [], []

    def make(size_bytes=8 * MIB, *, members=1, **options):
        uris = []
        for _ in range(members):
            names.append(f"test-{uuid.uuid4().hex}")
            uris.append(f"mem:{names[-1]}?size={size_bytes}")
        dlfs.format_volume(uris, **options)
        volumes.append(dlfs.open(uris))
        return volumes[-1]

    yield make
    for volume in volumes:
        volume.close()
    for name in names:
        MemoryDevice.forget(name)


def write(volume, name, samples, **options):
    with volume.writer(name, **options) as writer:
        for path, data in samples:
            writer.add(path, data)


def addresses(dataset):
    with dataset:
        return dataset.directory.addresses().tolist()


def test_written_samples_are_read(make_volume):
    volume = make_volume()
    model = {f"a/{i}".encode(): bytes([i]) * (i * 100) for i in range(50)}
    write_dataset(volume, "ds", model)
    assert read_dataset(volume, "ds") == model


def test_a_batch_is_the_same_as_single_samples(make_volume):
    volume = make_volume()
    data = np.arange(10_000, dtype=np.uint16).view(np.uint8)
    offsets = np.array([0, 500, 100, 19_000])
    lengths = np.array([400, 0, 7000, 1000])
    paths = [b"z", b"y", b"x", b"w"]
    for layout in ("path", "shuffled"):
        with volume.writer(layout, layout=layout) as writer:
            writer.add_batch(paths, data, offsets, lengths)
        expected = {
            path: data[at : at + size].tobytes()
            for path, at, size in zip(paths, offsets, lengths, strict=True)
        }
        assert read_dataset(volume, layout) == expected


def test_batches_and_single_samples_mix(make_volume):
    volume = make_volume()
    with volume.writer("ds", layout="path") as writer:
        writer.add("a", b"first")
        writer.add_batch([b"b", b"c"], b"secondthird", np.array([0, 6]), np.array([6, 5]))
        writer.add("d", b"fourth")
    assert list(read_dataset(volume, "ds").values()) == [b"first", b"second", b"third", b"fourth"]


def test_an_empty_dataset_is_sealed(make_volume):
    volume = make_volume()
    with volume.writer("ds"):
        pass
    assert len(volume["ds"]) == 0
    assert volume.datasets()[0].sample_count == 0
    assert list(volume.verify()) == []


def test_empty_samples(make_volume):
    volume = make_volume()
    with volume.writer("ds") as writer:
        writer.add("a", b"")
        writer.add("b", b"")
    assert read_dataset(volume, "ds") == {b"a": b"", b"b": b""}
    assert volume["ds"].stat(0).length_bytes == 0


def test_text_and_surrogates_are_paths(make_volume):
    volume = make_volume()
    with volume.writer("ds") as writer:
        writer.add("dir/\u00e9", b"1")
        writer.add("\udcff", b"2")
        writer.add(b"new\nline", b"3")
    assert volume["ds"].paths() == [b"dir/\xc3\xa9", b"new\nline", b"\xff"]


@pytest.mark.parametrize("size", [4 * KIB, 4 * KIB + 1, 9 * KIB, 40 * KIB])
def test_large_samples_run_over_chunks_of_their_own(make_volume, size):
    volume = make_volume(4 * MIB, chunk_bytes=4 * KIB, members=3)
    data = np.random.default_rng(size).bytes(size)
    with volume.writer("ds", layout="path") as writer:
        writer.add("a", b"before")
        writer.add("b", data)
        writer.add("c", b"behind")
    assert read_dataset(volume, "ds") == {b"a": b"before", b"b": data, b"c": b"behind"}
    first, large, behind = addresses(volume["ds"])
    assert (first, large) == (0, 4 * KIB)
    assert behind == 4 * KIB + -(-size // (4 * KIB)) * 4 * KIB
    assert list(volume.verify()) == []


def test_a_sample_larger_than_the_windows(make_volume):
    volume = make_volume(128 * MIB, chunk_bytes=64 * KIB)
    data = np.random.default_rng(1).bytes(50 * MIB + 17)
    with volume.writer("ds", stage_bytes=MIB) as writer:
        writer.add("small", b"s")
        writer.add("large", data)
    assert volume["ds"].get("large") == data
    assert list(volume.verify()) == []


def test_small_samples_pad_to_blocks_only_when_it_is_cheap(make_volume):
    volume = make_volume(chunk_bytes=16 * KIB, block_bytes=4 * KIB)
    sizes = [4000, 4000, 100, 100, 9000, 100]
    with volume.writer("ds", layout="path") as writer:
        for number, size in enumerate(sizes):
            writer.add(str(number), bytes(size))
    # 4000 at 4000 would touch two blocks: 96 bytes of padding. 9000 does not fit behind: next chunk
    assert addresses(volume["ds"]) == [0, 4096, 8096, 8196, 16384, 25384]


def test_layout_path_packs_in_the_order_of_the_calls(make_volume):
    volume = make_volume()
    write_dataset(volume, "ds", dict.fromkeys(("c", "a", "b"), b"x" * 100), layout="path")
    assert addresses(volume["ds"]) == [100, 200, 0]


def test_layout_shuffled_is_a_function_of_the_seed(make_volume):
    volume = make_volume()
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        with volume.writer(name, seed=seed) as writer:
            for number in range(200):
                writer.add(f"{number:04}", b"x" * 100)
    one, again, two = (addresses(volume[name]) for name in ("one", "again", "two"))
    assert one == again != two
    assert sorted(one) == sorted(two) != one


@pytest.mark.parametrize("seed", [0, 1])
def test_no_epoch_is_in_the_order_of_packing(make_volume, seed):
    """A default epoch of a default dataset would be a sequential read, and no shuffle of it."""
    volume = make_volume()
    write(volume, "ds", [(f"{n:03}", b"x" * 100) for n in range(200)], seed=seed)
    with volume["ds"] as dataset:
        packed = dataset.sequence(shuffle=None).indices().tolist()
        for epoch in (0, 1, 2, 2**64 - 1):
            order = dataset.sequence(seed=seed, epoch=epoch).indices().tolist()
            assert sorted(order) == sorted(packed)
            assert sum(a == b for a, b in zip(order, packed, strict=True)) < 20


def test_a_shuffled_source_is_packed_as_it_comes(make_volume):
    volume = make_volume()
    with volume.writer("ds", source_shuffled=True) as writer:
        for name in ("c", "a", "b"):
            writer.add(name, b"x" * 100)
    assert addresses(volume["ds"]) == [100, 200, 0]
    assert volume.datasets()[0].layout == "shuffled"


def test_the_stage_bounds_what_is_shuffled(make_volume):
    volume = make_volume(chunk_bytes=4 * KIB)
    with volume.writer("ds", stage_bytes=1000) as writer:
        for number in range(40):
            writer.add(f"{number:02}", b"x" * 100)
    places = addresses(volume["ds"])
    assert places != sorted(places)
    for first in range(0, 40, 10):
        assert {p // 1000 for p in places[first : first + 10]} == {first // 10}


def test_a_batch_larger_than_the_stage(make_volume):
    volume = make_volume()
    data = np.random.default_rng(3).integers(0, 255, 10_000, np.uint8)
    offsets, lengths = np.arange(0, 10_000, 100), np.full(100, 100)
    lengths[50] = 5000 - 1
    paths = [f"{i:03}".encode() for i in range(100)]
    with volume.writer("ds", stage_bytes=700) as writer:
        writer.add_batch(paths, data, offsets, lengths)
    expected = [data[o : o + n].tobytes() for o, n in zip(offsets, lengths, strict=True)]
    assert list(read_dataset(volume, "ds").values()) == expected


def test_unused_bytes_of_chunks_are_zero(make_volume):
    volume = make_volume(chunk_bytes=4 * KIB)
    for version in (1, 2):  # the second goes where the first was
        with volume.writer("ds", layout="path") as writer:
            for number in range(30):
                writer.add(f"{number:02}", b"\xff" * (1500 if version == 1 else 1400))
        if version == 1:
            volume.remove("ds")
            with volume.writer("other"):
                pass
    dataset = volume["ds"]
    used = np.zeros(volume.capacity_bytes, bool)
    for index in range(30):
        place = dataset.stat(index)
        at = place.offset_bytes - MIB
        used[at : at + place.length_bytes] = True
    device = MemoryDevice(volume.uri.partition("?")[0].removeprefix("mem:"))
    media = np.frombuffer(device.read(MIB, volume.capacity_bytes), np.uint8)
    for chunk in np.unique(np.flatnonzero(used) // 4096):
        inside = slice(chunk * 4096, (chunk + 1) * 4096)
        assert np.all(media[inside][used[inside]] == 0xFF)
        assert np.all(media[inside][~used[inside]] == 0)
    device.close()


# ---- what is refused -----------------------------------------------------------------------------


def test_a_path_twice(make_volume):
    volume = make_volume()
    with pytest.raises(dlfs.ExistsError, match="added already"):
        write(volume, "ds", [("a", b"1"), ("a", b"2")])
    assert volume.datasets() == []


def test_a_path_that_is_a_directory(make_volume):
    volume = make_volume()
    with pytest.raises(dlfs.ExistsError):
        write(volume, "ds", [("a", b"1"), ("a/b", b"2")])
    assert volume.datasets() == []


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "./a", "a/..", "a\0"])
def test_malformed_paths(make_volume, path):
    with make_volume().writer("ds") as writer:
        with pytest.raises(dlfs.UsageError):
            writer.add(path, b"")
        writer.abort()


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [([0], [1, 2]), ([0, 5], [1, 6]), ([-1, 0], [1, 1]), ([0, 1], [1, -1])],
)
def test_malformed_batches(make_volume, offsets, lengths):
    volume = make_volume()
    writer = volume.writer("ds")
    with pytest.raises(dlfs.UsageError, match="add a batch"):
        writer.add_batch([b"a", b"b"], b"0123456789", np.array(offsets), np.array(lengths))
    writer.abort()
    assert volume.datasets() == []


@pytest.mark.parametrize(
    "options", [{"layout": "random"}, {"seed": -1}, {"seed": 1 << 64}], ids=lambda o: str(o)
)
def test_malformed_descriptions_leave_no_lock(make_volume, options):
    volume = make_volume()
    with pytest.raises(dlfs.UsageError):
        volume.writer("ds", **options)
    volume.writer("ds").abort()


# ---- space ---------------------------------------------------------------------------------------


def test_space_is_checked_before(make_volume):
    volume = make_volume(4 * MIB)
    with pytest.raises(dlfs.SpaceError, match="free space"):
        volume.writer("ds", expected_bytes=4 * MIB)
    volume.writer("ds", expected_bytes=1 * MIB).abort()


@pytest.mark.parametrize("layout", ["path", "shuffled"])
def test_a_full_volume_stays_as_it_was(make_volume, layout):
    volume = make_volume(4 * MIB)
    with volume.writer("kept") as writer:
        writer.add("a", b"kept")
    free = volume.free_bytes
    with pytest.raises(dlfs.SpaceError):
        write(volume, "ds", ((str(i), bytes(64 * KIB)) for i in range(100)), layout=layout)
    volume.refresh()
    assert volume.free_bytes == free
    assert [d.name for d in volume.datasets()] == ["kept"]
    assert volume["kept"].get("a") == b"kept"


def test_a_full_volume_can_be_emptied(make_volume):
    volume = make_volume(4 * MIB, chunk_bytes=64 * KIB)
    free = volume.free_bytes
    stored = 0
    with contextlib.suppress(dlfs.SpaceError):
        while True:
            write(volume, f"ds{stored}", [("a", bytes(100))])
            stored += 1
    assert stored > 10
    for number in range(stored):
        volume.remove(f"ds{number}")
    assert volume.free_bytes == free


# ---- the end -------------------------------------------------------------------------------------


def test_an_exception_aborts(make_volume):
    volume = make_volume()

    def interrupted():
        yield "a", b"1"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(volume, "ds", interrupted())
    assert volume.datasets() == []
    assert volume.generation == 1
    volume.writer("ds").abort()  # the lock is free


def test_seal_returns_the_dataset_that_it_made(make_volume):
    volume = make_volume()
    writer = volume.writer("ds", layout="path", seed=7)
    writer.add("a", b"12345")
    info = writer.seal()
    assert (info.name, info.version, info.sample_count, info.sample_bytes) == ("ds", 1, 1, 5)
    assert (info.layout, info.seed) == ("path", 7)
    assert volume.datasets() == [info]
    writer.abort()  # does nothing
    with pytest.raises(dlfs.ClosedError, match="sealed"):
        writer.add("b", b"")
    with pytest.raises(dlfs.ClosedError, match="sealed"):
        writer.seal()
    assert volume.datasets() == [info]


def test_an_aborted_writer_is_closed(make_volume):
    writer = make_volume().writer("ds")
    writer.abort()
    writer.abort()
    with pytest.raises(dlfs.ClosedError, match="aborted"):
        writer.add_batch([], b"", np.empty(0), np.empty(0))


def test_the_same_name_again_is_a_new_version(make_volume):
    volume = make_volume()
    for content in (b"old", b"new"):
        with volume.writer("ds") as writer:
            writer.add("a", content)
    assert [d.version for d in volume.datasets()] == [1, 2]
    assert volume["ds"].get("a") == b"new"
    assert volume.dataset("ds", 1).get("a") == b"old"
    volume.remove("ds", 2)
    with volume.writer("ds") as writer:
        writer.add("a", b"newer")
    assert [d.version for d in volume.datasets()] == [1, 3]  # 2 was another one
    volume.remove("ds")
    with volume.writer("ds") as writer:
        writer.add("a", b"newest")
    assert [d.version for d in volume.datasets()] == [4]


def test_versions_are_counted_for_each_name(make_volume):
    volume = make_volume()
    for name in ("b", "b", "a", "c", "a", "c", "b"):
        write(volume, name, [("x", b"x")])
    got = [(d.name, d.version) for d in volume.datasets()]
    assert got == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 3), ("c", 1), ("c", 2)]


def test_a_second_writer_gets_an_error_that_names_the_first(make_volume):
    volume = make_volume()
    write(volume, "kept", [])
    with volume.writer("first"):
        with pytest.raises(dlfs.LockedError, match="dlfs writing dataset 'first'"):
            volume.writer("second")
        with pytest.raises(dlfs.LockedError, match="dlfs writing dataset 'first'"):
            volume.remove("kept")
    volume.writer("second").abort()


def test_a_failure_half_way_aborts(make_volume):
    volume = make_volume()
    writer = volume.writer("ds", layout="path")
    writer.add("a/b", b"1")
    with pytest.raises(dlfs.ExistsError):
        writer.add_batch([b"a"], b"2", np.array([0]), np.array([1]))
    with pytest.raises(dlfs.ClosedError, match="aborted"):
        writer.seal()
    assert volume.datasets() == []


@pytest.mark.parametrize("source_shuffled", [False, True])
def test_images_leave_little_of_their_chunks_unused(tmp_path, source_shuffled):
    lengths = np.random.default_rng(1).lognormal(11.5, 0.5, 200).astype(np.int64)
    with dlfs.open(new_volume(tmp_path / "volume.img", size_bytes=64 * MIB)) as volume:
        with volume.writer("images", source_shuffled=source_shuffled) as writer:
            writer.add_batch(
                [b"%03d" % i for i in range(200)],
                np.zeros(int(lengths.max()), np.uint8),
                np.zeros(200, np.int64),
                lengths,
            )
        info = volume["images"].info
        assert info.stored_bytes < 1.2 * info.sample_bytes
