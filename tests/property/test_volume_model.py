"""A volume behaves as a dictionary of dictionaries does, in whatever order things are done."""

import uuid

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import dlfs
from dlfs.base.units import KIB, MIB
from dlfs.block import MemoryDevice

NAMES = st.sampled_from(["one", "two", "d\u00e9j\u00e0 vu"])
COMPONENTS = st.binary(min_size=1, max_size=6).filter(
    lambda raw: not set(raw) & {0, 0x2F} and raw not in (b".", b"..")
)
PATHS = st.lists(COMPONENTS, min_size=1, max_size=3).map(b"/".join)
SIZES = st.one_of(st.integers(0, 300), st.integers(0, 5000), st.sampled_from([4096, 8192, 20_000]))


def without_clashes(samples):
    """Drop paths that are directories of others."""
    return {
        path: data
        for path, data in samples.items()
        if not any(other.startswith(path + b"/") for other in samples)
    }


SAMPLES = st.dictionaries(PATHS, st.builds(lambda n, b: bytes([b]) * n, SIZES, st.integers(0, 255)))


class VolumeMachine(RuleBasedStateMachine):
    """Writes, removes, reopens; after every step all contents are compared."""

    def __init__(self):
        super().__init__()
        self.model = {}
        self.last = {}
        self.names = []
        self.volume = None

    @initialize(
        members=st.integers(1, 3),
        chunk_bytes=st.sampled_from([4 * KIB, 16 * KIB]),
        block_bytes=st.sampled_from([512, 4 * KIB]),
        replicas=st.integers(1, 3),
    )
    def start(self, members, chunk_bytes, block_bytes, replicas):
        self.replicas = min(replicas, members)
        self.size = MIB + 2 * MIB * self.replicas // members // 4096 * 4096
        uris = [self.make_uri() for _ in range(members)]
        dlfs.format_volume(
            uris, chunk_bytes=chunk_bytes, block_bytes=block_bytes, replicas=self.replicas
        )
        self.volume = dlfs.open(uris)
        self.free = self.volume.free_bytes

    def make_uri(self):
        self.names.append(f"model-{uuid.uuid4().hex}")
        return f"mem:{self.names[-1]}?size={self.size}"

    @rule(
        name=NAMES,
        samples=SAMPLES.map(without_clashes),
        layout=st.sampled_from(["path", "shuffled"]),
        seed=st.integers(0, 3),
        stage_bytes=st.sampled_from([100, 10_000, None]),
        batched=st.booleans(),
    )
    def write(self, name, samples, layout, seed, stage_bytes, batched):
        writer = self.volume.writer(name, layout=layout, seed=seed, stage_bytes=stage_bytes)
        if batched and samples:
            lengths = np.array([len(data) for data in samples.values()])
            data = b"".join(samples.values())
            writer.add_batch(list(samples), data, np.cumsum(lengths) - lengths, lengths)
        else:
            for path, data in samples.items():
                writer.add(path, data)
        info = writer.seal()
        assert info.version == self.last.get(name, 0) + 1
        self.last[name] = info.version
        self.model[name, info.version] = samples

    @rule(name=NAMES, samples=SAMPLES.map(without_clashes))
    def abort(self, name, samples):
        writer = self.volume.writer(name, stage_bytes=100)
        for path, data in samples.items():
            writer.add(path, data)
        writer.abort()

    @rule(name=NAMES)
    def overfill(self, name):
        with pytest.raises(dlfs.SpaceError), self.volume.writer(name, layout="path") as writer:
            writer.add("x", bytes(self.volume.capacity_bytes))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        name, version = data.draw(st.sampled_from(sorted(self.model)))
        if data.draw(st.booleans()):
            self.volume.remove(name, version)
            del self.model[name, version]
        else:
            self.volume.remove(name)
            self.model = {key: value for key, value in self.model.items() if key[0] != name}

    @precondition(lambda self: self.model)
    @rule(data=st.data(), new_name=NAMES)
    def rename(self, data, new_name):
        name, version = data.draw(st.sampled_from(sorted(self.model)))
        alone = data.draw(st.booleans())
        if any(key[0] == new_name for key in self.model):
            with pytest.raises(dlfs.ExistsError):
                self.volume.rename(name, new_name)
            return
        moved = [key for key in sorted(self.model) if key[0] == name]
        if alone:
            moved = [(name, version)]
        more = max(0, self.last.get(new_name, 0) + 1 - moved[0][1])
        self.volume.rename(f"{name}@{version}" if alone else name, new_name)
        for key in moved:
            self.model[new_name, key[1] + more] = self.model.pop(key)
        self.last[new_name] = moved[-1][1] + more

    @precondition(lambda self: self.model)
    @rule(data=st.data(), keep=st.integers(1, 2))
    def prune(self, data, keep):
        name, _ = data.draw(st.sampled_from(sorted(self.model)))
        doomed = [key for key in sorted(self.model) if key[0] == name][:-keep]
        pruned = self.volume.prune(name, keep=keep)
        assert [(info.name, info.version) for info in pruned] == doomed
        for key in doomed:
            del self.model[key]

    @rule()
    def reopen(self):
        uri = self.volume.uri
        self.volume.close()
        self.volume = dlfs.open(list(reversed(uri.split(","))))

    @precondition(lambda self: self.volume is not None and self.replicas > 1)
    @rule(data=st.data())
    def lose(self, data):
        """Read the volume without members: one fewer is missing than there are copies."""
        uris = self.volume.uri.split(",")
        left = data.draw(st.permutations(uris))[self.replicas - 1 :]
        with dlfs.open(left) as volume:
            assert self.contents(volume) == self.model
            with pytest.raises(dlfs.DegradedError):
                volume.writer("more")

    @precondition(lambda self: self.volume is not None and self.replicas > 1)
    @rule(data=st.data())
    def replace(self, data):
        """A member is lost for good, and another device takes its place."""
        uris = self.volume.uri.split(",")
        number = data.draw(st.integers(0, len(uris) - 1))
        self.volume.close()
        uris[number] = self.make_uri()
        left = uris[:number] + uris[number + 1 :]
        report = dlfs.repair(left, replacements={number: uris[number]})
        assert (report.uri, report.damaged) == (",".join(uris), ())
        self.volume = dlfs.open(uris)

    @invariant()
    def same(self):
        if self.volume is None:
            return
        assert self.contents(self.volume) == self.model
        stored = sum(info.stored_bytes for info in self.volume.datasets())
        assert self.volume.free_bytes == self.free - stored

    def contents(self, volume):
        found = {}
        for info in volume.datasets():
            with volume.dataset(info.name, info.version) as dataset:
                paths = dataset.paths()
                found[info.name, info.version] = dict(zip(paths, dataset[:].to_list(), strict=True))
                assert paths == sorted(paths)
                assert dataset.index_of(paths).tolist() == list(range(len(paths)))
                assert info.sample_bytes == sum(
                    map(len, self.model[info.name, info.version].values())
                )
        return found

    def teardown(self):
        if self.volume is not None:
            assert list(self.volume.verify()) == []
            self.volume.close()
        for name in self.names:
            MemoryDevice.forget(name)


TestVolume = VolumeMachine.TestCase
TestVolume.settings = settings(
    max_examples=25,
    stateful_step_count=12,
    suppress_health_check=list(HealthCheck),
)
