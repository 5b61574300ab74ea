"""The result of a run: `summary.json`, typed."""

from typing import Literal

import msgspec

from everplex.stages.records import SCHEMA, ModelSpec, ProtocolSpec


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a set of documents and the numbers derived from them; None where there is nothing to divide by."""

    nll: float
    """Sum of the losses in nats, rounded once."""
    tokens: int
    documents: int
    bytes: int
    characters: int
    words: int
    perplexity: float | None
    bits_per_byte: float | None
    byte_perplexity: float | None
    character_perplexity: float | None
    word_perplexity: float | None
    stderr: float | None
    """Standard error of the mean NLL per token, clustered by sampling unit."""
    perplexity_low: float | None
    perplexity_high: float | None
    """95 % interval from `stderr`."""
    stderr_iid: float | None
    """As if all tokens were independent; what llama.cpp prints (there for the perplexity)."""
    units: int
    """Sampling units (documents or windows) with a scored token."""
    sums: dict[str, float] = {}


class PositionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of the targets at positions `start` to `end` (inclusive) of their window, or of documents that long."""

    start: int
    end: int
    nll: float
    tokens: int


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker contributed to the counted records."""

    worker: str
    device: str
    device_name: str
    rank: int | None
    chunks: int
    tokens: int
    nll: float
    perplexity: float | None
    seconds: float
    tokens_per_second: float | None
    last_seq: int
    store_requests: dict[str, int] = {}
    profile: dict[str, float] = {}
    """Seconds by step, where a profile was asked for; `read`, `decode` and `batching` run beside the others."""
    reused_from: str | None = None
    """Id of the run whose results these are, taken over by `--reuse-from`; None where they were evaluated here."""


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict about one device, with its evidence."""

    device: str
    health: Literal["healthy", "suspect", "convicted", "not checked"]
    evidence: list[str] = []
    audited: int = 0
    mismatches: int = 0
    speed: Literal["usual", "slow", "not compared"] = "not compared"
    """Against devices of the same name; says nothing about health."""


class AgreementRow(msgspec.Struct, frozen=True, kw_only=True):
    """How far apart two environments are on the same chunks: what a comparison across them is worth."""

    environments: list[str]
    spread: float
    """Median difference of the sentinels, in nats per token."""
    tolerance: float
    """What still counts as agreement, in nats per token."""


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """Which chunks of the plan are counted."""

    chunks: int
    accepted: int
    missing: int
    duplicates: int
    conflicts: int
    corrupt: int
    """Segments set aside."""
    nonfinite: int = 0
    """Chunks whose every evaluation gave a non-finite loss."""
    set_aside: list[str] = []
    """One sentence per object that was set aside and why."""


class Summary(Numbers, frozen=True, kw_only=True):
    """Everything a run found out; the inherited numbers are those of the whole corpus (micro: ratios of sums).

    `complete` is true only where every chunk of the plan is counted once.
    """

    schema: int = SCHEMA
    complete: bool
    run: str
    plan: str
    protocol: ProtocolSpec
    model: ModelSpec
    dtype: str
    groups: dict[str, Numbers]
    macro: float | None
    """Perplexity of the mean of the groups' mean NLL."""
    positions: list[PositionRow] = []
    document_lengths: list[PositionRow] = []
    workers: list[WorkerRow] = []
    devices: list[DeviceRow] = []
    agreement: list[AgreementRow] = []
    perplexity_before: float | None = None
    """With the evaluations of convicted devices; None where no device is convicted."""
    coverage: Coverage
    segments: list[str] = []
    """Keys of exactly the segments that are counted, sorted."""
    reduced_by: str = "offline merge"
    """Which path summed: `offline merge` or `collective`. Both give the same numbers."""
