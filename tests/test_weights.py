"""The digest of a model covers what it computes with, and its cache is never trusted too early."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everplex.stages import weights
from everplex.stages.memo import SETTLED_SECONDS
from everplex.stages.weights import digest_model
from everplex.storage.errors import UsageError


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a model folder that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return an empty cache folder."""
    return tmp_path / "cache"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock say that every file is old enough."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + int((SETTLED_SECONDS + 1) * 1e9))


def entries(cache: Path) -> list[Path]:
    """Return the cached digests."""
    return sorted((cache / "weights").glob("*.json"))


def flip_last_byte(file: Path) -> None:
    """Change a file's content in place, and put its modification time back."""
    stat = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def edit_config(model: Path, **fields: object) -> None:
    """Change fields of the configuration."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def add_code(model: Path) -> None:
    """Add code that comes with the model."""
    (model / "modeling_mine.py").write_text("x = 1")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: flip_last_byte(model / "model.safetensors"),
        lambda model: edit_config(model, rms_norm_eps=1e-3),
        add_code,
    ],
)
def test_what_changes_the_numbers_changes_the_digest(model: Path, cache: Path, change: Callable[[Path], None]) -> None:
    """Weights, the fields of the configuration and the model's code are part of the digest."""
    before = digest_model(model, cache_folder=cache)
    change(model)
    assert digest_model(model, cache_folder=cache) != before


def test_what_does_not_change_the_numbers_does_not(model: Path, cache: Path) -> None:
    """The tokenizer, the folder's name and where a configuration came from are not part of the digest."""
    before = digest_model(model, cache_folder=cache)
    (model / "tokenizer.json").write_text("{}")
    edit_config(model, _name_or_path="elsewhere", transformers_version="9.9")
    assert digest_model(model.rename(model.with_name("renamed")), cache_folder=cache) == before


@pytest.mark.usefixtures("settled")
def test_a_settled_file_is_hashed_once(model: Path, cache: Path) -> None:
    """The cached digest of a file that is old enough is used, and another file has none."""
    digest_model(model, cache_folder=cache)
    (entry,) = entries(cache)
    entry.write_text(entry.read_text().replace(json.loads(entry.read_text()), "0" * 64))
    cached = digest_model(model, cache_folder=cache)
    entry.unlink()
    assert digest_model(model, cache_folder=cache) != cached


@pytest.mark.usefixtures("settled")
def test_a_change_shows_though_size_and_time_were_put_back(model: Path, cache: Path) -> None:
    """A cached digest is not used for other content of the same size with the same modification time."""
    before = digest_model(model, cache_folder=cache)
    assert entries(cache)
    flip_last_byte(model / "model.safetensors")
    assert digest_model(model, cache_folder=cache) != before


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is still being written has no digest yet; nothing is kept of it."""
    hash_block = weights._hash_block

    def write_meanwhile(file: Path, start: int) -> bytes:
        digest = hash_block(file, start)
        with file.open("ab") as stream:
            stream.write(b"more")
        return digest

    monkeypatch.setattr(weights, "_hash_block", write_meanwhile)
    with pytest.raises(UsageError, match="changed while it was read; wait until it is written"):
        digest_model(model, cache_folder=cache)
    assert entries(cache) == []


def test_a_fresh_file_is_not_cached(model: Path, cache: Path) -> None:
    """A file younger than two seconds may change again without its times telling: its digest is not kept."""
    (model / "model.safetensors").touch()
    digest_model(model, cache_folder=cache)
    assert entries(cache) == []


@pytest.mark.usefixtures("settled")
def test_a_torn_cache_entry_is_replaced(model: Path, cache: Path) -> None:
    """An entry that is no JSON is hashed again."""
    before = digest_model(model, cache_folder=cache)
    (entry,) = entries(cache)
    entry.write_text("{")
    assert digest_model(model, cache_folder=cache) == before
    assert json.loads(entry.read_text())


def test_every_block_counts(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change in any block of a large file changes the digest, and so does the order of the blocks."""
    monkeypatch.setattr(weights, "BLOCK_BYTES", 4)
    file = model / "model.safetensors"
    digests = set()
    for content in (b"aaaabbbbcc", b"aaaXbbbbcc", b"aaaabbbXcc", b"aaaabbbbcX", b"bbbbaaaacc"):
        file.write_bytes(content)
        digests.add(digest_model(model, cache_folder=cache))
    assert len(digests) == 5


def test_shards_are_part_of_the_digest(model: Path, cache: Path) -> None:
    """Each shard that the index names counts, and a missing one is named."""
    (model / "model.safetensors").rename(model / "a.safetensors")
    shutil.copy(model / "a.safetensors", model / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    before = digest_model(model, cache_folder=cache)
    flip_last_byte(model / "b.safetensors")
    assert digest_model(model, cache_folder=cache) != before
    (model / "b.safetensors").unlink()
    with pytest.raises(UsageError, match=r"names b\.safetensors, which is not there"):
        digest_model(model, cache_folder=cache)


def test_a_folder_without_weights_is_refused(model: Path, cache: Path) -> None:
    """One sentence says what is expected; weights in another format do not count."""
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"has no weights: expected model\.safetensors"):
        digest_model(model, cache_folder=cache)


@pytest.mark.parametrize(("content", "words"), [(None, "has no config.json"), ("[", "not a JSON object")])
def test_a_folder_without_a_configuration_is_refused(model: Path, cache: Path, content: str | None, words: str) -> None:
    """A missing or broken configuration is named."""
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_text(content)
    with pytest.raises(UsageError, match=words):
        digest_model(model, cache_folder=cache)


def test_a_cache_that_cannot_be_written_is_told(model: Path, cache: Path) -> None:
    """The sentence names the cache folder and the variable that chooses another."""
    cache.write_text("a file")
    with pytest.raises(UsageError, match=f"{cache} writable .*EVERPLEX_CACHE"):
        digest_model(model, cache_folder=cache)
