"""Faster products on processors: the linear layers of a float32 model by oneDNN.

torch hands float32 products to the library that it was built with, which on many processors is slower than oneDNN
(measured on an AMD EPYC with AVX-512: 78 to 97 against 97 to 107 GFLOP/s per core, 67 against 91 for a short batch in
an output projection); for bfloat16 it takes oneDNN by itself. The weights stay where they are, memory-mapped.
"""

import platform
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def use_onednn(model: Any) -> bool:
    """Let a float32 model on a processor compute its linear layers with oneDNN; returns whether it does."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    if not layers or not _serves(layers[0]):
        return False
    for layer in layers:
        layer.forward = partial(_linear, layer)  # type: ignore[method-assign] # of this instance alone
    return True


def _serves(layer: nn.Linear) -> bool:
    """Whether oneDNN is there for a layer, and gives its numbers but for rounding."""
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or platform.machine() not in {"x86_64", "AMD64"}:
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    probe = torch.linspace(-1, 1, 4 * layer.in_features).reshape(4, -1)
    with torch.inference_mode():
        expected = nn.functional.linear(probe, weight, layer.bias)
        return torch.allclose(_linear(layer, probe), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - the name that callers of a layer know
    output: Tensor = torch.ops.mkldnn._linear_pointwise(input, layer.weight, layer.bias, "none", [], "")  # noqa: SLF001
    return output
