# SPDX-License-Identifier: Apache-2.0
"""What ``mimo flags --engine sglang`` prints and ``mimo doctor`` reads, by SGLang's own parser.

Nothing is started: SGLang reads a command line, and resolves it, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mimo_plugin.cli._command import Command
from mimo_plugin.cli._flags_sglang import Wanted, sglang_command
from mimo_plugin.cli._model import load_model
from tests.published_models import MIMO_V2_5_PRO, MIMO_V2_FLASH
from tools.server import SGLANG_CPU_ARGUMENTS, engine_environment, has_reference_platform

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOWERS = {"vision_config": {"depth": 1}, "audio_config": {"layers": 1}}


def checkpoint(folder: Path, config: dict[str, Any], mtp_layers: int = 3) -> str:
    """A directory with a configuration, a chat template, and the names of MTP weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    names = [f"model.mtp.layers.{i}.enorm.weight" for i in range(mtp_layers)]
    index = {"weight_map": dict.fromkeys(["model.norm.weight", *names], "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return str(folder)


WISHES = {
    "plain": (MIMO_V2_FLASH, Wanted(tp=4, max_len=65536)),
    "host": (MIMO_V2_FLASH, Wanted(tp=2, hicache=True, hicache_path="/x", hicache_gib=4.0)),
    "encoder": (
        MIMO_V2_5_PRO | TOWERS,
        Wanted(role="encoder", encoder_urls=("http://127.0.0.1:8997",)),
    ),
    "language": (
        MIMO_V2_5_PRO | TOWERS | {"auto_map": {"AutoConfig": "a.B"}},
        Wanted(role="language", encoder_urls=("http://127.0.0.1:1", "http://127.0.0.1:2")),
    ),
    "dynamic": (MIMO_V2_5_PRO | TOWERS, Wanted(role="language", kv_gib=20.0, running=8)),
}


@pytest.fixture(scope="module")
def tiny(tiny_model_factory) -> str:
    return str(tiny_model_factory(own_config=True, v_head_dim=24, window_tokens=128))


def here(tiny: str, *arguments: str) -> list[str]:
    """The arguments of a command that this machine can resolve."""
    needed = SGLANG_CPU_ARGUMENTS if has_reference_platform() else ()
    return ["--model-path", tiny, "--trust-remote-code", *needed, *arguments]


@pytest.fixture(scope="module")
def commands(tmp_path_factory, tiny: str) -> dict[str, Command]:
    """What ``mimo flags`` prints."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: sglang_command(load_model(checkpoint(folder / name, config)), wish)
        for name, (config, wish) in WISHES.items()
    } | {"tiny": sglang_command(load_model(tiny), Wanted(drafts=False))}


@pytest.fixture(scope="module")
def found(commands: dict[str, Command], tiny: str) -> dict[str, Any]:
    """What SGLang makes of all of them, and of some of our own, in one process."""
    lines = {name: command.vector[2:] for name, command in commands.items()} | {
        "typo": ["--model-path", tiny, "--plugin", "mimo:kw"],
        "unknown": ["--model-path", tiny, "--no-such-option", "1"],
        "stock": here(tiny),
        "impossible": here(tiny, "--plugin", "mimo:kv", "--disable-radix-cache"),
        "resolved": here(tiny, *commands["tiny"].vector[4:]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "integration_tests.sglang_arguments"]
        + [json.dumps(lines), "resolved"],
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answers


@pytest.mark.parametrize("name", WISHES)
def test_sglang_reads_every_option(
    commands: dict[str, Command], found: dict[str, Any], name: str
) -> None:
    """Each option is known, and says what it was printed for."""
    assert found[name]["step"] != "parse", found[name]["error"]
    values = found[name]["parsed"]
    for option, *given in commands[name].arguments[1:]:
        field = option.removeprefix("--").replace("-", "_")
        if field == "plugin":
            continue
        if not given:
            assert values[field] is True, option
        elif isinstance(values[field], list):
            assert values[field] == given, option
        else:
            assert str(values[field]) == given[0], option


def test_a_printed_command_resolves(found: dict[str, Any]) -> None:
    """All of it, as far as a machine without a GPU can: it refuses drafts."""
    assert found["resolved"]["error"] is None
    values = found["resolved"]["values"]
    assert values["mimo_features"] == ["kv", "scheduler"]
    assert (values["radix_cache_backend"], values["schedule_policy"]) == ("mimo", "mimo-affinity")
    assert found["stock"]["values"]["mimo_features"] == []


@pytest.mark.parametrize(
    ("name", "step", "said"),
    [
        ("unknown", "parse", "--no-such-option"),
        ("typo", "parse", "did you mean 'kv'"),
        ("impossible", "resolve", "feature 'kv' can't run here: prefix caching is off"),
    ],
)
def test_a_command_that_is_refused(found: dict[str, Any], name: str, step: str, said: str) -> None:
    assert (found[name]["step"], said in found[name]["error"]) == (step, True)


def test_a_process_that_loads_no_plugins_has_ours(found: dict[str, Any]) -> None:
    """B85: the record that it is started with brings them along."""
    assert found["process"] == {"exit": 0, "plugins_loaded": False, "roles": ["encoder"]}


def test_doctor_says_so(tiny: str) -> None:
    """The command itself: its own check, in the engine's environment."""
    line = here(tiny, "--plugin", "mimo:scheduler", "--disable-radix-cache")
    done = subprocess.run(
        [sys.executable, "-m", "mimo_plugin.cli", "doctor", "--engine=sglang", "--json"]
        + ["--no-load", "--", "sglang", "serve", *line],
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    report = json.loads(done.stdout)
    (problem,) = [f["text"] for f in report["findings"] if f["level"] == "problem"]
    assert problem.startswith("feature 'scheduler' can't run here")
    assert {f["check"] for f in report["findings"]} >= {"engine", "contracts", "pools"}
    assert report["groups"][0]["group"] == "sglang.srt.plugins"
