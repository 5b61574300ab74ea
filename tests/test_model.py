"""Loading a model: what it says of itself, and how it refuses what it cannot load as a whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from everplex.stages.checkpoint import check_context, max_context
from everplex.stages.model import ModelOptions, load_model
from everplex.stages.threads import default_threads
from everplex.storage.errors import UsageError


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a model folder that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_what_a_loaded_model_says(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Vocabulary, context and environment come from the model, and loading prints nothing."""
    loaded = load_model(ModelOptions(model=str(tiny_model), device="cpu"))
    assert (loaded.vocab_size, loaded.max_context, loaded.dtype) == (259, 256, "float32")
    assert loaded.device_id.endswith("/cpu")
    assert loaded.environment.torch == torch.__version__
    assert (loaded.environment.device_type, loaded.environment.attention) == ("cpu", "sdpa")
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("dtype", "found"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("auto", "float32"), ("float32", "float32")]
)
def test_dtype(tiny_model: Path, dtype: Any, found: str) -> None:
    """Weights have the dtype asked for; `auto` is the one that they were saved in, and is told by its name."""
    loaded = load_model(ModelOptions(model=str(tiny_model), dtype=dtype, device="cpu"))
    assert loaded.dtype == loaded.environment.dtype == found
    assert next(loaded.model.parameters()).dtype == getattr(torch, found)


def test_attention(tiny_model: Path) -> None:
    """The attention implementation can be chosen and is told."""
    loaded = load_model(ModelOptions(model=str(tiny_model), attention="eager", device="cpu"))
    assert loaded.environment.attention == "eager"


def break_weights(folder: Path) -> None:
    """Cut the weights short."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop_tensor(folder: Path) -> None:
    """Leave one tensor out."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def remove_weights(folder: Path) -> None:
    """Leave no weights."""
    (folder / "model.safetensors").unlink()


def unknown_architecture(folder: Path) -> None:
    """Ask for a model type that nobody knows."""
    (folder / "config.json").write_text(json.dumps({"model_type": "nothing-like-it"}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (break_weights, "transformers cannot load this model"),
        (drop_tensor, r"lack 1 tensors of the model, the first model\.layers\.1\.mlp\.up_proj\.weight"),
        (remove_weights, "has no weights"),
        (unknown_architecture, "nothing-like-it"),
    ],
)
def test_a_broken_model_is_refused(folder: Path, change: Any, words: str) -> None:
    """A model that cannot be loaded as a whole is refused with one sentence; nothing is filled in at random."""
    change(folder)
    with pytest.raises(UsageError, match=words) as caught:
        load_model(ModelOptions(model=str(folder), device="cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "abacus"}, "--device abacus: not available here; expected auto or one of .*cpu"),
        ({"attention": "telepathy"}, "telepathy"),
        ({"revision": "main"}, "--revision main belongs to a hub id"),
    ],
)
def test_bad_options_are_refused(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    """An option that cannot be used is named."""
    with pytest.raises(UsageError, match=words):
        load_model(ModelOptions(model=str(tiny_model), **({"device": "cpu"} | options)))


def test_no_such_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is neither a folder nor to be had from the hub, and a file, are refused with one sentence."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="no model folder nobody/nothing") as caught:
        load_model(ModelOptions(model="nobody/nothing"))
    assert "\n" not in str(caught.value)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="is a file; give the folder"):
        load_model(ModelOptions(model=str(file)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 10}, 10),
        ({"n_positions": 11}, 11),
        ({"text_config": {"max_position_embeddings": 12}}, 12),
        ({"hidden_size": 9}, None),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_max_context(config: dict[str, Any], expected: int | None) -> None:
    """The longest window comes from the configuration, and is not guessed."""
    assert max_context(config) == expected


def test_check_context() -> None:
    """A context is two tokens at least and no more than the model allows, where that is known."""
    check_context(64, 64, "m")
    check_context(2, None, "m")
    for context, allowed, words in [
        (65, 64, "--context 65 is more than the 64 tokens that m allows"),
        (1, 64, "--context 1 is too short"),
    ]:
        with pytest.raises(UsageError, match=words):
            check_context(context, allowed, "m")


def test_threads_are_shared_by_the_ranks_of_a_machine() -> None:
    """Ranks share the cores, and each has one at least."""
    cores = default_threads()
    assert cores >= 1
    assert default_threads(cores) == 1
    assert default_threads(10 * cores) == 1
