# SPDX-License-Identifier: Apache-2.0
"""What ``mimo doctor`` says about a ``vllm serve`` command: its tiers, on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mimo_plugin.cli import _tiers_check, _vllm_command_check, main
from mimo_plugin.cli._probe import Probe
from mimo_plugin.cli._report import Finding
from mimo_plugin.config import parse_config
from mimo_plugin.engines.vllm.tiers.configure import transfer_config

WORDS = ("vllm", "serve", "MODEL")


def findings(
    monkeypatch: pytest.MonkeyPatch, tried: Probe, *words: str
) -> dict[str, list[Finding]]:
    """Findings of a command by check."""
    seen: list[list[str]] = []

    def read(words: list[str], *, timeout_s: float) -> Probe:
        seen.append(words)
        return tried

    monkeypatch.setattr(_vllm_command_check, "try_vllm_command", read)
    found: dict[str, list[Finding]] = {}
    for finding in _vllm_command_check.check_command(words or WORDS, {}, timeout_s=1):
        found.setdefault(finding.check, []).append(finding)
    assert seen[0][:1] == ["MODEL"]
    return found


def asked(tiers: dict[str, Any] | None, **values: Any) -> Probe:
    section = {"features": ["kv", "tiers"], "tiers": tiers} if tiers is not None else None
    return Probe(step="done", error=None, values={"section": section, **values})


@pytest.mark.parametrize("words", [WORDS, ("serve", "MODEL"), ("MODEL",)])
@pytest.mark.parametrize(
    ("tried", "level", "text"),
    [
        (Probe(step="parse", error="unrecognized arguments: --x"), "problem", "does not read it"),
        (Probe(step="load", error="no module vllm"), "problem", "not read it at all"),
        (asked(None), "note", "does not ask for the plugin"),
        (
            Probe(step="done", error=None, values={"section": {"features": ["kv"]}}),
            "ok",
            "features kv",
        ),
        (asked({}), "problem", "mimo.tiers.host_gib: found None"),
        (asked({"host_gib": 1, "prefetch_tokens": 4}), "problem", "no value on vLLM"),
        (asked({"host_gb": 1}), "problem", "did you mean 'host_gib'"),
        (
            asked(
                None,
                kv_connector="MimoTieredConnector",
                kv_connector_extra_config={"mimo_tiers": {"path": "/kv"}},
            ),
            "problem",
            "mimo.tiers.host_gib: found None",
        ),
    ],
)
def test_how_a_command_ends(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], tried: Probe, level: str, text: str
) -> None:
    found = findings(monkeypatch, tried, *words)
    (command,) = found.pop("command")
    assert not found
    assert command.level == level
    assert text in command.text
    assert bool(command.fix) == (level == "problem")


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_places_of_either_form_are_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_hand: bool
) -> None:
    tiers = {"host_gib": 0.01, "path": str(tmp_path / "kv"), "capacity_gib": 0.001}
    tried = asked(tiers)
    if by_hand:
        config = parse_config(tried.values["section"], environ={}, engine="vllm")
        assert config is not None
        written = transfer_config(config.tiers)
        names = ("kv_connector", "kv_connector_extra_config")
        tried = asked(None, **{name: written[name] for name in names})
    found = findings(monkeypatch, tried)
    assert [each.level for each in found["host memory"] + found["store"]] == ["ok", "ok"]
    assert "can be written to" in found["store"][0].text
    assert not (tmp_path / "kv").exists(), "nothing is made"


def levels(tiers: dict[str, Any], **options: Any) -> dict[str, list[tuple[str, str]]]:
    config = parse_config({"tiers": tiers}, environ={}, engine="vllm")
    assert config is not None
    found: dict[str, list[tuple[str, str]]] = {}
    for finding in _tiers_check.check_tiers(config.tiers, **options):
        found.setdefault(finding.check, []).append((finding.level, finding.text))
    return found


def test_host_memory_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage("/dev/shm").free / 2**30
    assert levels({"host_gib": free * 0.6})["host memory"][0][0] == "ok"
    ((level, text),) = levels({"host_gib": free * 0.6}, engines=2)["host memory"]
    assert level == "problem" and "does not fit into /dev/shm" in text
    monkeypatch.setattr(_tiers_check, "memory_limit_bytes", lambda: 1 << 20)
    ((level, text),) = levels({"host_gib": 0.01})["host memory"]
    assert level == "problem" and "the container's limit" in text


def test_without_a_store_it_says_so() -> None:
    ((level, text),) = levels({"host_gib": 0.01})["tiers"]
    assert level == "note" and "ends with the engine" in text


def test_folders(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    paths = [str(tmp_path), str(blocked / "kv")]
    found = levels({"host_gib": 0.01, "path": paths, "capacity_gib": [0.001, 1]})["store"]
    assert [level for level, _ in found] == ["ok", "problem"]
    found = levels({"host_gib": 0.01, "path": str(tmp_path), "capacity_gib": 1 << 20})["store"]
    assert found[0][0] == "note" and "capacity_gib leaves it 1.04858e+06" in found[0][1]
    ((level, text),) = levels({"host_gib": 0.01, "path": str(tmp_path)})["tiers"]
    assert level == "problem" and "capacity_gib" in text


@pytest.mark.parametrize(
    ("store", "path", "said"),
    [
        ("redis", "redis://127.0.0.1:1", "of the calls to 1 servers failed"),
        ("redis", "/data", "redis://HOST:PORT/DB"),
        ("mooncake", "127.0.0.1:1", "mimo.tiers.path: no "),
    ],
)
def test_servers_that_are_not_there(store: str, path: str, said: str) -> None:
    pytest.importorskip("redis")
    ((level, text),) = levels({"host_gib": 0.01, "store": store, "path": path})["store"]
    assert level == "problem" and said in text


@pytest.mark.parametrize(
    ("engine", "words", "other"),
    [("vllm", "sglang serve x", "sglang"), ("sglang", "vllm serve x", "vllm")],
)
def test_a_command_of_the_other_engine(
    capsys: pytest.CaptureFixture[str], engine: str, words: str, other: str
) -> None:
    assert main.main(["doctor", "--engine", engine, "--", *words.split()]) == 2
    assert f"found one of {other} with --engine {engine}" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = {"host_gib": 0.01, "path": str(tmp_path), "capacity_gib": 0.001}
    section = json.dumps({"mimo": {"tiers": tiers}})
    words = ["MODEL", "--plugin", "mimo:kv,tiers", "--additional-config", section]
    found = _vllm_command_check.check_command([*WORDS[:2], *words], {}, timeout_s=120)
    assert [(each.check, each.level) for each in found] == [
        ("command", "ok"),
        ("host memory", "ok"),
        ("store", "ok"),
    ]
    config = parse_config({"tiers": tiers}, environ={}, engine="vllm")
    assert config is not None
    by_hand = ["MODEL", "--kv-transfer-config", json.dumps(transfer_config(config.tiers))]
    found = _vllm_command_check.check_command([*WORDS[:2], *by_hand], {}, timeout_s=120)
    assert [each.level for each in found] == ["note", "ok", "ok"]
    wrong = _vllm_command_check.check_command([*WORDS, "--no-such-option"], {}, timeout_s=120)
    assert [each.level for each in wrong] == ["problem"]
    assert "--no-such-option" in wrong[0].text
