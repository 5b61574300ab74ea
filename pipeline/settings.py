"""Every option of everplex, once: the fields are the options of the command line, of the TOML file and of Python."""

import csv
import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import typer

from everplex.stages.plan_options import Content, Format, LossOn, TextDocuments
from everplex.storage.errors import UsageError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

Data = str | Path | Sequence[str | Path]
"""A path, URL or pattern, or several."""

_LISTS = {"data", "reuse_from", "store_option"}
CORPUS, MODEL, RUN, MACHINE, ONE = "Corpus and protocol", "Model", "Run", "Machine", "Of one command"


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, show_default=more.pop("show_default", True), **more)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options. A command takes those that concern it; the rest keep their defaults."""

    data: Annotated[
        list[str] | None,
        typer.Argument(help="Corpus: JSON Lines, text, Parquet, Arrow folders, token arrays; paths, URLs, globs."),
    ] = None
    out: Annotated[
        str | None,
        _option(RUN, "Folder or URL of the run (./runs/a, s3://bucket/runs/a, …); run again to resume."),
    ] = None
    model: Annotated[str | None, _option(MODEL, "Folder of a Hugging Face causal model, or a hub id.")] = None

    text_field: Annotated[str, _option(CORPUS, "Field that holds a document's text.")] = "text"
    id_field: Annotated[str | None, _option(CORPUS, "Field that holds a document's id [default: its position].")] = None
    group_by: Annotated[str | None, _option(CORPUS, "Field whose value is a document's group.")] = None
    groups: Annotated[str | None, _option(CORPUS, 'Evaluate these groups only: a,b or "a, with a comma",b.')] = None
    format: Annotated[Format, _option(CORPUS, "How to read the files; auto goes by their names.")] = "auto"
    text_documents: Annotated[TextDocuments, _option(CORPUS, "What a document is in plain text.")] = "file"
    content: Annotated[Content, _option(CORPUS, "What a document is: text, a chat, a prompt and completion.")] = "text"
    messages_field: Annotated[str, _option(CORPUS, "Field that holds a chat's messages.")] = "messages"
    prompt_field: Annotated[str, _option(CORPUS, "Field that holds a prompt.")] = "prompt"
    completion_field: Annotated[str, _option(CORPUS, "Field that holds a prompt's completion.")] = "completion"
    token_dtype: Annotated[str | None, _option(CORPUS, "Type of the ids in a flat .bin file, such as uint16.")] = None
    limit_documents: Annotated[int | None, _option(CORPUS, "Take the first N documents.", min=1)] = None
    sample_documents: Annotated[int | None, _option(CORPUS, "Take N documents at random (see --seed).", min=1)] = None
    seed: Annotated[int, _option(CORPUS, "Seed of --sample-documents.")] = 0
    loss_on: Annotated[LossOn, _option(CORPUS, "Which turns of a chat are scored.")] = "assistant"
    hash_ids: Annotated[bool, _option(CORPUS, "Store digests of document ids instead of the ids.")] = False
    verify_data: Annotated[bool, _option(CORPUS, "On resume, read the whole corpus again.")] = False
    protocol: Annotated[
        str,
        _option(
            CORPUS,
            "lm-eval, lm-eval-bos, llama.cpp, hf-stride, gptq, paloma, bos-every-window or packed.",
        ),
    ] = "lm-eval"
    context: Annotated[int | None, _option(CORPUS, "Window length in tokens [default: the model's].")] = None
    stride: Annotated[int | None, _option(CORPUS, "Stride of hf-stride and llama.cpp.")] = None
    hf_published_weights: Annotated[
        bool, _option(CORPUS, "With hf-stride, also give the number that the published snippet prints.")
    ] = False
    document_mask: Annotated[bool, _option(CORPUS, "With packed, hide a window's documents from each other.")] = False
    prefix_id: Annotated[
        int | None, _option(CORPUS, "Token in front of a document [default: the tokenizer's BOS, or else EOS].", min=0)
    ] = None
    chunk_tokens: Annotated[int, _option(CORPUS, "Tokens of the unit of work and of persistence.", min=1)] = 8192
    plan: Annotated[str | None, _option(CORPUS, "Folder or URL of a plan to share, made by `everplex plan`.")] = None
    tokenizer: Annotated[str | None, _option(CORPUS, "Tokenizer folder or hub id [default: the model's].")] = None

    revision: Annotated[str | None, _option(MODEL, "Revision of a hub id.")] = None
    dtype: Annotated[Dtype, _option(MODEL, "Type of the weights; auto is the checkpoint's.")] = "auto"
    attention: Annotated[str | None, _option(MODEL, "Attention implementation, such as sdpa or eager.")] = None
    compile: Annotated[bool, _option(MODEL, "Compile the model with torch.compile.")] = False
    trust_remote_code: Annotated[bool, _option(MODEL, "Run code that comes with a model.")] = False

    device: Annotated[str, _option(MACHINE, "auto, cpu, cuda, cuda:1, xpu or mps.")] = "auto"
    batch_tokens: Annotated[str, _option(MACHINE, "Padded tokens of a batch, or auto.")] = "auto"
    threads: Annotated[int | None, _option(MACHINE, "Threads of a rank [default: its share of cores].", min=1)] = None
    nproc: Annotated[int, _option(MACHINE, "Local ranks to start.", min=1)] = 1
    rank: Annotated[int | None, _option(MACHINE, "This process's rank [default: from the environment].", min=0)] = None
    world_size: Annotated[int | None, _option(MACHINE, "Number of ranks [default: the environment's].", min=1)] = None

    dry_run: Annotated[bool, _option(ONE, "Plan in memory, time one batch, say what a run would take.")] = False
    max_seconds: Annotated[float | None, _option(RUN, "Stop politely, with exit code 75, after this.", min=0)] = None
    grace_seconds: Annotated[float, _option(RUN, "After a signal, exit within this long.", min=1)] = 10.0
    refresh_seconds: Annotated[float, _option(RUN, "Look for other workers' results this often.", min=0)] = 30.0
    plan_wait_seconds: Annotated[
        float, _option(RUN, "A waiting rank takes over planning when nothing new appeared for this long.", min=0)
    ] = 120.0
    store_option: Annotated[
        list[str] | None, _option(RUN, "key=value for the store, such as endpoint_url=…; repeatable.")
    ] = None
    store_retry_seconds: Annotated[float, _option(RUN, "Try a failing store call again for this long.", min=0)] = 60.0
    audit: Annotated[float, _option(RUN, "Fraction of chunks evaluated again on another device.", min=0, max=1)] = 0.01
    reuse_from: Annotated[list[str] | None, _option(RUN, "Take over equal chunks from this run; repeatable.")] = None
    reduce_group_size: Annotated[int | None, _option(RUN, "Ranks per first level of the collective.", min=1)] = None
    verify_reduce: Annotated[bool, _option(RUN, "Reduce by collective and by merge; refuse a difference.")] = False
    profile: Annotated[bool, _option(RUN, "Report where the time went.")] = False

    def need(self, *names: str) -> None:
        """Raise UsageError for the first of these options that was not given."""
        for name in names:
            if not getattr(self, name):
                shown = "DATA" if name == "data" else "--" + name.replace("_", "-")
                raise UsageError(f"{shown} is missing: give it on the command line or as `{name}` in the TOML file")

    def group_names(self) -> list[str] | None:
        """Return the groups that `--groups` names; None for all. Raises UsageError where it names none."""
        if self.groups is None:
            return None
        names = [name for row in csv.reader([self.groups]) for name in row if name]
        if not names:
            raise UsageError(f"--groups: expected names separated by commas, found {self.groups!r}")
        return names

    def store_options(self) -> dict[str, str]:
        """Return `--store-option key=value` as a mapping."""
        pairs = [option.partition("=") for option in self.store_option or []]
        for key, equals, value in pairs:
            if not key or not equals:
                raise UsageError(f"--store-option: expected key=value, found {key}{equals}{value}")
        return {key: value for key, _, value in pairs}


def option_hints() -> dict[str, Any]:
    """Type and help of every option, by name."""
    return get_type_hints(Settings, include_extras=True)


def listed(data: Data) -> list[str]:
    """Return one input or several as the option takes them."""
    return [str(data)] if isinstance(data, str | Path) else [str(one) for one in data]


def make_settings(options: dict[str, Any]) -> Settings:
    """Check names, types and bounds of options, wherever they come from. Raises UsageError."""
    check_names(options, "Python")
    plain = {name: _plain(name, value) for name, value in options.items()}
    try:
        settings = msgspec.convert(plain, Settings)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        raise UsageError(f"option {path.rstrip('`')}: {what[0].lower()}{what[1:]}") from error
    for name, hint in option_hints().items():
        _check_bounds(name, getattr(settings, name), hint.__metadata__[0])
    return settings


def _plain(name: str, value: Any) -> Any:
    """Return a value as the command line gives it: paths as text, a number of tokens too, one of several as a list."""
    if name in _LISTS and isinstance(value, str | Path | list | tuple):
        return listed(value)
    return str(value) if isinstance(value, Path) or (name == "batch_tokens" and type(value) is int) else value


def _check_bounds(name: str, value: Any, info: Any) -> None:
    if isinstance(value, int | float) and not (
        (info.min is None or value >= info.min) and (info.max is None or value <= info.max)
    ):
        least = "" if info.min is None else f"at least {info.min}"
        most = "" if info.max is None else f"at most {info.max}"
        raise UsageError(f"option {name}: expected {' and '.join(filter(None, (least, most)))}, found {value}")


def load_toml(path: str) -> dict[str, Any]:
    """Read a TOML file of options. Raises UsageError naming the file and, for a typing slip, the nearest option."""
    try:
        options = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; give a TOML file that can be read") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not a TOML file ({error})") from error
    options = {name.replace("-", "_"): value for name, value in options.items()}
    check_names(options, path)
    return options


def check_names(options: dict[str, Any], where: str) -> None:
    """Raise UsageError for an option that does not exist, with the nearest one that does."""
    known = list(Settings.__struct_fields__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise UsageError(f"{where}: there is no option {name!r}; the nearest is {near[0]!r}")
