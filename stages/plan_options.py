"""Every choice that planning takes, with its default; the names are those of the command line."""

from typing import Literal

import msgspec

from everplex.storage.errors import UsageError

__all__ = ["Content", "Format", "LossOn", "PlanOptions", "TextDocuments", "check_options", "reading_options"]

Format = Literal["auto", "jsonl", "text", "parquet", "arrow", "npy", "bin"]
Content = Literal["text", "messages", "completion"]
TextDocuments = Literal["file", "line", "block"]
LossOn = Literal["assistant", "last", "all"]


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to plan and how. Raises nothing: `make_plan` checks."""

    data: list[str]
    """Paths, globs and URLs, in order."""
    tokenizer: str
    """Folder or hub id."""
    revision: str | None = None
    trust_remote_code: bool = False

    protocol: str = "lm-eval"
    context: int | None = None
    """Tokens that the model sees at once; None takes the protocol's, the model's or else the tokenizer's length."""
    model_context: int | None = None
    """Length that the model's configuration allows, where it is known."""
    stride: int | None = None
    hf_published_weights: bool = False
    document_mask: bool = False
    """`packed` only: attention stays inside a document."""
    prefix_id: int | None = None
    """Token in front of a document, instead of the tokenizer's BOS or else EOS."""
    chunk_tokens: int = 8192

    format: Format = "auto"
    text_field: str = "text"
    id_field: str | None = None
    group_by: str | None = None
    """Field of a document that names its group; `file` or `folder` where documents have no fields."""
    groups: list[str] | None = None
    """Only these groups are planned."""
    text_documents: TextDocuments = "file"
    """What a document is in plain text: a whole file, a line, or a block between blank lines; held in memory whole."""
    token_dtype: str | None = None
    """Element type of a flat file of token ids, such as `uint16`."""
    content: Content = "text"
    """What a document holds: text, chat messages, or a prompt with its completion."""
    messages_field: str = "messages"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    loss_on: LossOn = "assistant"
    """Which turns of a chat are scored."""
    limit_documents: int | None = None
    sample_documents: int | None = None
    seed: int = 0
    hash_ids: bool = False
    """Keep digests of document ids in place of the ids."""


def check_options(options: PlanOptions) -> None:
    """Raise UsageError naming the first option whose value is not of the type that it should have."""
    try:
        msgspec.convert(msgspec.structs.asdict(options), PlanOptions)
    except msgspec.ValidationError as error:
        raise UsageError(f"options of planning: {error}") from error


_READING = (
    "format", "text_field", "id_field", "group_by", "groups", "text_documents", "token_dtype", "content",
    "messages_field", "prompt_field", "completion_field", "loss_on", "limit_documents", "sample_documents", "seed",
    "hash_ids",
)  # fmt: skip
_DEFAULTS = PlanOptions(data=[], tokenizer="")


def reading_options(options: PlanOptions) -> dict[str, int | str | bool | list[str] | None]:
    """Return the options that change what is read, where they are not the defaults."""
    chosen = {name: getattr(options, name) for name in _READING}
    if options.groups is not None:
        chosen["groups"] = sorted(options.groups)
    if options.sample_documents is None:
        del chosen["seed"]
    return {name: value for name, value in chosen.items() if value != getattr(_DEFAULTS, name)}
