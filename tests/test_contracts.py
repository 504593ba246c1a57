# SPDX-License-Identifier: Apache-2.0
"""Contracts with the engine: hold on every source at hand, and notice each kind of change."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mimo_plugin import contracts
from mimo_plugin.contracts.row import Contract
from mimo_plugin.contracts.source import SourceTree
from mimo_plugin.contracts.vllm_kv import FREE_QUEUE_METHODS
from mimo_plugin.contracts.vllm_media import PARTS
from mimo_plugin.engines.vllm import version
from mimo_plugin.features import FEATURES, available

REPOSITORY = Path(__file__).resolve().parents[1]
LOCK = json.loads(Path(__file__).with_name("contracts.lock.json").read_text(encoding="utf-8"))


def _extra_sources() -> list[Path]:
    """Further vLLM package directories, from ``MIMO_VLLM_SOURCES=dir[:dir]``."""
    value = os.environ.get("MIMO_VLLM_SOURCES", "")
    return [Path(part) for part in value.split(os.pathsep) if part]


def _sources() -> list[Path]:
    installed = contracts.find_package("vllm")
    return ([installed] if installed else []) + _extra_sources()


@pytest.mark.vllm
def test_vllm_is_installed() -> None:
    assert contracts.find_package("vllm"), "the installed engine is mandatory for this test"


@pytest.mark.vllm
@pytest.mark.parametrize("root", _sources(), ids=lambda root: str(contracts.source_version(root)))
def test_every_contract_holds(root: Path) -> None:
    assert contracts.check_vllm(root) == []


@pytest.mark.vllm
@pytest.mark.parametrize("root", _sources(), ids=lambda root: str(contracts.source_version(root)))
def test_source_is_what_was_recorded(root: Path) -> None:
    """Upstream changed within a tested version, or the table did: run record_contracts.py."""
    found = contracts.source_version(root)
    assert found in LOCK, f"{found} was never recorded"
    assert json.loads(json.dumps(contracts.record(root))) == LOCK[found]


@pytest.mark.parametrize("recorded", sorted(LOCK))
def test_recorded_versions_satisfy_the_table(recorded: str) -> None:
    assert contracts.check_recorded(LOCK[recorded]) == []


def test_each_tested_minor_version_was_recorded() -> None:
    recorded = {tuple(map(int, full.split(".")[:2])) for full in LOCK}
    assert recorded == set(version.SUPPORTED_MINORS)


@pytest.mark.vllm
def test_the_check_imports_nothing() -> None:
    code = (
        "import sys; from mimo_plugin.contracts import check_vllm; check_vllm();"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'vllm', 'torch', 'numpy'}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_rows_are_unique_and_explained() -> None:
    keys = [(row.key, row.features) for row in contracts.VLLM_CONTRACTS]
    assert len(keys) == len(set(keys))
    for row in contracts.VLLM_CONTRACTS:
        assert row.why
        # `vision-qwen`: rows of a feature that one kind of model needs.
        assert {name.partition("-")[0] for name in row.features} <= {*FEATURES, *PARTS}


def test_every_module_that_a_feature_names_has_rows() -> None:
    rows = (*contracts.VLLM_CONTRACTS, *contracts.SGLANG_CONTRACTS)
    covered = {f"{row.package}.{row.module}" for row in rows}
    for feature in FEATURES.values():
        assert set(feature.contracts) <= covered, feature.name
        named = {name.partition(".")[0] for name in feature.contracts}
        assert named == set(feature.engines), feature.name


# ----------------------------------------------------------------- what our code uses is covered


def _our_imports() -> set[tuple[str, str]]:
    """``(module below vllm, name)`` of every ``from vllm.… import name`` in our adapter."""
    found = set()
    for path in (REPOSITORY / "mimo_plugin" / "engines" / "vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                module = (node.module or "").removeprefix("vllm.")
                found.update((module, alias.name) for alias in node.names)
    return found


# Stable for years and harmless when they move: an ImportError there is loud.
_NOT_IN_TABLE = {"logger"}


def test_every_upstream_name_we_import_is_in_the_table() -> None:
    covered_modules = {row.module for row in contracts.VLLM_CONTRACTS}
    covered = {
        (row.module, row.name.partition(".")[0]) for row in contracts.VLLM_CONTRACTS if row.name
    }
    missing = sorted(
        f"vllm.{module}.{name}"
        for module, name in _our_imports()
        if module not in _NOT_IN_TABLE
        and (module, name) not in covered
        and f"{module}.{name}" not in covered_modules  # `from vllm.v1.core import block_pool`
    )
    assert not missing, "add a row to mimo_plugin/contracts for: " + ", ".join(missing)


def _our_subclasses() -> list[tuple[ast.ClassDef, str, str]]:
    """``(class, module below vllm, base)`` of our classes that derive from an upstream class."""
    found = []
    for path in (REPOSITORY / "mimo_plugin" / "engines" / "vllm").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        origin = {
            alias.asname or alias.name: (node.module or "").removeprefix("vllm.")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in origin:
                        found.append((node, origin[base.id], base.id))
    return found


@pytest.mark.vllm
@pytest.mark.parametrize("root", _sources(), ids=lambda root: str(contracts.source_version(root)))
def test_our_overrides_take_what_the_engine_may_pass(root: Path) -> None:
    upstream = SourceTree(root, "vllm")
    checked = 0
    for cls, module, base in _our_subclasses():
        for method in cls.body:
            if not isinstance(method, ast.FunctionDef) or method.name == "__init__":
                continue
            theirs = upstream.lookup(module, f"{base}.{method.name}")
            if theirs is None or method.args.vararg or method.args.kwarg:
                continue
            ours = [arg.arg for arg in (*method.args.args, *method.args.kwonlyargs)][1:]
            missing = [name for name in theirs.params if name not in ours]
            assert not missing, f"{cls.name}.{method.name} does not take {missing}"
            order = [name for name in ours if name in theirs.params]
            assert order == list(theirs.params), f"{cls.name}.{method.name}: order of parameters"
            checked += 1
    assert checked or not _our_subclasses()


def _methods_of_our_queue() -> set[str] | None:
    """Methods of the class that stands in for the engine's free queue, by the sources alone."""
    for path in (REPOSITORY / "mimo_plugin" / "engines" / "vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
                if {"popleft_n", "prepend_n"} <= methods:
                    return methods
    return None


def test_our_free_queue_has_every_method_of_the_engine_s() -> None:
    """B62: no method of the pool that the engine may call is missing from what replaces it."""
    methods = _methods_of_our_queue()
    if methods is None:
        pytest.skip("no replacement of the free queue in this version")
    assert set(FREE_QUEUE_METHODS) <= methods


def test_nothing_runner_dependent_is_read() -> None:
    """B51: fields that only one model runner fills are not read by the scheduler adapter."""
    fragile = re.compile(r"\.(resumed_req_ids|resumed_from_preemption|all_token_ids_by_req)\b")
    for path in (REPOSITORY / "mimo_plugin" / "engines" / "vllm").rglob("*.py"):
        assert not fragile.search(path.read_text(encoding="utf-8")), path


# ------------------------------------------------------------------------ changes are noticed

_MODULE = """
from elsewhere import Other
from vllm.base import Base

LIMIT = "seven"

class Queue:
    size: int = 0

    def __init__(self, blocks):
        self.free = len(blocks)

    def popleft(self): ...

    def append(self, block): ...

class Child(Base):
    def call(self, request, tokens, *, mask=None): ...

def function(a, b, c=None): ...

def open_function(**kwargs): ...

class Pool:
    def run(self):
        self.free_block_queue.popleft()
        self.free_block_queue.rotate()
"""

_BASE = """
class Base:
    inherited: int

    def from_base(self, request_id): ...
"""


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text(_MODULE, encoding="utf-8")
    (package / "base.py").write_text(_BASE, encoding="utf-8")
    return SourceTree(package, "vllm")


def _problems(tree: SourceTree, name: str = "", **fields: object) -> list[str]:
    row = Contract(module="module", name=name, features=("kv",), why="reason", **fields)  # type: ignore[arg-type]
    return row.problems(contracts.observe(tree, row))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("function", {"positional": ("a", "b"), "params": ("c",), "closed": True}),
        ("open_function", {"params": ("anything",)}),
        ("Queue", {"members": ("size", "free", "popleft")}),
        ("Queue", {"exact_methods": ("__init__", "popleft", "append")}),
        ("Child", {"bases": ("Base",), "members": ("inherited", "from_base", "call")}),
        ("Child.call", {"positional": ("request", "tokens"), "params": ("mask",), "closed": True}),
        ("function", {"positional": ("a", "b"), "accepts": ("c", "d")}),
        ("Child.from_base", {"positional": ("request_id",), "closed": True}),
        ("LIMIT", {"value": "seven"}),
        ("Other", {"importable": True}),
        ("", {"attribute_use": "free_block_queue", "members": ("popleft", "rotate")}),
    ],
)
def test_a_row_that_holds(tree: SourceTree, name: str, fields: dict[str, object]) -> None:
    assert _problems(tree, name, **fields) == []


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("absent", {}, "expected to exist, found nothing"),
        ("Queue.absent", {}, "expected to exist, found nothing"),
        ("Other", {}, "expected a definition in that module, found an import"),
        ("function", {"params": ("mask",)}, r"expected parameter mask, found \(a, b, c\)"),
        ("function", {"positional": ("b",)}, r"expected first parameters \(b\)"),
        ("function", {"positional": ("a",), "closed": True}, "found required b"),
        (
            "function",
            {"positional": ("a", "b"), "accepts": ()},
            "no further parameter, found new c",
        ),
        ("function", {"members": ("x",)}, "expected a class, found a function"),
        ("Queue", {"params": ("x",)}, "expected a function, found a class"),
        ("Queue", {"members": ("size", "gone")}, "attribute or method gone"),
        (
            "Queue",
            {"exact_methods": ("__init__", "popleft")},
            "no further method, found new append",
        ),
        (
            "Queue",
            {"exact_methods": ("__init__", "popleft", "append", "rotate")},
            "expected method rotate, found none",
        ),
        ("Child", {"bases": ("Queue",)}, "expected base class Queue, found Base"),
        ("LIMIT", {"value": "eight"}, "expected 'eight', found 'seven'"),
        ("", {"attribute_use": "free_block_queue", "members": ("popleft",)}, "found rotate"),
    ],
)
def test_a_change_is_one_line(
    tree: SourceTree, name: str, fields: dict[str, object], said: str
) -> None:
    problems = _problems(tree, name, **fields)
    assert len(problems) == 1
    assert re.search(said, problems[0])
    assert problems[0].startswith("vllm.module.")
    assert problems[0].endswith("affects kv: reason")
    assert "\n" not in problems[0]


