"""Take a causal language model apart into its decoder's body and its output projection, and prove the parts equal it.

The projection is the model's own forward with its body replaced by one that hands its input through. So whatever a
model does to its logits (soft-capping, scaling, biases, tied heads, a padded vocabulary) is done here as well, without
a list of architectures. What cannot be taken apart is found by one small comparison and evaluated whole.

Shape legend: B rows of a batch, T padded length, H hidden size, V vocabulary, N tokens, K rows of a slice.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from everplex.storage.errors import UsageError

LONG, SHORT = 12, 8
"""Lengths of the two rows of the comparison; the second is padded."""


class Parts(NamedTuple):
    """A model as two functions."""

    body: Callable[[Tensor, Tensor | None], Tensor]
    """Token ids and mask (1 for a token, 0 for padding, or None) to hidden states, [B, T] to [B, T, H]."""
    project: Callable[[Tensor], Tensor]
    """Hidden states to logits, [K, H] to [K, V]."""


class Verdict(NamedTuple):
    """What the comparison found out about a model."""

    parts: Parts | None
    """None where the model has to be evaluated whole."""
    needs_mask: bool
    """Whether padding on the right shows in the tokens before it unless it is masked."""
    reason: str = ""
    """One sentence, where `parts` is None."""


class _PassThrough(nn.Module):
    """In place of a decoder's body: hands through the hidden states that it is given as embeddings.

    It answers with the body's own type of output, since each model reads other fields of it.
    """

    output_type: Callable[..., Any]

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self.output_type(last_hidden_state=inputs_embeds)


def whole_logits(model: Any, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Return the model's own logits, [B, T, V]."""
    logits_BTV: Tensor = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    return logits_BTV


def take_apart(model: Any, *, compiled: bool = False) -> Parts:
    """Return the parts of a model, unproved; the body has to run before the projection does."""
    name = model.base_model_prefix
    module = getattr(model, name)
    run = _compile(module) if compiled else module
    stand_in = _PassThrough()
    shell = copy.copy(model)
    shell._modules = model._modules | {name: stand_in}  # noqa: SLF001 - the copy shares all but its body

    def body(ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        output = run(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
        stand_in.output_type = type(output)
        hidden_BTH: Tensor = output.last_hidden_state
        return hidden_BTH

    def project(hidden_KH: Tensor) -> Tensor:
        logits_1KV: Tensor = shell(inputs_embeds=hidden_KH[None], use_cache=False).logits
        return logits_1KV[0]

    return Parts(body, project)


def _compile(module: Any) -> Callable[..., Any]:
    from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 - seconds to import, and only compiling needs it

    compiled: Callable[..., Any] = torch.compile(module, dynamic=True)

    def run(**inputs: Any) -> Any:
        try:
            return compiled(**inputs)
        except TorchDynamoException as error:  # at the first call, or at one of another shape
            reason = str(error).strip().partition("\n")[0]
            raise UsageError(
                f"--compile: torch cannot compile {type(module).__name__} here ({reason}); leave it out"
            ) from error

    return run


@torch.inference_mode()
def examine(model: Any, vocab_size: int, device: torch.device) -> Verdict:
    """Compare a model with its parts on a few tokens, and look whether padding shows."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(vocab_size, (2, LONG), generator=generator).to(device)
    other_BT = ids_BT.clone()
    other_BT[1, SHORT:] = (other_BT[1, SHORT:] + 1) % vocab_size
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, SHORT:] = 0
    own_NV = whole_logits(model, ids_BT, None)[mask_BT == 1]
    needs_mask = not _close(whole_logits(model, other_BT, None)[mask_BT == 1], own_NV)
    try:
        parts = take_apart(model)
        found_NV = parts.project(parts.body(ids_BT, None)[mask_BT == 1])
    except Exception as error:  # noqa: BLE001 - a foreign forward may fail in any way without its body
        return Verdict(
            None, needs_mask, f"its output projection cannot be used alone ({type(error).__name__}: {error})"
        )
    if not _close(found_NV, own_NV):
        return Verdict(None, needs_mask, "its output projection alone gives other logits")
    return Verdict(parts, needs_mask)


def _close(found_NV: Tensor, expected_NV: Tensor) -> bool:
    """Whether two sets of logits differ by rounding only: they come from products of other shapes."""
    if found_NV.shape != expected_NV.shape:
        return False
    tolerance = max(1e-5, 4 * torch.finfo(expected_NV.dtype).eps)
    scale = expected_NV.float().nan_to_num(posinf=0, neginf=0).abs().max()
    return bool(
        torch.allclose(found_NV.float(), expected_NV.float(), rtol=0, atol=float(tolerance * scale), equal_nan=True)
    )
