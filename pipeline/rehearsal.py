"""A rehearsal: plan in memory, time one batch, say what a run would take. Nothing is written."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from everplex.loading import check_model, check_tokenizer, load_evaluator
from everplex.planning import plan_into, plan_options
from everplex.preempt import Stop
from everplex.progress import Progress, format_seconds
from everplex.rank import detect_rank
from everplex.settings import Data, Settings, make_settings
from everplex.stages.checkpoint import locate
from everplex.stages.chunk import Chunk, decode_chunk
from everplex.stages.layout import CHUNKS_PREFIX, chunk_key
from everplex.stages.records import SCHEMA, Plan
from everplex.stages.report import plan_facts
from everplex.storage.errors import ObjectNotFoundError
from everplex.storage.store import Entry

if TYPE_CHECKING:
    from everplex.stages.evaluate import Evaluator


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would be, and how long it would take on this machine."""

    schema: int = SCHEMA
    plan: dict[str, int | str]
    protocol: str
    device: str
    dtype: str
    ranks: int
    timed_tokens: int
    """Input tokens of the batch that was timed."""
    timed_seconds: float
    tokens_per_second: float
    """Input tokens per second of one rank."""
    estimated_seconds: float
    """Of evaluating everything with all ranks; loading and planning are not part of it."""


class _Scratch:
    """Takes what planning creates and keeps one chunk, the largest. Implements Store."""

    url = "memory (dry run)"

    def __init__(self) -> None:
        self.largest: tuple[str, bytes] = ("", b"")

    def get(self, key: str) -> bytes:
        raise ObjectNotFoundError("read", key, "a dry run keeps nothing")

    def create(self, key: str, data: bytes) -> None:
        if key.startswith(CHUNKS_PREFIX) and len(data) > len(self.largest[1]):
            self.largest = key, data

    def list(self, prefix: str = "") -> Iterator[Entry]:  # noqa: ARG002 - the protocol's name
        yield from ()

    def publish(self, key: str, data: bytes) -> None:
        """Keep nothing."""


def dry_run(data: Data, *, model: str, **options: Any) -> DryRun:
    """Plan in memory, time one batch, and say what `run` with the same options would take.

    Raises what `run` would raise up to there.
    """
    return rehearse_settings(make_settings({"data": data, "model": model, **options}))


def rehearse_settings(settings: Settings) -> DryRun:
    """Do what `run --dry-run` does."""
    with closing(Progress()) as progress:
        return rehearse(settings, progress, Stop(settings.grace_seconds))


def rehearse(settings: Settings, progress: Progress, stop: Stop) -> DryRun:
    """Plan in memory and time one batch. Raises what a run would raise up to there."""
    settings.need("data", "model")
    rank = detect_rank(os.environ, settings.rank, settings.world_size)
    ranks = rank.world_size or settings.nproc
    check_model(settings)
    check_tokenizer(settings, plan_options(settings))
    scratch = _Scratch()
    plan = plan_into(settings, scratch, stop, progress)
    folder = locate(str(settings.model), settings.revision)
    loaded, evaluator = load_evaluator(settings, folder, plan, max(rank.local_world_size, settings.nproc))
    tokens, seconds = _time_batch(evaluator, _largest_chunk(plan, scratch))
    speed = tokens / seconds
    return DryRun(
        plan=plan_facts(plan),
        protocol=plan.protocol.label,
        device=loaded.device_id,
        dtype=loaded.dtype,
        ranks=ranks,
        timed_tokens=tokens,
        timed_seconds=seconds,
        tokens_per_second=speed,
        estimated_seconds=sum(plan.chunks.input_tokens) / speed / ranks,
    )


def dry_run_report(dry: DryRun, out: str | None = None) -> str:
    """Return the rehearsal as plain text, ending in a line break."""
    plan, to = dry.plan, "" if out is None else f" to {out}"
    return (
        f"dry run: nothing was written{to}\n"
        f"protocol: {dry.protocol}\n"
        f"{plan['documents']:,} documents in {plan['groups']:,} groups, {plan['tokens']:,} scored tokens, "
        f"{plan['windows']:,} windows in {plan['chunks']:,} chunks\n"
        f"evaluating {plan['input_tokens']:,} tokens takes about {format_seconds(dry.estimated_seconds)} with "
        f"{dry.ranks} {'rank' if dry.ranks == 1 else 'ranks'} like {dry.device} ({dry.dtype}), loading aside: "
        f"one batch of {dry.timed_tokens:,} tokens took {dry.timed_seconds:.3g} s\n"
    )


def _largest_chunk(plan: Plan, scratch: _Scratch) -> Chunk:
    key, data = scratch.largest
    contents = zip(plan.chunk_ids(), plan.chunks.content, strict=True)
    content = next(content for chunk, content in contents if chunk_key(chunk, content) == key)
    return decode_chunk(data, key, content)


def _time_batch(evaluator: "Evaluator", chunk: Chunk) -> tuple[int, float]:
    """Return input tokens and seconds of one batch, after warming up with the same one."""
    batch = first_rows(chunk, evaluator.evaluate(first_rows(chunk, 1)).batch_tokens)
    evaluator.evaluate(batch)
    start = time.perf_counter()
    evaluator.evaluate(batch)
    return batch.num_inputs, time.perf_counter() - start


def first_rows(chunk: Chunk, max_inputs: int) -> Chunk:
    """Return a chunk of the first rows with at most so many inputs, but one row at least."""
    inputs_R = np.cumsum(chunk.row_lengths_R.astype(np.int64) - 1)
    num_rows = max(1, int(np.searchsorted(inputs_R, max_inputs, side="right")))
    num_inputs = int(inputs_R[num_rows - 1])
    return Chunk(
        tokens_N=chunk.tokens_N[: num_inputs + num_rows],
        row_lengths_R=chunk.row_lengths_R[:num_rows],
        scored_M=chunk.scored_M[:num_inputs],
        row_documents_R=chunk.row_documents_R[:num_rows],
    )