def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    (problem,) = contracts.check_vllm(tmp_path)
    assert str(tmp_path) in problem


def test_only_the_rows_of_the_features_asked_for(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    every = contracts.check_vllm(tmp_path)
    switch_only = contracts.check_vllm(tmp_path, features=())
    assert 0 < len(switch_only) < len(every)
    assert all("affects every feature" in line for line in switch_only)
    features = (*available("vllm"), *PARTS)
    for name in features:
        lines = contracts.check_vllm(tmp_path, features=[name])
        assert len(switch_only) < len(lines) < len(every)
        assert set(lines) <= set(every)
    parts = {name for row in contracts.VLLM_CONTRACTS for name in row.features} - set(features)
    assert contracts.check_vllm(tmp_path, features=[*features, *parts]) == every


def test_the_wheel_does_not_pin_the_engine() -> None:
    """B86: no requirement on the engine, so an upgrade is never blocked by the plugin."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r"^dependencies = \[\]", text, re.MULTILINE)
    assert not re.search(r"[\"']vllm(-cpu)?\s*[<>=~]", text)


@pytest.mark.vllm
def test_entry_point_group_is_the_one_the_engine_reads() -> None:
    """B50: the group in our metadata equals the constant in the installed engine."""
    root = contracts.find_package("vllm")
    assert root is not None
    facts = SourceTree(root, "vllm").lookup("plugins", "DEFAULT_PLUGINS_GROUP")
    assert facts is not None
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points."{facts.value}"]' in text
