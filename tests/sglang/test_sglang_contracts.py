# SPDX-License-Identifier: Apache-2.0
"""Contracts with SGLang: recorded for the tested release, and complete for what we import."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from mimo_plugin import contracts
from mimo_plugin.contracts.source import SourceTree
from mimo_plugin.engines.sglang import version
from mimo_plugin.features import FEATURES

REPOSITORY = Path(__file__).resolve().parents[2]
ADAPTER = REPOSITORY / "mimo_plugin" / "engines" / "sglang"
LOCK = json.loads((REPOSITORY / "tests" / "contracts_sglang.lock.json").read_text(encoding="utf-8"))


def _sources() -> list[Path]:
    """SGLang's package: in this environment, in ``.venv-sglang``, in ``MIMO_SGLANG_SOURCES``."""
    found = [contracts.find_package("sglang")]
    found += sorted(REPOSITORY.glob(".venv-sglang/lib/python*/site-packages/sglang"))
    named = os.environ.get("MIMO_SGLANG_SOURCES", "")
    found += [Path(part) for part in named.split(os.pathsep) if part]
    return [root for root in found if root is not None]


@pytest.mark.sglang
@pytest.mark.parametrize("root", _sources(), ids=lambda root: str(contracts.source_version(root)))
def test_every_contract_holds_as_recorded(root: Path) -> None:
    assert contracts.check_sglang(root) == []
    found = contracts.source_version(root)
    recorded = contracts.record(root, contracts.SGLANG_CONTRACTS)
    assert found in LOCK, f"{found} was never recorded: run tests/record_contracts.py"
    assert json.loads(json.dumps(recorded)) == LOCK[found]


@pytest.mark.parametrize("recorded", sorted(LOCK))
def test_recorded_versions_satisfy_the_table(recorded: str) -> None:
    assert contracts.check_recorded(LOCK[recorded], contracts.SGLANG_CONTRACTS) == []


def test_each_tested_release_was_recorded() -> None:
    assert set(LOCK) == {".".join(map(str, release)) for release in version.SUPPORTED_RELEASES}


def test_rows_are_unique_and_explained() -> None:
    keys = [(row.key, row.features, row.members) for row in contracts.SGLANG_CONTRACTS]
    assert len(keys) == len(set(keys))
    for row in contracts.SGLANG_CONTRACTS:
        assert row.why
        assert set(row.features) <= set(FEATURES)
        assert row.symbol.startswith("sglang.srt.")


def test_every_upstream_name_we_import_is_in_the_table() -> None:
    covered = {
        (f"sglang.{row.module}", row.name.partition(".")[0]) for row in contracts.SGLANG_CONTRACTS
    }
    imported = {
        (str(node.module), alias.name)
        for path in ADAPTER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang.")
        for alias in node.names
    }
    assert imported
    assert imported <= covered, f"add rows to mimo_plugin/contracts for {imported - covered}"


def test_a_missing_symbol_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    every = contracts.check_sglang(tmp_path)
    switch_only = contracts.check_sglang(tmp_path, features=())
    assert 0 < len(switch_only) < len(every)
    assert all(line.startswith("sglang.srt.") and "\n" not in line for line in every)
    kv = contracts.check_sglang(tmp_path, features=["kv"])
    assert len(switch_only) < len(kv) < len(every) and set(kv) < set(every)
    named = ["kv", "scheduler", "tiers", "vision"]
    assert contracts.check_sglang(tmp_path, features=named) == every
    (problem,) = contracts.check_sglang(tmp_path / "nowhere")
    assert "without __init__.py" in problem


def test_a_class_that_is_wrapped_afterwards_keeps_its_methods(tmp_path: Path) -> None:
    """As SGLang does with ``ServerArgs``: a class, then the same name assigned."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "args.py").write_text(
        "class Args:\n    def resolve(self, name): ...\n\nArgs = make(vars(Args))\nArgs.x = 1\n",
        encoding="utf-8",
    )
    facts = SourceTree(package, "sglang").lookup("args", "Args.resolve")
    assert facts is not None
    assert facts.params == ("name",)
