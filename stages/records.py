"""The nouns: what the stages hand to each other and what lies in the store. No torch, no behaviour beyond identity.

Losses are in nats, sizes in tokens or bytes as the name says. Every JSON document carries `schema`; an unknown schema
is refused, unknown fields are ignored.
"""

from functools import cache
from typing import Any, Literal, TypeVar

import msgspec

from everplex.stages import layout
from everplex.storage.codec import canonical_json, sha256_hex
from everplex.storage.errors import CorruptObjectError

SCHEMA = 1
SEMANTICS = 1
"""Raised by hand when the same inputs would give other numbers; part of the identity of a run."""

MEND_DOCUMENT = "restore it from a copy, or delete it and run the same `everplex run` command again"

T = TypeVar("T", bound=msgspec.Struct)

Kind = Literal["work", "audit", "sentinel"]


class ProtocolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How text became windows: which published definition, with which parameters."""

    name: str
    version: int
    context: int
    options: dict[str, int | str | bool] = {}
    label: str
    """One line printed beside every number: the tool and version it equals, and what it leaves unscored."""
    unit: Literal["document", "window"] = "document"
    """The sampling unit of the error bar; `window` where documents are joined into one stream."""
    complete: bool = True
    """Whether every source token is scored; if not, numbers per byte and per word are null."""


class TokenizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer of a plan. `digest` covers its content, `prefix_id` is the token in front of a document."""

    name: str
    digest: str
    vocab_size: int
    prefix_id: int | None
    prefix: str = ""


class CorpusFile(msgspec.Struct, frozen=True, kw_only=True):
    """One input file, as it was read. Only `digest` is identity."""

    url: str
    stored_bytes: int
    modified: float | None
    digest: str


class CorpusSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The corpus of a plan. `digest` covers the files' content in order and `options`."""

    digest: str
    options: dict[str, int | str | bool | list[str] | None] = {}
    files: list[CorpusFile] = []


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Denominators that come from the source text, whatever the tokenizer did."""

    documents: int = 0
    bytes: int = 0
    characters: int = 0
    words: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            documents=self.documents + other.documents,
            bytes=self.bytes + other.bytes,
            characters=self.characters + other.characters,
            words=self.words + other.words,
        )


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a plan: its name, its key in the store, its documents."""

    name: str
    key: str
    documents: int
    windowless: Counts = Counts()
    """Tally of the documents that have no window and so belong to no chunk (empty ones)."""
    document_tables: list[str] = []
    """Keys of the tables of documents (DocumentRow lines), in order."""


class DocumentRow(msgspec.Struct, frozen=True, kw_only=True):
    """One document in a plan's document table; its ordinal is its line across the group's tables."""

    id: str
    tokens: int
    """Scored tokens."""
    bytes: int
    characters: int
    words: int


class ChunkTable(msgspec.Struct, frozen=True, kw_only=True):
    """All chunks of a plan, column by column; row i of every column is one chunk."""

    group: list[int]
    """Index into `Plan.groups`."""
    ordinal: list[int]
    content: list[str]
    """Content digest, 64 hexadecimal digits."""
    windows: list[int]
    input_tokens: list[int]
    """Tokens that go through the model."""
    tokens: list[int]
    """Scored tokens."""
    documents: list[int]
    """Documents whose first window is in the chunk; the next three are theirs."""
    bytes: list[int]
    characters: list[int]
    words: list[int]

    def __len__(self) -> int:
        return len(self.content)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be evaluated: protocol, corpus, tokenizer, groups and the chunk table."""

    schema: int = SCHEMA
    protocol: ProtocolSpec
    corpus: CorpusSpec
    tokenizer: TokenizerSpec
    chunk_tokens: int
    groups: list[GroupSpec]
    chunks: ChunkTable

    def digest(self) -> str:
        """Digest of what the plan is; where its files lay and when they were written is not part of it.

        A field with its default is left out, so that a field that is added later renames no plan.
        """
        identity = _chosen(self)
        identity["corpus"].pop("files", None)
        del identity["tokenizer"]["name"]
        return sha256_hex(canonical_json(identity))

    def chunk_id(self, row: int) -> str:
        """Return the id of the chunk in a row of the table."""
        return layout.chunk_id(self.groups[self.chunks.group[row]].key, self.chunks.ordinal[row])

    def chunk_ids(self) -> list[str]:
        """Return the id of every chunk, in the order of the table."""
        keys = [group.key for group in self.groups]
        return [
            layout.chunk_id(keys[group], ordinal)
            for group, ordinal in zip(self.chunks.group, self.chunks.ordinal, strict=True)
        ]


def _chosen(value: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that do not have their defaults, and of nested structs the same."""
    result: dict[str, Any] = {}
    for name, default in _defaults(type(value)).items():
        given = getattr(value, name)
        if given == default:
            continue
        if isinstance(given, msgspec.Struct):
            given = _chosen(given)
        elif isinstance(given, list) and given and isinstance(given[0], msgspec.Struct):
            given = [_chosen(item) for item in given]
        result[name] = given
    return result


