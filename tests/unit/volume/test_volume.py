import multiprocessing
import os
import pickle
import re
import uuid
from pathlib import Path

import numpy as np
import pytest

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import MemoryDevice
from dlfs.format.geometry import superblock_offsets
from dlfs.store import transaction
from tests.odd_names import old_writer
from tests.support.descriptors import count_below
from tests.support.forked import call_forked, run_forked
from tests.support.volumes import new_volume, write_dataset

SAMPLES = {f"d{i % 3}/s{i:03}".encode(): bytes([i]) * (i * 37) for i in range(100)}
ORDERED = [SAMPLES[path] for path in sorted(SAMPLES)]


@pytest.fixture
def memory():
    """Makes URIs of new devices in memory, forgotten at the end."""
    names = []

    def make(size_bytes=8 * MIB, block_bytes=512):
        names.append(f"test-{uuid.uuid4().hex}")
        return f"mem:{names[-1]}?size={size_bytes}&block={block_bytes}"

    yield make
    for name in names:
        MemoryDevice.forget(name)


@pytest.fixture
def volume(memory):
    """A volume of three members with a dataset ``ds``."""
    uris = new_volume([memory(4 * MIB) for _ in range(3)], chunk_bytes=16 * KIB, label="test")
    with dlfs.open(uris) as opened:
        write(opened, "ds")
        yield opened


def write(volume, name, samples=SAMPLES, **options):
    write_dataset(volume, name, samples, **options)


