"""Check-up of this machine: Python, packages, devices, cache folder."""

import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from everplex.findings import Finding, Severity
from everplex.stages.threads import default_threads
from everplex.storage.errors import UsageError
from everplex.storage.local import cache_folder

_REQUIREMENT = re.compile(r"""(?P<name>[\w.-]+)>=(?P<least>[\d.]+)(?:\s*;\s*extra\s*==\s*["'](?P<extra>\w+)["'])?""")
_PURPOSES = {
    "s3": "s3:// URLs",
    "gcs": "gs:// URLs",
    "azure": "az:// URLs",
    "parquet": "Parquet and Arrow files",
    "gguf": "GGUF models",
    "quant": "quantised models",
}


def check_environment() -> Iterator[Finding]:
    """Yield what there is to say of this machine."""
    yield _finding("good", f"Python {platform.python_version()} on {platform.platform()}")
    yield from _packages()
    yield from _devices()
    yield _cache()


def _finding(severity: Severity, what: str, todo: str = "") -> Finding:
    return Finding(area="environment", severity=severity, what=what, todo=todo)


def _packages() -> Iterator[Finding]:
    """Compare what is installed with what everplex asks for; an extra is asked for by those who need it."""
    good = [f"everplex {version('everplex')}"]
    for requirement in requires("everplex") or ():
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None or (match["extra"] and match["extra"] not in _PURPOSES):
            continue
        name, least, extra = match["name"], match["least"], match["extra"]
        package = f"everplex[{extra}]" if extra else "everplex"
        try:
            found = version(name)
        except PackageNotFoundError:
            if extra:
                yield _finding("note", f"{name} is not installed: no {_PURPOSES[extra]}", f"pip install '{package}'")
            else:
                yield _finding("problem", f"{name} is not installed", f"pip install --force-reinstall '{package}'")
            continue
        if _numbers(found) < _numbers(least):
            yield _finding(
                "problem", f"{name} {found} is older than {least}", f"pip install --upgrade '{name}>={least}'"
            )
        else:
            good.append(f"{name} {found}")
    yield _finding("good", ", ".join(good))


def _numbers(release: str) -> list[int]:
    """Return the numbers that a version starts with, without zeros at the end."""
    match = re.match(r"\d+(?:\.\d+)*", release)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a shared library that is missing is an OSError
        yield _finding("problem", f"torch cannot be imported ({error})", "install torch again, see https://pytorch.org")
        return
    accelerators = [
        *(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
        *(torch.xpu.get_device_name(index) for index in range(torch.xpu.device_count())),
        *(["mps"] if torch.backends.mps.is_available() else []),
    ]
    threads = default_threads()
    if accelerators:
        yield _finding("good", f"devices: {', '.join(accelerators)}; cpu with {threads} threads")
        return
    yield _finding("good", f"devices: cpu alone, {threads} threads")
    if torch.version.cuda or torch.version.hip:
        yield _finding(
            "note",
            f"torch {torch.__version__} is built for accelerators and sees none",
            "where there should be one, look at the driver (nvidia-smi, rocm-smi) and at CUDA_VISIBLE_DEVICES",
        )


def _cache() -> Finding:
    try:
        return _finding("good", f"cache folder {cache_folder()}")
    except UsageError as error:
        return _finding("problem", str(error))
