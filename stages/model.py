"""Load a causal language model straight to its dtype and device, and say what computes."""

import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from everplex.stages.checkpoint import locate, max_context, read_config, weight_files
from everplex.stages.kernels import use_onednn
from everplex.stages.records import Environment
from everplex.storage.errors import UsageError

Dtype = Literal["float32", "bfloat16", "float16", "auto"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how it computes."""

    model: str
    """A local folder or a hub id."""
    revision: str | None = None
    dtype: Dtype = "float32"
    """`auto` is the dtype that the weights were saved in."""
    device: str = "auto"
    """`auto` is the first of cuda, xpu, mps and cpu that is there."""
    attention: str | None = None
    """Attention implementation of transformers: `sdpa`, `eager`, `flash_attention_2`, …; None is its default."""
    compile: bool = False
    """Compile the decoder's body with torch.compile: minutes at the start."""
    onednn: bool = True
    """On processors, compute float32 products with oneDNN where it serves; else with torch's own choice."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to evaluate."""

    model: Any
    folder: Path
    device: torch.device
    dtype: str
    vocab_size: int
    max_context: int | None
    """Tokens that the configuration allows in a window; None where it does not say."""
    environment: Environment
    device_id: str
    """Host and accelerator: what a verdict about health is about."""


def load_model(options: ModelOptions) -> LoadedModel:
    """Load a model. Raises UsageError for anything that cannot be loaded as a whole.

    The weights are memory-mapped, so processes of one machine that load the same dtype as the file share its pages.
    """
    folder = locate(options.model, options.revision)
    config = read_config(folder)
    weight_files(folder)
    device = choose_device(options.device)
    model = _read(folder, options).eval().requires_grad_(requires_grad=False).to(device)
    onednn = options.onednn and not options.compile and use_onednn(model)
    dtype = str(model.dtype).removeprefix("torch.")
    return LoadedModel(
        model=model,
        folder=folder,
        device=device,
        dtype=dtype,
        vocab_size=int(model.config.get_text_config().vocab_size),
        max_context=max_context(config),
        environment=_environment(model, device, dtype, compiled=options.compile, onednn=onednn),
        device_id=f"{socket.gethostname()}/{_accelerator_id(device)}",
    )


def choose_device(name: str) -> torch.device:
    """Return the device of that name. Raises UsageError where this machine or this torch has no such device.

    A plain `cuda` or `xpu` is the one of this process's LOCAL_RANK.
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "xpu": torch.xpu.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    kind, _, index = name.partition(":")
    if not available.get(kind, False):
        there = ", ".join(kind for kind, is_there in available.items() if is_there)
        raise UsageError(f"--device {name}: not available here; expected auto or one of {there}")
    if kind not in {"cuda", "xpu"}:
        return torch.device(kind)
    count = torch.cuda.device_count() if kind == "cuda" else torch.xpu.device_count()
    number = index or os.environ.get("LOCAL_RANK", "0")
    if not number.isdecimal() or int(number) >= count:
        raise UsageError(f"--device {kind}:{number}: {count} are visible here; start at most {count} ranks per machine")
    return torch.device(kind, int(number))


def _read(folder: Path, options: ModelOptions) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds to import

    with _quiet():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=options.dtype if options.dtype == "auto" else getattr(torch, options.dtype),
                attn_implementation=options.attention,
                trust_remote_code=options.trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, ImportError, RuntimeError, KeyError, SafetensorError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UsageError(f"{folder}: transformers cannot load this model: {reason}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise UsageError(
            f"{folder}: the weights lack {len(missing)} tensors of the model, the first {missing[0]}; expected the"
            " whole of a causal language model"
        )
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and notes off the terminal while a model loads."""
    from transformers.utils import logging  # noqa: PLC0415 - seconds to import

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _environment(model: Any, device: torch.device, dtype: str, *, compiled: bool, onednn: bool) -> Environment:
    return Environment(
        everplex=version("everplex"),
        torch=str(torch.__version__),
        transformers=version("transformers"),
        device_type=device.type,
        device_name=_device_name(device),
        driver=_driver(device) + (" oneDNN" if onednn else ""),
        dtype=dtype,
        threads=torch.get_num_threads(),
        attention=str(model.config._attn_implementation),  # noqa: SLF001 - the only place that tells
        compile=compiled,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xpu":
        return torch.xpu.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if device.type == "cpu" and cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver(device: torch.device) -> str:
    """Return what chooses the kernels: CUDA's or ROCm's version, or the vector instructions on a processor."""
    if device.type == "cuda":
        return f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else ""


def _accelerator_id(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    if device.type == "xpu":
        return str(getattr(torch.xpu.get_device_properties(device), "uuid", device))
    return device.type
