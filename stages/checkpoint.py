"""A model as a folder on disk: where it is, which files hold its weights, what its configuration says. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open

from everplex.storage.errors import UsageError
from everplex.storage.local import expand_home

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)

_FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def locate(model: str, revision: str | None = None) -> Path:
    """Return the local folder of a model, given as one or as a hub id; a hub id is downloaded (safetensors only).

    Raises UsageError where there is no such model.
    """
    folder = expand_home(model)
    if folder.is_dir():
        if revision is not None:
            raise UsageError(f"--revision {revision} belongs to a hub id, and {model} is a local folder; leave it out")
        return folder
    if folder.exists():
        raise UsageError(f"{model} is a file; give the folder that holds {CONFIG} and the weights")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import, and only a hub id needs it
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - the same

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:  # every failure of the hub's client is an OSError
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"no model folder {model}, and it could not be had from the hub ({reason}); give a local folder with"
            f" {CONFIG} and {WEIGHTS}"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers loads from a folder, sorted.

    Raises UsageError for a folder without weights, or with a shard missing.
    """
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        files = [folder / name for name in sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))]
    else:
        files = []
    if not files:
        raise UsageError(
            f"{folder} has no weights: expected {WEIGHTS} or {INDEX} (everplex reads safetensors only);"
            " give the folder of a whole model"
        )
    for file in files:
        if not file.is_file():
            raise UsageError(f"{folder}: {INDEX} names {file.name}, which is not there; download the model again")
    adapter = folder / ADAPTER_WEIGHTS
    return [*files, adapter] if adapter.is_file() else files


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model's configuration. Raises UsageError where there is none or it is no JSON object."""
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} has no {CONFIG}; give the folder of a Hugging Face model")
    return _read_json(folder / CONFIG)


def saved_dtype(folder: Path) -> str:
    """Return the dtype that `auto` loads a model in: its configuration's, else that of its first floating weights."""
    config = read_config(folder)
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and isinstance(named := part.get("dtype", part.get("torch_dtype")), str):
            return named.removeprefix("torch.")
    for file in weight_files(folder):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if (dtype := _FLOATING.get(tensors.get_slice(name).get_dtype())) is not None:
                    return dtype
    return "float32"


def max_context(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a model's configuration allows in a window; None where it does not say."""
    for part in (config, config.get("text_config")):
        for field in _CONTEXT_FIELDS:
            value = part.get(field) if isinstance(part, Mapping) else None
            if isinstance(value, int) and value > 0:
                return value
    return None


def check_context(context: int, allowed: int | None, model: str) -> None:
    """Raise UsageError for a context below 2 tokens, or of more than the model allows, where that is known."""
    if context < 2:
        raise UsageError(f"--context {context} is too short: a window needs at least 2 tokens")
    if allowed is not None and context > allowed:
        raise UsageError(f"--context {context} is more than the {allowed} tokens that {model} allows; give less")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"{file}: not a JSON object ({error}); download the model again") from error
