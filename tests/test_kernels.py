"""Products by oneDNN equal torch's own but for rounding."""

import platform
from pathlib import Path

import pytest
import torch
from support.evaluation import make_chunk, random_rows
from torch import nn

from everplex.stages.evaluate import Evaluator
from everplex.stages.kernels import use_onednn
from everplex.stages.model import ModelOptions, load_model

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN is used on x86 only")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 24), (2, 7, 24), (0, 24), (1, 1, 1, 24)])
@torch.inference_mode()
def test_products_equal_the_default_but_for_rounding(shape: tuple[int, ...], bias: bool) -> None:
    """Inputs of any shape, empty and strided ones too, with a bias or without."""
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias)
    inputs = torch.randn(*shape[:-1], 48)[..., ::2]
    expected = layer(inputs)
    assert use_onednn(nn.Sequential(layer))
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-5, atol=1e-5)


def test_other_dtypes_are_left_alone() -> None:
    """A model in bfloat16 keeps torch's own kernels."""
    assert not use_onednn(nn.Sequential(nn.Linear(4, 4)).bfloat16())


def test_losses_and_the_environment_tell(tiny_model: Path) -> None:
    """Losses with and without oneDNN differ by rounding only, and the environment says which computed them."""
    chunk = make_chunk(random_rows([60, 31, 8], 256))
    found = {}
    for onednn in (True, False):
        loaded = load_model(ModelOptions(model=str(tiny_model), device="cpu", onednn=onednn))
        assert loaded.environment.driver.endswith(" oneDNN") == onednn
        found[onednn] = torch.from_numpy(Evaluator(loaded).evaluate(chunk).nll_S)
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=5e-5)
