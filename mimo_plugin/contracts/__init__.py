# SPDX-License-Identifier: Apache-2.0
"""What the plugin relies on in the engine: symbols, fields, call signatures.

``VLLM_CONTRACTS`` and ``SGLANG_CONTRACTS`` are data, one row per upstream symbol.  ``check_vllm``
and ``check_sglang`` compare them with source files by ``ast``; nothing of an engine is imported,
and it takes about 0.2 s.  ``record`` writes down what was found, so that a version whose source is
not at hand can still be checked against every change of the table.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mimo_plugin.contracts.row import Contract
from mimo_plugin.contracts.sglang import SGLANG_CONTRACTS as SGLANG_CONTRACTS
from mimo_plugin.contracts.source import SourceTree, SymbolFacts
from mimo_plugin.contracts.vllm import VLLM_CONTRACTS


def source_version(package_root: Path) -> str | None:
    """The version written in a source tree's ``_version.py`` (None when there is none)."""
    try:
        text = (package_root / "_version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def find_package(name: str) -> Path | None:
    """Directory of an importable top-level package; nothing is imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def check_vllm(
    package_root: Path | None = None, features: Iterable[str] | None = None
) -> list[str]:
    """Compare the table with a vLLM source tree.

    Args:
        package_root: directory of the package ``vllm``; None means the installed one.
        features: only rows that one of these features needs; None means every row.

    Returns:
        One line for each broken contract: symbol, what is expected, what was found, which feature
        is affected.  Empty when all hold.
    """
    return _check("vllm", "vLLM", package_root, select(features))


def check_sglang(
    package_root: Path | None = None, features: Iterable[str] | None = None
) -> list[str]:
    """Like ``check_vllm``, for the package ``sglang``."""
    return _check("sglang", "SGLang", package_root, select(features, SGLANG_CONTRACTS))


def _check(
    package: str, title: str, package_root: Path | None, rows: Iterable[Contract]
) -> list[str]:
    root = package_root if package_root is not None else find_package(package)
    if root is None:
        return [f"{package}: expected an importable package, found none; fix: install {title}"]
    if not (root / "__init__.py").is_file():
        return [f"{package}: expected a package directory, found {root} without __init__.py"]
    tree = SourceTree(root, package)
    problems: list[str] = []
    for contract in rows:
        problems += contract.problems(observe(tree, contract))
    return problems


def select(
    features: Iterable[str] | None, table: tuple[Contract, ...] = VLLM_CONTRACTS
) -> list[Contract]:
    """Rows of ``table`` that one of ``features`` needs (None: all)."""
    if features is None:
        return list(table)
    wanted = set(features)
    return [row for row in table if not row.features or wanted & set(row.features)]


def observe(tree: SourceTree, contract: Contract) -> SymbolFacts | None:
    """What ``tree`` holds for a row: the symbol's facts, or the uses of an attribute."""
    if contract.attribute_use:
        if tree.module(contract.module) is None:
            return None
        uses = tree.attribute_uses(contract.module, contract.attribute_use)
        return SymbolFacts(kind="uses", members=frozenset(uses))
    return tree.lookup(contract.module, contract.name)


def record(
    package_root: Path, table: tuple[Contract, ...] = VLLM_CONTRACTS
) -> dict[str, dict[str, Any]]:
    """What a source tree holds for every row, reduced to what the rows look at; JSON-able."""
    tree = SourceTree(package_root, table[0].package)
    found: dict[str, dict[str, Any]] = {}
    for contract in table:
        facts = observe(tree, contract)
        if facts is None:
            continue
        entry: dict[str, Any] = {"kind": facts.kind}
        if facts.params or facts.kind == "function":
            entry["params"] = list(facts.params)
            entry["required"] = list(facts.required)
            entry["takes_any"] = facts.takes_any
        if facts.kind == "class":
            entry["members"] = sorted(facts.members & set(contract.members))
            entry["bases"] = sorted(set(facts.bases) & set(contract.bases))
            if contract.exact_methods is not None:
                entry["methods"] = sorted(facts.methods)
        if facts.kind == "uses":
            entry["members"] = sorted(facts.members)
        if contract.value is not None:
            entry["value"] = facts.value
        # Features have rows of their own for a symbol that they share.
        for name, value in found.get(contract.key, {}).items():
            both = name in ("members", "bases") and name in entry
            entry[name] = sorted({*value, *entry[name]}) if both else value
        found[contract.key] = entry
    return found


def check_recorded(
    recorded: Mapping[str, Mapping[str, Any]], table: tuple[Contract, ...] = VLLM_CONTRACTS
) -> list[str]:
    """Like ``check_vllm``, against what ``record`` wrote down."""
    problems: list[str] = []
    for contract in table:
        entry = recorded.get(contract.key)
        facts = None
        if entry is not None:
            facts = SymbolFacts(
                kind=entry["kind"],
                params=tuple(entry.get("params", ())),
                required=tuple(entry.get("required", ())),
                takes_any=entry.get("takes_any", False),
                methods=tuple(entry.get("methods", ())),
                members=frozenset(entry.get("members", ())),
                bases=tuple(entry.get("bases", ())),
                value=entry.get("value"),
            )
        problems += contract.problems(facts)
    return problems
