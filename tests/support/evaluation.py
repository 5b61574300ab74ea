"""Wrap in-memory models and token rows as what the evaluator takes; losses by a float64 loop as its oracle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from everplex.stages.chunk import Chunk
from everplex.stages.model import LoadedModel
from everplex.stages.records import Environment


def wrap_model(model: Any) -> LoadedModel:
    """Return a model as the evaluator takes it."""
    environment = Environment(
        everplex="0", torch="0", transformers="0", device_type="cpu", device_name="test", dtype="float32", threads=1,
        attention="sdpa",
    )  # fmt: skip
    return LoadedModel(
        model=model.eval(),
        folder=Path("tiny"),
        device=torch.device("cpu"),
        dtype="float32",
        vocab_size=model.config.vocab_size,
        max_context=None,
        environment=environment,
        device_id="host/cpu",
    )


def make_chunk(rows: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]] | None = None) -> Chunk:
    """Return a chunk of token rows, each its own document; all targets are scored unless told."""
    masks = [np.ones(len(row) - 1, dtype=np.bool_) for row in rows] if scored is None else scored
    return Chunk(
        tokens_N=np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]),
        row_lengths_R=np.asarray([len(row) for row in rows], dtype=np.int32),
        scored_M=np.concatenate([np.asarray(mask, dtype=np.bool_) for mask in masks]),
        row_documents_R=np.arange(len(rows), dtype=np.int64),
    )


def random_rows(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return rows of random token ids; a row of length n has n - 1 inputs."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


@torch.inference_mode()
def oracle_losses(model: Any, rows: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return the losses of all targets: one row at a time, float64 log-softmax of the model's own logits."""
    losses = []
    for row in rows:
        logits_TV = model(torch.tensor([row[:-1]])).logits[0].double()
        losses.append(-torch.log_softmax(logits_TV, -1)[torch.arange(len(row) - 1), torch.tensor(row[1:])])
    return torch.cat(losses).numpy()
