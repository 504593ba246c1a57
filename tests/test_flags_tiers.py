# SPDX-License-Identifier: Apache-2.0
"""``mimo flags --tiers``: what is printed, and that the engine gets the same from either form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mimo_plugin.cli import main
from mimo_plugin.config import parse_config
from mimo_plugin.engines.vllm.tiers.configure import settings_from, transfer_config
from tests.published_models import REPORT_10F_60S
from tests.test_flags import command_of, error_of, model_dir

TIERS = ("--tiers", "--host-gib", "64")
FILES = (*TIERS, "--tiers-path", "/kv", "--tiers-gib", "500")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return model_dir(tmp_path / "m", REPORT_10F_60S)


def option(command: list[str], name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(command[command.index(name) + 1])
    return found


def test_without_it_nothing_is_tiered(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(capsys, "--model", path)
    assert command[command.index("--plugin") + 1] == "mimo:kv,scheduler"
    assert not {"--additional-config", "--kv-transfer-config"} & set(command)


def test_the_feature_with_its_section(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(capsys, "--model", path, *FILES)
    assert command[command.index("--plugin") + 1] == "mimo:kv,scheduler,tiers"
    settings = {"host_gib": 64.0, "path": "/kv", "capacity_gib": 500.0}
    assert option(command, "--additional-config") == {"mimo": {"tiers": settings}}
    assert "--kv-transfer-config" not in command


@pytest.mark.parametrize(
    "options",
    [
        TIERS,
        FILES,
        (*FILES, "--tiers-path", "/kv2"),
        (*TIERS, "--tiers-store", "redis", "--tiers-path", "redis://h:6379"),
        (*TIERS, "--tiers-store", "mooncake", "--tiers-path", "h:50051"),
    ],
)
def test_both_forms_mean_the_same(
    path: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    section = option(command_of(capsys, "--model", path, *options), "--additional-config")["mimo"]
    config = parse_config(section, environ={}, engine="vllm")  # type: ignore[arg-type]
    assert config is not None
    command = command_of(capsys, "--model", path, *options, "--tiers-connector")
    assert command[command.index("--plugin") + 1] == "mimo:kv,scheduler"
    assert "--additional-config" not in command
    printed = option(command, "--kv-transfer-config")
    assert printed == transfer_config(config.tiers)
    extra = printed["kv_connector_extra_config"]
    assert settings_from(extra) == config.tiers  # type: ignore[arg-type]


def test_how_far_host_memory_goes(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["flags", "--model", path, *TIERS, "--tp", "4"]) == 0
    said = capsys.readouterr().err
    assert f"{64 * 2**30 // 819_200} rows of 819200 bytes" in said
    assert "32768 tokens takes 1024 rows, each place to resume it at 48" in said
    assert "--shm-size" in said
    assert "nothing outlives the engine" in said
    assert main.main(["flags", "--model", path, *FILES]) == 0
    assert "outlives" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--tiers"], "--host-gib: found None"),
        (["--host-gib", "3"], "--host-gib: found 3.0; allowed: with --tiers"),
        (["--tiers-path", "/kv"], "--tiers-path: found ['/kv']; allowed: with --tiers"),
        (["--tiers-connector"], "--tiers-connector: found True; allowed: with --tiers"),
        (["--tiers", "--host-gib", "0"], "--host-gib: found 0.0"),
        (["--tiers", "--host-gib", "nan"], "--host-gib: found nan"),
        (["--tiers", "--host-gib", "0.5"], "--host-gib: found 0.5; allowed: at least 0.82"),
        ([*TIERS, "--tiers-gib", "5"], "--tiers-gib: found 5.0; allowed: with --tiers-path"),
        ([*TIERS, "--tiers-store", "redis"], "--tiers-store: found 'redis'; allowed: with"),
        ([*TIERS, "--tiers-path", "/kv"], "--tiers-gib: found None"),
        ([*FILES, "--tiers-path", "/kv"], "name each once"),
        ([*FILES, "--tiers-store", "redis"], "--tiers-gib: found 500.0; allowed: none with"),
        ([*TIERS, "--features", "kv"], "allowed: tiers there, with --tiers"),
        ([*TIERS, "--tiers-connector", "--features", "kv,tiers"], "no tiers there"),
        (["--engine", "sglang", *TIERS], "--tiers: found it with --engine sglang"),
    ],
)
def test_options_that_are_wrong(
    path: str, capsys: pytest.CaptureFixture[str], extra: list[str], said: str
) -> None:
    assert said in error_of(capsys, "flags", "--model", path, *extra)
