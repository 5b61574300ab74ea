"""The model of a run: what can be refused before a corpus is read, and the model ready to evaluate a plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from everplex.settings import Settings
from everplex.stages.checkpoint import check_context, locate, max_context, read_config, weight_files
from everplex.stages.plan_options import PlanOptions
from everplex.stages.records import Plan
from everplex.stages.threads import default_threads
from everplex.storage.errors import UsageError

if TYPE_CHECKING:
    from everplex.stages.evaluate import Evaluator
    from everplex.stages.model import LoadedModel


def check_model(settings: Settings) -> None:
    """Raise UsageError for a model, a device or options that cannot evaluate anything; loads nothing."""
    batch_tokens(settings.batch_tokens)
    folder = locate(str(settings.model), settings.revision)
    weight_files(folder)
    config = read_config(folder)
    if settings.context is not None:
        check_context(settings.context, max_context(config), str(settings.model))
    if settings.device not in {"auto", "cpu"}:
        from everplex.stages.model import choose_device

        choose_device(settings.device)


def check_tokenizer(settings: Settings, options: PlanOptions) -> None:
    """Raise UsageError for a tokenizer with more tokens than the model; loads only the tokenizer."""
    config = read_config(locate(str(settings.model), settings.revision))
    known = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if isinstance(known, int):
        from everplex.stages.tokenize import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer, options.revision, trust_remote_code=options.trust_remote_code)
        check_vocabulary(options.tokenizer, tokenizer.spec.vocab_size, str(settings.model), known)


def load_evaluator(
    settings: Settings, folder: Path, plan: Plan, local_world_size: int = 1
) -> "tuple[LoadedModel, Evaluator]":
    """Load the model and what evaluates with it. Raises UsageError where they cannot evaluate the plan."""
    import torch

    from everplex.stages.evaluate import Evaluator
    from everplex.stages.model import ModelOptions, load_model

    torch.set_num_threads(settings.threads or default_threads(local_world_size))
    loaded = load_model(
        ModelOptions(
            model=str(folder),
            dtype=settings.dtype,
            device=settings.device,
            attention=settings.attention,
            compile=settings.compile,
            trust_remote_code=settings.trust_remote_code,
        )
    )
    check_vocabulary(plan.tokenizer.name, plan.tokenizer.vocab_size, str(settings.model), loaded.vocab_size)
    if loaded.max_context is not None and plan.protocol.context > loaded.max_context:
        raise UsageError(
            f"--context {plan.protocol.context} is more than the {loaded.max_context} tokens that "
            f"{settings.model} allows; give a smaller --context and another --out"
        )
    evaluator = Evaluator(loaded, batch_tokens=batch_tokens(settings.batch_tokens), profile=settings.profile)
    return loaded, evaluator


def check_vocabulary(tokenizer: str, num_tokens: int, model: str, num_known: int) -> None:
    """Raise UsageError where a tokenizer gives ids that the model does not know."""
    if num_tokens > num_known:
        raise UsageError(
            f"the tokenizer {tokenizer} has {num_tokens} tokens and the model {model} knows {num_known}; "
            "give the tokenizer that belongs to the model"
        )


def batch_tokens(option: str) -> int | Literal["auto"]:
    """Read `--batch-tokens`. Raises UsageError for anything but a number or `auto`."""
    if option == "auto":
        return "auto"
    if not option.isdecimal() or int(option) < 1:
        raise UsageError(f"--batch-tokens: expected a number of tokens or auto, found {option!r}")
    return int(option)
