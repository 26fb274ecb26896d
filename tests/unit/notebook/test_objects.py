"""Pages of volumes, datasets, views, batches and epochs, also of closed and damaged ones."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dlfs
from dlfs.base.units import MIB
from dlfs.notebook import PAGE_BYTES_MAX, THUMBNAILS_MAX, objects
from tests.support.files import write_at
from tests.support.volumes import new_volume

TAGS = {"b", "div", "img", "table", "tbody", "td", "th", "thead", "tr"}
ATTRIBUTES = {"alt", "aria-label", "class", "role", "src", "style", "title"}
NASTY = "<img src=x onerror=alert(1)>\"'&lt;$\\alpha$\u202e"


class Page(HTMLParser):
    """Parses a page; refuses tags, attributes and addresses that no page should have."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images = 0
        self.texts: list[str] = []
        assert len(html.encode()) <= PAGE_BYTES_MAX
        self.feed(html)
        self.close()
        assert not self.open, "all tags are closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        values = dict(attrs)
        assert set(values) <= ATTRIBUTES
        if tag == "img":
            assert (values["src"] or "").startswith("data:image/")
            self.images += 1
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def shown(thing: object) -> Page:
    return Page(thing._repr_html_())  # type: ignore[attr-defined]


def png(grey: int) -> bytes:
    written = io.BytesIO()
    Image.new("L", (8, 8), grey).save(written, "PNG")
    return written.getvalue()


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[dlfs.Volume]:
    with dlfs.open(new_volume(tmp_path / "v.img", size_bytes=64 * MIB, label=NASTY[:28])) as opened:
        with opened.writer("digits") as writer:
            for number in range(100):
                attributes = {"label": number // 10, "name": f"digit {number // 10}"}
                writer.add(f"{number // 10}/{number:03}.png", png(number), attributes=attributes)
        yield opened


def write(volume: dlfs.Volume, name: str, samples: dict, attributes: dict | None = None) -> None:
    with volume.writer(name) as writer:
        for path, data in samples.items():
            writer.add(path, data, attributes=attributes or {})


def damage(dataset: dlfs.Dataset, index: int) -> None:
    place = dataset.stat(index)
    write_at(place.member, place.offset_bytes, b"damage")


# ---- what is shown -------------------------------------------------------------------------------


def test_volumes(volume):
    page = shown(volume)
    assert "digits@1" in page.text
    assert "100" in page.text
    assert "MiB used, generation 2" in page.text
    assert volume.members[0].uri in page.text
    assert "current" in page.text


def test_an_empty_volume(tmp_path):
    with dlfs.open(new_volume(tmp_path / "empty.img", size_bytes=16 * MIB)) as volume:
        assert "no datasets" in shown(volume).text


def test_volumes_with_many_datasets(volume, monkeypatch):
    monkeypatch.setattr(objects, "ROWS_MAX", 2)
    for _ in range(3):
        write(volume, "more", {"a": b"a"})
    with volume["more"]:
        page = shown(volume)
    assert "more@3" in page.text
    assert "digits@1" not in page.text


def test_datasets(volume):
    with volume["digits"] as dataset:
        page = shown(dataset)
        assert page.images == THUMBNAILS_MAX
        assert "100 samples" in page.text
        assert "0, 1, 2, 3, 5, 6, 7, 8" in page.text  # labels of samples from the whole dataset
        assert "digit 0, digit 1" in page.text
        assert dataset.stats()["samples"] <= THUMBNAILS_MAX


def test_samples_that_are_arrays(volume):
    attributes = {"dlfs:dtype": "|u1", "dlfs:shape": "8,6,3"}
    write(volume, "arrays", {f"{i}": bytes([i] * 144) for i in range(5)}, attributes)
    with volume["arrays"] as dataset:
        page = shown(dataset)
        assert page.images == 5
        assert "dlfs:" not in page.text
        assert shown(dataset.read([0, 1])).images == 2


def test_samples_with_fields(volume):
    with volume.writer("scenes") as writer:
        for number in range(3):
            mask = np.full((6, 5 + number), number, np.uint8)
            writer.add(f"{number}", {"image": png(number), "mask": mask, "caption": NASTY[:28]})
    with volume["scenes"] as dataset:
        page = shown(dataset)
        assert page.images == 6
        assert page.text.count("<img src=x onerror=alert(1)>") == 3
        assert "fields: image bytes, mask |u1[?,?], caption text" in page.text
        assert "dlfs:" not in page.text
        assert shown(dataset.read([0, 1], fields=["mask"])).images == 2
        assert shown(dlfs.concat([dataset])).images == 6


def test_samples_that_are_large(volume, monkeypatch):
    monkeypatch.setattr(objects, "SAMPLES_BYTES_MAX", 1024)
    write(volume, "large", {"large": bytes(2048), "small": b"small text"})
    with volume["large"] as dataset:
        page = shown(dataset)
        assert "2.0 KiB: too large to show" in page.text
        assert "small text" in page.text
        assert dataset.stats()["samples"] == 1


def test_columns_that_are_large_are_not_loaded(volume, monkeypatch):
    monkeypatch.setattr(objects, "COLUMN_BYTES_MAX", 100)
    with volume["digits"] as dataset:
        page = shown(dataset)
        assert "4.0 KiB, not loaded" in page.text
        assert "not loaded" in shown(dataset.read([1])).text


def test_empty_datasets_and_batches(volume):
    write(volume, "empty", {})
    with volume["empty"] as dataset:
        assert "no samples" in shown(dataset).text
        assert "0 samples" in shown(dataset.read([])).text


def test_batches(volume):
    with volume["digits"] as dataset:
        page = shown(dataset.read(np.arange(10, 50)))
        assert page.images == THUMBNAILS_MAX
        assert "digit 1" in page.text
        assert "and 32 other samples" in page.text


def test_views(volume):
    write(volume, "others", {f"{i}": b"a text" for i in range(3)}, {"label": 7})
    with volume["digits"] as digits, volume["others"] as others:
        view = dlfs.mix({digits: 0.75, others: 0.25}, seed=1)
        page = shown(view)
        assert "digits@1" in page.text
        assert "75.0%" in page.text
        assert page.images == 4  # some samples of each dataset
        assert page.text.count("a text") == 3
        assert "label" in page.text
        assert "name" not in page.text.split("label")[1]  # a column of one dataset only
        assert "0, 2, 5, 7, 7, 7, 7" in page.text
        with view.read([0, 101]) as batch:
            assert shown(batch).images == 1
        part = dlfs.split(digits, 0.9, by="hash")[0]
        assert "chosen" in shown(part).text


def test_epochs(volume):
    with volume["digits"] as dataset:
        epoch = dataset.batches(10, seed=1)
        assert "no batch taken yet" in shown(epoch).text
        for _ in range(3):
            next(epoch).release()
        page = shown(epoch)
        assert "30 of 100 (30%), 7 batches to come" in page.text
        assert "samples/s" in page.text
        assert "waiting for batches" in page.text
        for batch in epoch:
            batch.release()
        assert "100 of 100 (100%), 0 batches to come" in shown(epoch).text
        progress = epoch.progress
        assert (progress.position, progress.total, progress.batches_left) == (100, 100, 0)
        assert (progress.batches, progress.samples) == (10, 100)
        assert 0 < progress.waited_seconds <= progress.seconds
        epoch.resume(epoch.state())
        assert epoch.progress.batches == 0
        epoch.close()
        assert "closed" in shown(epoch).text


# ---- damage, and what is closed ------------------------------------------------------------------


def test_closed_objects_show_that_they_are(volume):
    dataset = volume["digits"]
    batch = dataset.read([0, 1])
    view = dlfs.concat([dataset])
    batch.release()
    assert "ClosedError: use a batch: it was released" in shown(batch).text
    dataset.close()
    assert "ClosedError: use dataset 'digits': it is closed" in shown(dataset).text
    assert "ClosedError" in shown(view).text
    volume.close()
    assert "it is closed" in shown(volume).text


def test_a_dataset_that_was_unpickled_or_removed(volume):
    with volume["digits"] as dataset, pickle.loads(pickle.dumps(dataset)) as other:
        assert "samples" not in repr(other)  # it is not opened for that
        volume.remove("digits")
        assert "StaleError" in shown(other).text


def test_a_damaged_sample_shows_its_error(volume):
    with volume["digits"] as dataset:
        damage(dataset, 0)
        page = shown(dataset)
        assert page.images == THUMBNAILS_MAX - 1
        assert "expected CRC32C" in page.text
        batch = dataset.read([0, 1], on_error="skip")
        page = shown(batch)
        assert "failed sample" in page.text
        assert "0/000.png" in page.text
        epoch = dataset.batches(10, on_error="skip")
        for one in epoch:
            one.release()
        assert "0/000.png" in shown(epoch).text


def test_a_dataset_whose_device_is_gone(volume, tmp_path):
    with volume["digits"] as dataset:
        with open(tmp_path / "v.img", "r+b") as member:
            member.truncate(1 << 20)
        page = shown(dataset)
        assert page.images == 0


# ---- what media contain --------------------------------------------------------------------------


def test_nothing_from_media_becomes_html(volume):
    attributes = {NASTY: 1, "text": NASTY + "\0", "<b>": f"</td>{NASTY}"}
    samples = {f"{NASTY}/{NASTY}{i}".encode(): NASTY.encode() for i in range(3)}
    samples[b"\xff\n<script>"] = b'\x89PNG\r\n\x1a\n"><script>'
    write(volume, "<script>alert(1)<\\script>", samples, attributes)
    with volume["<script>alert(1)<\\script>"] as dataset:
        assert "<img src=x onerror" in shown(dataset).text  # as text
        view = dlfs.concat([dataset])
        epoch = dataset.batches(2)
        shown(view)
        shown(next(epoch))
        shown(epoch)
        damage(dataset, 0)
        shown(dataset)
        shown(dataset.read([0, 1], on_error="skip"))
    shown(volume)


def test_pages_of_the_longest_names_and_values_are_bounded(volume):
    long = "&" * 5000
    attributes = {f"{i:03}{'<' * 60}": long for i in range(40)}
    samples = {b"&" * 250 + b"/%d" % i: b"&" * 5000 for i in range(20)}
    for _ in range(3):
        write(volume, "&" * 240, samples, attributes)
    with volume["&" * 240] as dataset:
        for thing in (volume, dataset, dataset.read(range(20)), dlfs.concat([dataset] * 3)):
            page = shown(thing)
            assert "not shown" not in page.text
