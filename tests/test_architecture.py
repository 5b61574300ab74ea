"""The layers: storage knows nothing of stages, stages nothing of the pipeline, verbs nothing of each other."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import everplex
import everplex.stages
import everplex.storage

LAYERS = {
    "everplex.storage": Path(everplex.storage.__file__).parent,
    "everplex.stages": Path(everplex.stages.__file__).parent,
    "everplex": Path(everplex.__file__).parent,
}
VERBS = {"plan", "evaluate", "write", "reduce", "report", "collective"}
LIGHT = [
    "everplex",
    "everplex.cli",
    "everplex.run_status",
    "everplex.checkup",
    "everplex.stages.records",
    "everplex.stages.assign",
    "everplex.stages.write",
    "everplex.stages.ledger",
    "everplex.stages.reduce",
    "everplex.stages.report",
    "everplex.storage.store",
]


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize(
    ("layer", "allowed"),
    [("everplex.storage", ("everplex.storage",)), ("everplex.stages", ("everplex.storage", "everplex.stages"))],
)
def test_a_layer_imports_only_what_lies_below_it(layer: str, allowed: tuple[str, ...]) -> None:
    """Data flows one way, and so do imports."""
    modules = sorted(LAYERS[layer].glob("*.py"))
    assert modules
    for module in modules:
        ours = {name for name in _imports(module) if name.split(".")[0] == "everplex"}
        wrong = {name for name in ours if not name.startswith(allowed)}
        assert not wrong, f"{module.name} imports {sorted(wrong)}"


def test_verbs_do_not_import_verbs() -> None:
    """A stage takes a value and gives a value; only the pipeline knows their order."""
    for verb in sorted(VERBS):
        others = {f"everplex.stages.{other}" for other in VERBS - {verb}}
        wrong = _imports(LAYERS["everplex.stages"] / f"{verb}.py") & others
        assert not wrong, f"{verb} imports {sorted(wrong)}"


@pytest.mark.parametrize("module", LIGHT)
def test_what_a_login_node_needs_is_light(module: str) -> None:
    """Neither torch nor transformers is loaded by `import everplex` and by the modules that only read and merge."""
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_the_map_names_every_module() -> None:
    """The file tree in the README is complete."""
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    modules = {path.name for folder in LAYERS.values() for path in folder.glob("*.py") if path.name[0] != "_"}
    assert modules <= set(re.findall(r"\w+\.py", readme)), "name the new module in the README's tree"


def test_every_public_name_resolves() -> None:
    """`from everplex import X` works for every name that the package exports, lazily."""
    assert {"run", "plan", "evaluate", "reduce", "compare", "Summary", "Record", "Plan"} <= set(everplex.__all__)
    for name in everplex.__all__:
        assert getattr(everplex, name) is not None