@cache
def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the default of every field, NODEFAULT where there is none."""
    return {
        field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in msgspec.structs.fields(kind)
    }


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a run. `digest` covers the weights and the configuration, `name` is what the user called it."""

    name: str
    digest: str
    revision: str | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a run, in `run.json`: the same inputs give the same identity on every machine."""

    schema: int = SCHEMA
    semantics: int = SEMANTICS
    plan: str
    """Digest of the plan."""
    plan_url: str | None = None
    """Where a shared plan lies; None where it lies in the run itself."""
    model: ModelSpec
    dtype: str
    numerics: dict[str, str] = {}
    """Further choices that change the numbers, such as a quantisation."""

    def id(self) -> str:
        """Return 16 hexadecimal digits that name the run in every segment; names and places are not part of it."""
        identity = [self.semantics, self.plan, self.model.digest, self.dtype, self.numerics]
        return sha256_hex(canonical_json(identity))[:16]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What computed: equal environments are expected to give equal bits for equal batch shapes."""

    everplex: str
    torch: str
    transformers: str
    device_type: str
    """`cpu`, `cuda`, …"""
    device_name: str
    """The accelerator's or processor's model name."""
    driver: str = ""
    dtype: str
    threads: int
    attention: str
    compile: bool = False


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a segment: whose records follow, and how they came to be."""

    schema: int = SCHEMA
    run: str
    plan: str
    worker: str
    seq: int
    first: int
    """First sequence number whose records are repeated here; equal to `seq` unless it is a roll-up."""
    rank: int | None = None
    world_size: int | None = None
    device: str
    """Host and accelerator id: what verdicts about health are about."""
    environment: Environment
    store_requests: dict[str, int] = {}
    """Requests that the worker had made of the store by then, per verb, and `retries`."""
    profile: dict[str, float] = {}
    """Seconds by step that the worker had spent by then; empty without a profile."""
    reused_from: str | None = None
    """Id of the run that the records were taken over from; None where they were evaluated in this one."""
    created: float = 0.0
    """Wall clock of the worker in seconds since the epoch: information only, nothing compares it."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What evaluating one chunk once gave. A non-finite loss is counted and leaves the sums null."""

    chunk: str
    content: str
    kind: Kind = "work"
    rank: int | None = None
    nll: float | None
    """Sum of the losses in nats, correctly rounded."""
    nll_sq: float | None
    tokens: int
    doc_ordinals: list[int]
    """Ordinals, in the group, of the sampling units (documents or windows) that this chunk adds to."""
    doc_nll: list[float] | None
    doc_tokens: list[int]
    position_nll: list[float] | None
    """By position of the target in its window: 0, 1, 2-3, 4-7, …"""
    position_tokens: list[int]
    nll_max: float | None
    nonfinite: int = 0
    token_digest: str
    """SHA-256 of the little-endian float32 losses in plan order."""
    batch_tokens: int
    batch_shape: list[tuple[int, int]]
    """Rows and padded length of each batch that the chunk was evaluated in."""
    seconds: float
    sums: dict[str, float] = {}
    """Further named sums that a protocol asks for."""
    payloads: dict[str, msgspec.Raw] = {}
    """Room for results that are not sums."""

    def digest(self) -> str:
        """Digest of the result alone, without provenance: equal results have equal digests."""
        result = (
            self.chunk, self.content, self.nll, self.nll_sq, self.tokens, self.doc_ordinals, self.doc_nll,
            self.doc_tokens, self.position_nll, self.position_tokens, self.nll_max, self.nonfinite,
            self.token_digest, self.sums,
        )  # fmt: skip
        return sha256_hex(canonical_json(result))


def decode_document(data: bytes, kind: type[T], where: str) -> T:
    """Decode one JSON document of a known schema; `where` names the object in errors.

    Raises CorruptObjectError for anything else.
    """
    try:
        schema = msgspec.json.decode(data, type=_Versioned).schema
        if schema == SCHEMA:
            return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptObjectError(f"{where}: not a {kind.__name__} document ({error}); {MEND_DOCUMENT}") from error
    raise CorruptObjectError(
        f"{where}: expected schema {SCHEMA}, found {schema}; read it with the everplex that wrote it"
    )


class _Versioned(msgspec.Struct):
    schema: int
