"""What a plan says of a tokenizer is remembered, so that comparing plans loads none; never after a change."""

import json
import shutil
import time
from pathlib import Path

import pytest
from support.models import EOS

from everplex.stages import tokenize
from everplex.stages.memo import SETTLED_SECONDS
from everplex.stages.tokenize import load_card
from everplex.storage.errors import UsageError


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a tokenizer's folder that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "tokenizer"))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the tokenizers that are loaded, by a clock for which every file is old enough."""
    now, load = time.time_ns, tokenize.load_tokenizer
    noted: list[str] = []

    def note(name: str, revision: str | None, *, trust_remote_code: bool) -> tokenize.Tokenizer:
        noted.append(name)
        return load(name, revision, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(time, "time_ns", lambda: now() + int((SETTLED_SECONDS + 1) * 1e9))
    monkeypatch.setattr(tokenize, "load_tokenizer", note)
    return noted


def test_a_card_is_loaded_once(folder: Path, loads: list[str]) -> None:
    """The second time nothing is loaded and the card is equal; another prefix token is another question."""
    first = load_card(str(folder))
    assert load_card(str(folder)) == first
    assert loads == [str(folder)]
    assert load_card(str(folder), prefix_id=65).names.keys() == {65, *first.names}
    assert len(loads) == 2


def rename_eos(folder: Path) -> None:
    """Let another token end a text."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "!"}))


def add_template(folder: Path) -> None:
    """Add a chat template."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.mark.parametrize("change", [rename_eos, add_template])
def test_a_changed_tokenizer_is_loaded_again(change: object, folder: Path, loads: list[str]) -> None:
    """The card of other files is another one."""
    assert callable(change)
    before = load_card(str(folder))
    change(folder)
    after = load_card(str(folder))
    assert len(loads) == 2
    assert (after.eos_id, after.chat_digest) != (before.eos_id, before.chat_digest)


def test_a_torn_card_is_made_again(folder: Path, loads: list[str], user_cache: Path) -> None:
    """What is left of an entry is not believed."""
    first = load_card(str(folder))
    (entry,) = (user_cache / "tokenizers").glob("*.json")
    entry.write_bytes(entry.read_bytes()[:-5])
    assert load_card(str(folder)) == first
    assert len(loads) == 2


def test_a_cache_that_cannot_be_used_is_named(folder: Path, user_cache: Path) -> None:
    """One sentence says where another may be."""
    (user_cache / "tokenizers").touch()
    with pytest.raises(UsageError, match="EVERPLEX_CACHE names another cache folder"):
        load_card(str(folder))


def test_a_card_names_what_may_stand_in_front(folder: Path, loads: list[str]) -> None:
    """The text of the end token is there; a token beyond the vocabulary is refused, remembered or not."""
    card = load_card(str(folder))
    assert card.eos_id is not None
    assert card.names[card.eos_id] == EOS
    for _ in range(2):
        with pytest.raises(UsageError, match="beyond the vocabulary"):
            load_card(str(folder), prefix_id=10**6)
    assert len(loads) == 3
