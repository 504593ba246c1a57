# SPDX-License-Identifier: Apache-2.0
"""Layers: a package may only import what lies to its right; core decides and imports nothing."""

import ast
import sys
from pathlib import Path

import pytest

import mimo_plugin

ROOT = Path(mimo_plugin.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

ENGINE_PACKAGES = {"vllm", "sglang", "torch", "transformers", "numpy", "numba", "triton"}
# layer -> layers of ours it may import
ALLOWED = {
    "core": {"core"},
    "kernels": {"kernels", "core", "base"},
    "tiers": {"tiers", "core", "base"},
    "media": {"media", "core", "base"},
    "base": {"base", "core"},
    "router": {"router", "core", "tiers", "base"},
    "engines": {"engines", "core", "kernels", "media", "tiers", "base"},
    "cli": {"cli", "engines", "core", "kernels", "media", "tiers", "router", "base"},
}


def layer_of(dotted: str) -> str:
    parts = dotted.split(".")
    package = len(parts) > 1 and (ROOT / parts[1]).is_dir() and parts[1] in ALLOWED
    return parts[1] if package else "base"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path, *, top_level_only: bool = False):
    tree = ast.parse(path.read_text())
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.walk(node)
    }
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only or (top_level_only and node in inside):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            if node.module == "mimo_plugin":
                yield from (f"mimo_plugin.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_to_the_right(path):
    layer = layer_of(module_name(path))
    entry = path.name == "entrypoints.py"  # reaches its adapter inside the function, on purpose
    for name in imports(path, top_level_only=entry):
        if name.split(".")[0] == "mimo_plugin" and name != "mimo_plugin":
            assert layer_of(name) in ALLOWED[layer], f"{module_name(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_only_adapters_and_kernels_name_an_engine(path):
    layer = layer_of(module_name(path))
    if layer in ("engines", "kernels"):
        return
    # Inside a function, when needed: the router's tokenizer among them.
    late = path.name == "entrypoints.py" or layer in ("cli", "router")
    named = {name.split(".")[0] for name in imports(path, top_level_only=late)}
    foreign = ENGINE_PACKAGES - {"numpy"} if layer == "media" else ENGINE_PACKAGES  # pixels
    if layer == "router":  # its own tokenizer, inside a function
        foreign = foreign - {"transformers"}
        assert "transformers" not in {
            name.split(".")[0] for name in imports(path, top_level_only=True)
        }
    assert not named & foreign, f"{module_name(path)} imports {named & foreign}"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_core_uses_the_standard_library_only(path):
    if layer_of(module_name(path)) == "core":
        for name in imports(path):
            top = name.split(".")[0]
            assert top == "mimo_plugin" or top in sys.stdlib_module_names


def test_entrypoints_imports_the_standard_library_only():
    for name in imports(ROOT / "entrypoints.py", top_level_only=True):
        assert name.split(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_are_licensed_and_small(path):
    text = path.read_text()
    assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert text.count("\n") <= 600, "split the module"