def overwrite(uri, offset_bytes, data):
    device = open_memory(uri)
    block = offset_bytes - offset_bytes % device.block_bytes
    length = -(-(offset_bytes + len(data) - block) // device.block_bytes) * device.block_bytes
    content = bytearray(device.read(block, length))
    content[offset_bytes - block : offset_bytes - block + len(data)] = data
    device.write(block, bytes(content))
    device.close()


def open_memory(uri):
    return MemoryDevice(uri.removeprefix("mem:").partition("?")[0], writable=True)


def flip(uri, offset_bytes):
    device = open_memory(uri)
    block = offset_bytes - offset_bytes % device.block_bytes
    (old,) = device.read(block, device.block_bytes)[offset_bytes - block :][:1]
    device.close()
    overwrite(uri, offset_bytes, bytes([old ^ 1]))


# ---- formatting ----------------------------------------------------------------------------------


def test_format_returns_the_volume_that_it_made(memory):
    uris = [memory(), memory(9 * MIB)]
    info = dlfs.format_volume(uris, label="a label", chunk_bytes=64 * KIB)
    assert (info.label, info.generation, info.dataset_count) == ("a label", 1, 0)
    assert (info.chunk_bytes, info.block_bytes) == (64 * KIB, 4 * KIB)
    assert info.capacity_bytes - info.free_bytes == 64 * KIB
    assert [member.number for member in info.members] == [0, 1]
    states = [[copy.state for copy in member.superblocks] for member in info.members]
    assert states == [["unused", "current", "current"]] * 2
    with dlfs.open(info.uri) as opened:
        assert opened.info() == info
        assert list(opened.verify()) == []


def test_format_makes_files(tmp_path):
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    info = dlfs.format_volume(paths, size_bytes=4 * MIB + 5)
    assert [member.size_bytes for member in info.members] == [4 * MIB] * 2
    with dlfs.open(paths) as opened:
        write(opened, "ds")
        assert opened["ds"][:].to_list() == ORDERED


def test_format_wants_a_size_for_new_files(tmp_path):
    with pytest.raises(dlfs.UsageError, match="with a size it is made"):
        dlfs.format_volume(str(tmp_path / "a"))


def test_format_sizes_an_empty_file(tmp_path):
    (tmp_path / "a").touch()
    dlfs.format_volume(str(tmp_path / "a"), size_bytes=4 * MIB)
    assert (tmp_path / "a").stat().st_size == 4 * MIB


def test_a_failed_format_removes_the_files_it_made(tmp_path):
    with pytest.raises(dlfs.UsageError, match="too small"):
        dlfs.format_volume(str(tmp_path / "a"), size_bytes=1 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_format_keeps_a_volume(volume):
    with pytest.raises(dlfs.ExistsError, match=f"member of volume {volume.uuid}"):
        dlfs.format_volume(volume.uri)
    assert volume["ds"][0] == ORDERED[0]


@pytest.mark.parametrize("offset_bytes", [100, 8 * MIB - 100])
def test_format_refuses_devices_with_unknown_data(memory, offset_bytes):
    uri = memory()
    open_memory_and_make(uri)
    overwrite(uri, offset_bytes, b"value")
    with pytest.raises(dlfs.ExistsError, match="expected an empty device"):
        dlfs.format_volume(uri)
    dlfs.format_volume(uri, force=True)


def open_memory_and_make(uri):
    dlfs.block.open_device(uri).close()


def test_format_keeps_a_file_of_another_size(tmp_path):
    (tmp_path / "a").write_bytes(bytes(5 * MIB))
    with pytest.raises(dlfs.ExistsError, match=r"; force=True overwrites it"):
        dlfs.format_volume(str(tmp_path / "a"), size_bytes=4 * MIB)
    assert (tmp_path / "a").stat().st_size == 5 * MIB


def test_a_forced_format_leaves_nothing_of_the_old_volume(volume):
    for _ in range(3):
        write(volume, "more")
    old = volume.uuid
    info = dlfs.format_volume(volume.uri, chunk_bytes=16 * KIB, force=True)
    assert info.uuid != old
    assert info.generation == 1
    with dlfs.open(info.uri) as opened:
        assert opened.datasets() == []


def test_format_respects_a_writer(volume):
    with volume.writer("x"), pytest.raises(dlfs.LockedError, match="writing dataset 'x'"):
        dlfs.format_volume(volume.uri, force=True)


@pytest.mark.parametrize(
    "options",
    [{"chunk_bytes": 5000}, {"block_bytes": 256}, {"label": "x" * 65}, {"chunk_bytes": 4 * MIB}],
    ids=str,
)
def test_format_refuses_impossible_sizes(memory, options):
    with pytest.raises(dlfs.UsageError):
        dlfs.format_volume(memory(), **options)


def test_format_refuses_a_device_whose_blocks_do_not_fit(memory):
    with pytest.raises(dlfs.UsageError, match="device block"):
        dlfs.format_volume(memory(block_bytes=4096), block_bytes=512)


def test_format_refuses_a_disk_in_use():
    mounts = (line.split()[0] for line in Path("/proc/mounts").read_text().splitlines())
    mounted = next((name for name in mounts if Path(name).is_block_device()), None)
    if mounted is None:
        pytest.skip("no mounted disk is visible here")
    with pytest.raises(dlfs.UsageError, match=r"the system uses it: .* is mounted"):
        dlfs.format_volume(mounted, force=True)


# ---- opening -------------------------------------------------------------------------------------


def test_members_in_any_order(volume):
    a, b, c = volume.uri.split(",")
    for uris in ([c, a, b], f"{b}, {c},{a}"):
        with dlfs.open(uris) as opened:
            assert opened.uri == volume.uri
            assert opened["ds"][:].to_list() == ORDERED


def test_a_missing_member_is_named(volume):
    a, _, c = volume.uri.split(",")
    missing = volume.members[1].uuid
    with pytest.raises(dlfs.NotFoundError, match=rf"missing: 1 \({missing}\)"):
        dlfs.open([a, c])


def test_a_foreign_member_is_named(volume, memory):
    other = new_volume(memory(), chunk_bytes=16 * KIB)
    a, b, _ = volume.uri.split(",")
    with pytest.raises(
        dlfs.UsageError, match=f"open {re.escape(other.split('&')[0])}.*expected a member"
    ):
        dlfs.open([a, b, other])


def test_a_member_given_twice(volume):
    a, b, c = volume.uri.split(",")
    with pytest.raises(dlfs.UsageError, match="got the device of"):
        dlfs.open([a, b, c, a])


def test_a_copy_of_a_member(volume, memory):
    a, b, c = volume.uri.split(",")
    twin = memory(4 * MIB)
    open_memory_and_make(twin)
    device = open_memory(a)
    overwrite(twin, 0, device.read(0, device.size_bytes))
    device.close()
    with pytest.raises(dlfs.UsageError, match="expected each member once, got number 0"):
        dlfs.open([a, b, c, twin])


def test_a_device_without_a_volume(memory):
    with pytest.raises(dlfs.FormatError, match=r"no DLFS volume: expected a superblock at"):
        dlfs.open(memory())


def test_a_device_with_damaged_superblocks_only(memory):
    uri = new_volume(memory(4 * MIB))
    for offset in (100, 64 * KIB + 100, 4 * MIB - 4096 + 100):
        flip(uri, offset)
    with pytest.raises(dlfs.FormatError, match=r"in one of three places, got A: .* B: .* tail: "):
        dlfs.open(uri)


def test_a_truncated_member(tmp_path):
    path = new_volume(tmp_path / "a", size_bytes=8 * MIB)
    os.truncate(path, 7 * MIB)
    with pytest.raises(dlfs.TruncatedError, match=f"expected a member of {8 * MIB} bytes"):
        dlfs.open(str(path))


def test_a_grown_member(tmp_path):
    path = tmp_path / "a"
    dlfs.format_volume(str(path), size_bytes=8 * MIB)
    os.truncate(path, 9 * MIB)
    with dlfs.open(str(path)) as opened:
        write(opened, "ds")
        assert list(opened.verify()) == []


@pytest.mark.parametrize("copy", [0, 1, 2])
def test_one_damaged_superblock_does_no_harm(volume, copy):
    uri = volume.uri.split(",")[1]
    offset = superblock_offsets(4 * MIB)[copy]
    flip(uri, offset + 200)
    with dlfs.open(volume.uri) as opened:
        assert opened.generation == volume.generation
        assert opened["ds"][:].to_list() == ORDERED
        damaged = opened.members[1].superblocks[copy]
        assert damaged.state == "damaged"
        assert "CRC32C" in damaged.problem
        (finding,) = opened.verify()
        assert (finding.kind, finding.member) == ("superblock", uri)
        assert finding.offset_bytes == offset
        write(opened, "ds")  # repairs it, or writes the next generation over it
        write(opened, "ds")
        assert list(opened.verify()) == []


def test_all_superblocks_of_a_member_damaged(volume):
    uri = volume.uri.split(",")[1]
    for offset in superblock_offsets(4 * MIB):
        flip(uri, offset + 200)
    with pytest.raises(dlfs.FormatError, match=uri.split("?")[0]):
        dlfs.open(volume.uri)


def test_a_lagging_member_is_brought_up_to_date(volume):
    """A crash between the members: member 2 has the generation before, everywhere."""
    uri = volume.uri.split(",")[2]
    device = open_memory(uri)
    before = [device.read(offset, 4096) for offset in superblock_offsets(4 * MIB)]
    device.close()
    write(volume, "more")
    for offset, content in zip(superblock_offsets(4 * MIB), before, strict=True):
        overwrite(uri, offset, content)
    with dlfs.open(volume.uri) as opened:
        assert opened.generation == volume.generation
        states = [copy.state for copy in opened.members[2].superblocks]
        assert "stale" in states
        write(opened, "again")
        assert list(opened.verify()) == []
        assert len(opened.datasets()) == 3


def test_a_damaged_catalog(volume):
    with dlfs.open(volume.uri) as opened:
        chunk = opened.session.superblock.catalog_runs[0].first_chunk
    row, member = divmod(chunk, 3)
    flip(volume.uri.split(",")[member], MIB + row * 16 * KIB + 100)
    with pytest.raises(dlfs.ChecksumError, match="read the catalog"):
        dlfs.open(volume.uri)


# ---- datasets ------------------------------------------------------------------------------------


def test_the_only_dataset_needs_no_name(volume):
    assert volume.dataset().name == "ds"
    write(volume, "other")
    with pytest.raises(dlfs.UsageError, match="one of: 'ds' and 'other'"):
        volume.dataset()


def test_what_is_not_there(volume):
    with pytest.raises(dlfs.NotFoundError, match="'nope'"):
        volume["nope"]
    with pytest.raises(dlfs.NotFoundError, match="'ds' version 3"):
        volume.dataset("ds", 3)
    with pytest.raises(dlfs.NotFoundError):
        volume.remove("nope")
    assert "ds" in volume
    assert "nope" not in volume
    assert 3 not in volume


def test_an_empty_volume_has_no_dataset(memory):
    info = dlfs.format_volume(memory())
    with dlfs.open(info.uri) as opened, pytest.raises(dlfs.NotFoundError, match="has none yet"):
        opened.dataset()


def test_indexing(volume):
    dataset = volume["ds"]
    assert len(dataset) == 100
    assert dataset[0] == ORDERED[0]
    assert dataset[-1] == ORDERED[-1]
    assert dataset[np.int64(5)] == ORDERED[5]
    assert dataset[3:7].to_list() == ORDERED[3:7]
    assert dataset[[5, -1]].to_list() == [ORDERED[5], ORDERED[-1]]
    mask = np.zeros(100, bool)
    mask[[2, 4]] = True
    assert dataset[mask].to_list() == [ORDERED[2], ORDERED[4]]
    for wrong in (100, -101, mask[:5], [100], [0, -101]):
        with pytest.raises(IndexError):
            dataset[wrong]
    with pytest.raises(dlfs.UsageError):
        dataset.read([100])


def test_looking_up(volume):
    dataset = volume["ds"]
    paths = sorted(SAMPLES)
    assert dataset.paths() == paths
    assert dataset.paths(5, 2) == paths[5:7]
    assert dataset.path(-1) == paths[-1]
    assert dataset.index(paths[7]) == 7
    assert dataset.index_of([paths[3], b"nope", paths[0].decode()]).tolist() == [3, -1, 0]
    assert dataset.lower_bound(b"d1") == 34
    assert dataset.lengths([1, 2]).tolist() == [len(ORDERED[1]), len(ORDERED[2])]
    assert paths[3] in dataset
    assert "nope" not in dataset
    assert 5 not in dataset
    assert [e.name for e in dataset.children()] == [b"d0", b"d1", b"d2"]
    assert dataset.get(paths[9].decode()) == ORDERED[9]
    with pytest.raises(dlfs.NotFoundError, match="'nope'"):
        dataset.get("nope")


def test_stat_tells_where_a_sample_lies(volume):
    dataset = volume["ds"]
    for index in (1, 50, 99):
        info = dataset.stat(index)
        assert info.length_bytes == len(ORDERED[index])
        device = open_memory(info.member)
        start = info.offset_bytes // 512 * 512
        content = device.read(start, 16 * KIB)[info.offset_bytes - start :]
        device.close()
        assert content[: info.length_bytes] == ORDERED[index]


def test_every_order_of_an_epoch_gives_every_sample_once(volume):
    dataset = volume["ds"]
    for shuffle in ("global", "chunk", None):
        with dataset.batches(7, shuffle=shuffle, seed=3) as epoch:
            indices = np.concatenate([batch.indices.copy() for batch in epoch])
        assert sorted(indices.tolist()) == list(range(100))
        order = dataset.sequence(shuffle=shuffle, seed=3)
        assert len(order) == 100
        assert order.indices().tolist() == indices.tolist()


def test_info_of_a_dataset(volume):
    dataset = volume["ds"]
    assert dataset.info == volume.datasets()[0]
    assert dataset.sample_bytes == sum(map(len, ORDERED))
    assert dataset.info.stored_bytes % volume.chunk_bytes == 0


# ---- changes seen by others ----------------------------------------------------------------------


def test_refresh_finds_the_datasets_of_another_writer(volume):
    with dlfs.open(volume.uri) as other:
        write(volume, "new")
        assert "new" not in other
        other.refresh()
        assert other["new"][1] == ORDERED[1]


def test_a_reader_goes_on_while_others_write(volume):
    dataset = volume["ds"]
    for number in range(3):
        write(volume, f"new{number}")
        assert dataset[:].to_list() == ORDERED


def test_removed_space_is_reused_only_by_later_writers(volume):
    free = volume.free_bytes
    volume.remove("ds")
    assert volume.free_bytes > free
    assert volume.datasets() == []


def test_a_removed_dataset_is_stale_once_overwritten(volume):
    dataset = volume.dataset("ds")
    with dlfs.open(volume.uri) as other:
        volume.remove("ds")
        with pytest.raises(dlfs.StaleError, match="dataset 'ds' version 1"):
            other.dataset("ds")
        half = {b"x": bytes(volume.free_bytes // 2)}
        write(volume, "filler", half)
        write(volume, "more", {b"x": bytes(volume.free_bytes // 2)})
    with pytest.raises(dlfs.StaleError, match="was removed"):
        dataset.read(np.arange(100))


def test_versions_are_removed_one_by_one(volume):
    write(volume, "ds", {b"a": b"new"})
    volume.remove("ds", 1)
    assert [d.version for d in volume.datasets()] == [2]
    assert volume["ds"][0] == b"new"
    write(volume, "ds")
    volume.remove("ds")
    assert volume.datasets() == []


def test_freed_space_is_all_found_again(volume):
    volume.remove("ds")
    free = volume.free_bytes
    for number in range(20):
        write(volume, "ds", {b"x": bytes(10_000 * number)})
        volume.remove("ds")
        assert volume.free_bytes == free


# ---- damage --------------------------------------------------------------------------------------


def test_a_damaged_sample_is_named(volume):
    dataset = volume["ds"]
    place = dataset.stat(60)
    flip(place.member, place.offset_bytes + 5)
    path = dataset.path(60)
    with pytest.raises(dlfs.ChecksumError) as caught:
        dataset[60]
    for part in (
        "'ds'",
        repr(path.decode()),
        place.member,
        str(place.offset_bytes),
        f"{place.crc32c:08x}",
    ):
        assert part in str(caught.value)
    assert dataset[61] == ORDERED[61]
    (finding,) = volume.verify()
    assert (finding.kind, finding.dataset, finding.version) == ("sample", "ds", 1)
    assert (finding.path, finding.index) == (path, 60)
    assert (finding.member, finding.offset_bytes) == (place.member, place.offset_bytes)
    assert f"{place.crc32c:#010x}" in str(finding)


def test_bad_samples_can_be_skipped_or_replaced(volume):
    dataset = volume["ds"]
    place = dataset.stat(60)
    flip(place.member, place.offset_bytes)
    skipped = dataset.read([59, 60, 61], on_error="skip")
    assert skipped.to_list() == [ORDERED[59], ORDERED[61]]
    assert skipped.failures[0].index == 60
    replaced = dataset.read([59, 60], on_error="replace")
    assert replaced.to_list() == [ORDERED[59], ORDERED[61]]


def test_verify_tells_its_progress(volume):
    told = []
    assert list(volume.verify(progress=lambda done, total: told.append((done, total)))) == []
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}


def test_verify_one_dataset(volume):
    write(volume, "other")
    place = volume["other"].stat(60)
    flip(place.member, place.offset_bytes)
    assert list(volume.verify("ds")) == []
    assert len(list(volume.verify("other", 1))) == 1
    with pytest.raises(dlfs.NotFoundError):
        volume.verify("nope")


# ---- lives ---------------------------------------------------------------------------------------


def test_closed_things_say_so(volume):
    dataset = volume["ds"]
    dataset.close()
    dataset.close()
    with pytest.raises(dlfs.ClosedError):
        dataset[0]
    with dlfs.open(volume.uri) as other:
        kept = other["ds"]
    other.close()
    with pytest.raises(dlfs.ClosedError):
        other.datasets()
    assert kept[1] == ORDERED[1]


def test_pickles(volume):
    dataset = pickle.loads(pickle.dumps(volume["ds"]))
    assert dataset[:].to_list() == ORDERED
    assert pickle.loads(pickle.dumps(volume)).datasets() == volume.datasets()
    late = pickle.dumps(dataset)
    volume.remove("ds")
    with pytest.raises(dlfs.StaleError):
        pickle.loads(late)[0]


def _in_child(dataset, volume, results):
    results.put((dataset[5], len(volume.datasets()), dataset[:].to_list()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_process_reads(tmp_path, method):
    path = new_volume(str(tmp_path / "volume"), size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    context = multiprocessing.get_context(method)
    with dlfs.open(path) as opened:
        write(opened, "ds")
        with opened["ds"] as dataset:
            assert dataset[5] == ORDERED[5]
            results = context.SimpleQueue()
            child = context.Process(target=_in_child, args=(dataset, opened, results))
            child.start()
            assert results.get() == (ORDERED[5], 1, ORDERED)
            child.join()
            assert child.exitcode == 0
            assert dataset[6] == ORDERED[6]
            assert opened.datasets()[0].name == "ds"


def test_an_epoch_goes_on_in_a_forked_child(tmp_path):
    path = str(tmp_path / "volume")
    dlfs.format_volume(path, size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(path) as opened:
        write(opened, "ds")
        with opened["ds"] as dataset, dataset.batches(10, seed=1) as epoch:
            first = next(epoch).indices.tolist()

            def go_on():
                second = next(epoch)
                assert second.to_list() == [ORDERED[i] for i in second.indices]
                assert not set(first) & set(second.indices.tolist())

            assert run_forked(go_on) == 0
            assert not set(first) & set(next(epoch).indices.tolist())


def test_a_forked_child_refreshes_whatever_its_parent_was_at(tmp_path):
    path = str(tmp_path / "volume")
    dlfs.format_volume(path, size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(path) as opened:

        def refresh():  # it must not wait for a thread that it has not got
            opened.refresh()
            assert opened.datasets() == []

        with opened._mutex:  # as another thread of the parent may hold it
            assert run_forked(refresh) == 0


# ---- names ---------------------------------------------------------------------------------------


def test_a_name_may_carry_its_version(volume):
    write(volume, "ds", {b"second": b"2"})
    assert [volume[name].version for name in ("ds", "ds@1", b"ds@2")] == [2, 1, 2]
    assert [volume.dataset(name).version for name in ("ds@1", "ds@2")] == [1, 2]
    assert [name in volume for name in ("ds@1", "ds@2", "ds@3", "ds@0", "..", "a/b", "@1")] == [
        True, True, False, False, False, False, False,
    ]  # fmt: skip
    assert [info.version for info in volume.versions("ds")] == [1, 2]
    assert [info.version for info in volume.versions("ds@2")] == [2]
    assert list(volume.verify("ds@1")) == []
    with pytest.raises(dlfs.NotFoundError, match="'ds' version 3"):
        volume["ds@3"]
    with pytest.raises(dlfs.NotFoundError, match="'ds@1' version 1"):
        volume.dataset("ds@1", 1)
    volume.remove("ds@1")
    assert [info.version for info in volume.datasets()] == [2]


def test_an_old_name_with_a_version_in_it_is_still_read(volume):
    with old_writer(volume, "ds@1") as writer:
        writer.add("decoy", b"")
    assert len(volume["ds@1"]) == 1
    assert volume.dataset("ds", 1).version == 1
    assert len(volume["ds@1@1"]) == 1
    volume.remove("ds@1")
    assert len(volume["ds@1"]) == len(SAMPLES)


@pytest.mark.parametrize("name", ["a@1", "--help", "a\nb", "incoming", b"a\xff", "a/b", ""])
def test_a_new_name_that_cannot_be_used_is_refused_before_anything_is_written(volume, name):
    before = volume.generation
    with pytest.raises(dlfs.UsageError, match="a dataset's name is 1 to 244 bytes"):
        volume.writer(name)
    write(volume, "next")  # nothing is locked
    assert volume.generation == before + 1


def test_the_datasets_of_a_volume_share_a_budget_in_each_process(tmp_path):
    path, budget = str(tmp_path / "v.img"), 256 * KIB
    dlfs.format_volume(path, size_bytes=16 * MIB, chunk_bytes=16 * KIB)
    samples = {b"%d" % i: np.random.default_rng(i).bytes(4000) for i in range(256)}
    with dlfs.open(path, memory_bytes=budget) as opened:
        write(opened, "one", samples)
        write(opened, "two", samples)
        with opened["one"] as one, opened["two"] as two, opened["one"] as again:
            for number, dataset in enumerate((one, two, again)):
                assert fill(opened, dataset, budget) == number + 1
            assert call_forked(fill, opened, one, budget) == 1
            assert memory_of(opened)["readers"] == 3
        assert memory_of(opened) is None  # freed with the last dataset


def memory_of(volume):
    """The counters of the memory that the datasets of a volume share in this process."""
    return volume.session.connection.options.memory.stats()


def fill(volume, dataset, budget):
    """Read a dataset, check that it uses the budget, and return how many datasets share that."""
    for batch in dataset.batches(16):
        batch.release()
    with dataset.read(range(16)):
        memory = memory_of(volume)
    assert memory["memory_bytes"] == budget
    assert 16 * 4000 < memory["held_bytes"] <= budget
    return memory["readers"]


@pytest.mark.parametrize("shuffle", ["global", "chunk", None])
def test_a_dataset_without_samples_has_an_epoch_beside_much_memory(tmp_path, shuffle):
    path = new_volume(str(tmp_path / "v.img"), size_bytes=16 * MIB)
    with dlfs.open(path, memory_bytes=256 * MIB) as opened:
        write(opened, "empty", {b"none": b""})
        with opened["empty"] as dataset:
            batches = dataset.batches(4, shuffle=shuffle, plan="chunks")
            assert [batch.to_list() for batch in batches] == [[b""]]


def test_a_copy_of_a_dataset_shares_the_memory_in_its_process(tmp_path):
    """A dataset is pickled for a worker, and its copies there are one volume's."""
    path = new_volume(str(tmp_path / "v.img"), size_bytes=16 * MIB, chunk_bytes=16 * KIB)
    samples = {b"%d" % i: np.random.default_rng(i).bytes(4000) for i in range(64)}
    with dlfs.open(path, memory_bytes=256 * KIB) as opened:
        write(opened, "one", samples)
        with opened["one"] as one, pickle.loads(pickle.dumps(one)) as copy:
            for dataset in (one, copy):
                assert dataset[3] == one.read([3]).to_list()[0]
            assert memory_of(opened)["readers"] == 2


# ---- another volume in the place of this one -----------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_a_device_that_holds_another_volume_now_is_named(memory, count):
    uris = new_volume([memory() for _ in range(count)], chunk_bytes=16 * KIB)
    with dlfs.open(uris) as volume:
        write(volume, "ds")
        expected, info = volume.uuid, volume.info()
        with volume["ds"] as dataset:
            # The last member alone is formatted again, and many times committed to.
            found = dlfs.format_volume(uris[-1], chunk_bytes=16 * KIB, force=True).uuid
            with dlfs.open(uris[-1]) as other:
                for name in ("a", "b", "c"):
                    write(other, name, {path: bytes(len(data)) for path, data in SAMPLES.items()})
            told = (
                f"{re.escape(uris[-1].partition('&')[0])} now holds volume {found}, "
                f"expected volume {expected}: it was formatted again, or is another device"
            )
            with pytest.raises(dlfs.StaleError, match=f"read dataset 'ds' version 1 .*: {told}"):
                dataset[:]
        with pytest.raises(dlfs.StaleError, match=f"refresh volume {expected}: {told}"):
            volume.refresh()
        assert volume.info() == info  # what was seen stays
        with pytest.raises(dlfs.StaleError, match=f"read dataset 'ds' version 1 .*: {told}"):
            volume["ds"]


def test_the_datasets_of_a_volume_share_what_they_can(tmp_path, monkeypatch):
    """One descriptor of each file, however many datasets are open, and one catalog."""
    decoded = []
    decode = transaction.decode_catalog
    monkeypatch.setattr(
        transaction, "decode_catalog", lambda *given: decoded.append(given) or decode(*given)
    )
    dlfs.format_volume(tmp_path / "a.img", size_bytes=8 * MIB, chunk_bytes=16 * KIB)
    with dlfs.open(tmp_path / "a.img") as volume:
        for name in "abcde":
            write(volume, name)
        decoded.clear()
        shared = count_below(Path("/dev/shm"))
        datasets = [volume[name] for name in "abcde"]
        for dataset in datasets:
            assert dataset.get("d1/s001") == SAMPLES[b"d1/s001"]
        assert count_below(tmp_path) == 1
        assert count_below(Path("/dev/shm")) - shared <= 2 * len(datasets) + 1
        assert not decoded
        with dlfs.open(tmp_path / "a.img") as other:
            write(other, "f")
        assert volume["a"].get("d1/s001") == SAMPLES[b"d1/s001"]
        assert decoded
        for dataset in datasets:
            dataset.close()
