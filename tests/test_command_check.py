# SPDX-License-Identifier: Apache-2.0
"""What ``mimo doctor`` says about a ``sglang serve`` command, from what SGLang read.

``integration_tests/test_sglang_flags.py`` lets the real SGLang read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo_plugin.cli import _command_check
from mimo_plugin.cli._probe import Probe
from mimo_plugin.cli._report import Finding
from tests.published_models import LLAMA_31_8B, MIMO_V2_FLASH
from tests.test_flags import model_dir


def findings(
    monkeypatch: pytest.MonkeyPatch, tried: Probe, *words: str
) -> dict[str, list[Finding]]:
    """Findings of a command by check."""
    seen: list[list[str]] = []

    def read(words: list[str], *, timeout_s: float) -> Probe:
        seen.append(words)
        return tried

    monkeypatch.setattr(_command_check, "try_sglang_command", read)
    found: dict[str, list[Finding]] = {}
    for finding in _command_check.check_command(words, timeout_s=1):
        found.setdefault(finding.check, []).append(finding)
    assert seen[0][:1] not in (["sglang"], ["serve"])
    return found


@pytest.fixture
def path(tmp_path: Path) -> str:
    return model_dir(tmp_path / "m", MIMO_V2_FLASH, mtp_layers=3)


def drafting(path: str, **values: Any) -> Probe:
    """A command whose drafts SGLang refuses on a machine without a GPU."""
    eagle = {"model_path": path, "speculative_algorithm": "EAGLE"}
    return Probe(step="resolve", error="ValueError: no GPU", values=eagle | values)


@pytest.mark.parametrize(
    ("tried", "level", "text"),
    [
        (Probe(step="parse", error="error: unrecognized"), "problem", "does not read it"),
        (Probe(step="resolve", error="mimo-plugin: error: no hits"), "problem", "no hits"),
        (Probe(step="resolve", error="ValueError: page"), "problem", "SGLang refuses it here"),
        (Probe(step="load", error="no module sglang"), "problem", "not read it at all"),
        (Probe(step="done", error=None, values={"mimo_features": ["kv"]}), "ok", "features kv"),
        (Probe(step="done", error=None), "note", "does not ask for the plugin"),
        (
            Probe(step="done", error=None, values={"mimo_degraded": "nothing fits"}),
            "problem",
            "nothing fits",
        ),
    ],
)
def test_how_a_command_ends(
    monkeypatch: pytest.MonkeyPatch, tried: Probe, level: str, text: str
) -> None:
    (found,) = findings(monkeypatch, tried, "sglang", "serve", "--x")["command"]
    assert found.level == level
    assert text in found.text
    assert bool(found.fix) == (level == "problem")


@pytest.mark.parametrize(
    ("values", "level", "text"),
    [
        ({"speculative_algorithm": None}, "note", "3 MTP layers are not used"),
        ({"speculative_num_steps": 3, "speculative_eagle_topk": 1}, "ok", "each of 3 MTP layers"),
        ({"speculative_algorithm": "nextn"}, "ok", "each of 3 MTP layers"),
        ({"speculative_num_steps": 5}, "problem", "the last ones find no weights"),
        ({"speculative_num_steps": 2}, "note", "2 of 3 MTP layers are used"),
        ({"speculative_eagle_topk": 4}, "problem", "a chain, not a tree"),
    ],
)
def test_one_layer_for_each_draft_step(
    monkeypatch: pytest.MonkeyPatch, path: str, values: dict[str, Any], level: str, text: str
) -> None:
    """B31: SGLang loads layer i for step i, and nothing into a step without a layer."""
    found = findings(monkeypatch, drafting(path, **values))["drafts"]
    assert any(finding.level == level and text in finding.text for finding in found)


def test_draft_layers_that_no_pool_was_sized_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    """B33."""
    hidden = findings(monkeypatch, drafting(path))["drafts"]
    assert any("without the KV of draft layers" in finding.text for finding in hidden)
    says = MIMO_V2_FLASH | {"num_nextn_predict_layers": 3}
    told = model_dir(tmp_path / "told", says, mtp_layers=3)
    found = findings(monkeypatch, drafting(told))["drafts"]
    assert not any("without the KV" in finding.text for finding in found)


def test_drafts_without_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    none = model_dir(tmp_path / "none", MIMO_V2_FLASH, mtp_layers=0)
    (found,) = findings(monkeypatch, drafting(none))["drafts"]
    assert found.level == "problem" and "holds no MTP layers" in found.text
    other = findings(monkeypatch, drafting(none, speculative_algorithm="NGRAM"))
    assert "drafts" not in other


@pytest.mark.parametrize(
    ("ratio", "said"), [(None, True), (0.8, True), (0.17, False), (0.5, False)]
)
def test_pools_left_at_the_engines_ratio(
    monkeypatch: pytest.MonkeyPatch, path: str, ratio: float | None, said: bool
) -> None:
    tried = Probe(
        step="done", error=None, values={"model_path": path, "swa_full_tokens_ratio": ratio}
    )
    found = findings(monkeypatch, tried).get("pools", [])
    assert [finding.level for finding in found] == ["note"] * said
    assert not found or "87% of the KV's bytes" in found[0].text


def test_nothing_is_said_of_what_does_not_apply(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    plain = model_dir(tmp_path / "plain", LLAMA_31_8B)
    for values in ({"model_path": plain}, {"model_path": path, "encoder_only": True}):
        found = findings(monkeypatch, Probe(step="done", error=None, values=values))
        assert set(found) == {"command"}
    away = Probe(step="done", error=None, values={"model_path": "org/model"})
    assert "no directory here" in findings(monkeypatch, away)["command"][1].text
