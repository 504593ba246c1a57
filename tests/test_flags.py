# SPDX-License-Identifier: Apache-2.0
"""``mimo flags``, ``mimo plan`` and the command line around them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mimo_plugin import __version__, contracts
from mimo_plugin.cli import flags, main
from mimo_plugin.cli._command import block_tokens
from mimo_plugin.cli._model import load_model
from mimo_plugin.contracts.source import SourceTree
from tests.published_models import (
    GEMMA3_27B,
    GPT_OSS_20B,
    LLAMA_31_8B,
    MIMO_V2_5_PRO,
    MIMO_V2_FLASH,
    MISTRAL_7B_V01,
    REPORT_10F_60S,
)


def model_dir(
    folder: Path,
    config: dict[str, Any],
    *,
    chat_template: bool = False,
    mtp_layers: int | None = None,
) -> str:
    """Write a model directory without weights; ``mtp_layers`` writes the index of their names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if chat_template:
        text = json.dumps({"chat_template": "{{ messages }}"})
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if mtp_layers is not None:
        names = [f"model.mtp.layers.{i}.enorm.weight" for i in range(mtp_layers)]
        index = {"weight_map": dict.fromkeys(["model.norm.weight", *names], "a.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return str(folder)


def command_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Run ``mimo flags`` and return the command it prints, as a shell would split it."""
    assert main.main(["flags", *arguments]) == 0
    return shlex.split(capsys.readouterr().out.replace("\\\n", " "))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail and return its one line."""
    assert main.main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"mimo {arguments[0]}: error: ")
    return lines[0]


def test_command_for_mimo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir(tmp_path / "a model", MIMO_V2_FLASH, chat_template=True)
    assert command_of(capsys, "--model", path, "--tp", "4", "--max-model-len", "65536") == [
        *("vllm", "serve", path),
        *("--plugin", "mimo:kv,scheduler"),
        *("--block-size", "16"),
        "--enable-prefix-caching",
        *("--prefix-cache-retention-interval", "0"),
        "--no-disable-hybrid-kv-cache-manager",
        *("--tensor-parallel-size", "4"),
        *("--max-model-len", "65536"),
        *("--reasoning-parser", "mimo"),
        "--enable-auto-tool-choice",
        *("--tool-call-parser", "mimo"),
    ]


def test_notes_go_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir(tmp_path / "m", REPORT_10F_60S | {"num_nextn_predict_layers": 3})
    assert main.main(["flags", "--model", path]) == 0
    captured = capsys.readouterr()
    assert all(line.startswith("# ") for line in captured.err.splitlines())
    assert "37.5 MiB" in captured.err
    assert "multiples of 32 tokens" in captured.err
    assert "speculative decoding is left out" in captured.err
    assert "speculative" not in captured.out


def test_images_where_the_model_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    omni = MIMO_V2_FLASH | {"architectures": ["MiMoV2OmniForCausalLM"]}
    command = command_of(capsys, "--model", model_dir(tmp_path / "m", omni))
    assert command[command.index("--plugin") + 1] == "mimo:kv,scheduler,vision,video"


def test_drafts_where_the_checkpoint_has_the_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_dir(tmp_path / "m", MIMO_V2_FLASH, mtp_layers=3)
    command = command_of(capsys, "--model", path)
    assert command[command.index("--plugin") + 1] == "mimo:kv,scheduler,mtp"
    speculation = json.loads(command[command.index("--speculative-config") + 1])
    assert speculation == {"method": "mtp", "num_speculative_tokens": 3}
    assert "--speculative-config" not in command_of(capsys, "--model", path, "--features", "kv")


@pytest.mark.parametrize(
    ("config", "layers", "said"),
    [
        (MIMO_V2_FLASH, None, "left out: the MTP layers can't be counted"),
        (MIMO_V2_FLASH, 0, "left out: the checkpoint holds no MTP layers"),
        (GPT_OSS_20B, 3, None),
    ],
)
def test_no_drafts_that_the_engine_would_refuse(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    layers: int | None,
    said: str | None,
) -> None:
    path = model_dir(tmp_path / "m", config, mtp_layers=layers)
    assert main.main(["flags", "--model", path]) == 0
    captured = capsys.readouterr()
    assert "--plugin mimo:kv,scheduler \\\n" in captured.out
    assert "--speculative-config" not in captured.out
    assert (said or "\n# ") in captured.err
    assert ("speculative" in captured.err) is (said is not None)


@pytest.mark.parametrize(
    ("config", "block"), [(MIMO_V2_FLASH, "16"), (GPT_OSS_20B, "16"), (GEMMA3_27B, "64")]
)
def test_block_size_follows_the_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], block: str
) -> None:
    command = command_of(capsys, "--model", model_dir(tmp_path / "m", config))
    assert command[command.index("--block-size") + 1] == block
    assert "--tool-call-parser" not in command


@pytest.mark.parametrize(
    ("window", "block"),
    [(1, 16), (128, 16), (255, 16), (256, 32), (511, 32), (512, 64), (8192, 64)],
)
def test_block_size_of_a_window(window: int, block: int) -> None:
    assert block_tokens(window) == block


def test_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir(tmp_path / "m", GPT_OSS_20B | {"auto_map": {"AutoConfig": "x.Y"}})
    assert main.main(["flags", "--model", path, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["command"][:3] == ["vllm", "serve", path]
    assert "--trust-remote-code" in data["command"]
    assert any("code of its own" in note for note in data["notes"])


@pytest.mark.parametrize(
    ("config", "said"),
    [(LLAMA_31_8B, "32 full-attention layers"), (MISTRAL_7B_V01, "32 sliding-window layers")],
)
@pytest.mark.parametrize("command", ["flags", "plan"])
def test_models_that_are_not_hybrid(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    config: dict[str, Any],
    said: str,
) -> None:
    line = error_of(capsys, command, "--model", model_dir(tmp_path / "m", config))
    assert said in line
    assert "serve this one without --plugin" in line


@pytest.mark.parametrize("command", ["flags", "plan"])
def test_paths_that_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    missing = str(tmp_path / "missing")
    assert repr(missing) in error_of(capsys, command, "--model", missing)
    assert "config.json" in error_of(capsys, command, "--model", str(tmp_path))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert "readable JSON" in error_of(capsys, command, "--model", str(tmp_path))
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    assert "JSON object" in error_of(capsys, command, "--model", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "clip"}', encoding="utf-8")
    assert "num_hidden_layers" in error_of(capsys, command, "--model", str(tmp_path))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--features", "kw"], "kv"),
        (["--features", "kv,replay"], "not in this version"),
        (["--features", ""], "mimo.features: found ''"),
        (["--features", "kv,tiers"], "no tiers there, without --tiers"),
        (["--tp", "0"], "--tp: found 0"),
        (["--tp", "3"], "--tp: found 3"),
        (["--max-model-len", "0"], "--max-model-len: found 0"),
        (["--max-model-len", "99999999"], "allowed: 1 to 1048576"),
    ],
)
def test_options_that_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], said: str
) -> None:
    path = model_dir(tmp_path / "m", REPORT_10F_60S)
    assert said in error_of(capsys, "flags", "--model", path, *extra)


# ------------------------------------------------------------------------- the engine's options


@pytest.mark.vllm
def test_every_option_is_one_of_the_engine(tmp_path: Path) -> None:
    """By the engine's source alone: each option we print exists as a field or a literal there."""
    root = contracts.find_package("vllm")
    assert root is not None
    facts = SourceTree(root, "vllm").lookup("engine.arg_utils", "EngineArgs")
    assert facts is not None
    literals = (root / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    model = load_model(model_dir(tmp_path / "m", MIMO_V2_5_PRO | {"auto_map": {}}, mtp_layers=3))
    command = flags.vllm_command(model, tp=2, max_len=4096)
    ours = {"--plugin"}
    for group in command.arguments[1:]:
        option = group[0]
        field = option.removeprefix("--no-").removeprefix("--").replace("-", "_")
        assert option in ours or field in facts.members or f'"{option}"' in literals, option


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("form", ["feature", "connector"])
def test_the_engine_s_own_parser_accepts_the_command(tmp_path: Path, form: str) -> None:
    path = model_dir(tmp_path / "m", MIMO_V2_FLASH, chat_template=True, mtp_layers=3)
    printed = subprocess.run(
        [sys.executable, "-m", "mimo_plugin.cli", "flags", "--model", path, "--json"]
        + ["--tiers", "--host-gib", "8", "--tiers-path", "/kv", "--tiers-gib", "9"]
        + (["--tiers-connector"] if form == "connector" else []),
        capture_output=True,
        text=True,
        check=True,
    )
    command = json.loads(printed.stdout)["command"]
    code = (
        "import sys\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "from vllm.entrypoints.cli.serve import ServeSubcommand\n"
        "parser = FlexibleArgumentParser()\n"
        "sub = parser.add_subparsers(dest='subparser')\n"
        "ServeSubcommand().subparser_init(sub)\n"
        "args = parser.parse_args(sys.argv[1:])\n"
        "print('PARSED', args.plugin, args.block_size, args.prefix_cache_retention_interval,\n"
        "      args.disable_hybrid_kv_cache_manager, args.tool_call_parser,\n"
        "      args.speculative_config['num_speculative_tokens'])\n"
        "transfer = args.kv_transfer_config\n"
        "print('TIERS', args.additional_config, transfer and transfer.kv_connector,\n"
        "      transfer and transfer.kv_role)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command[1:]],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    last = ",tiers" if form == "feature" else ""
    assert f"PARSED mimo:kv,scheduler,mtp{last} 16 0 False mimo 3" in done.stdout
    settings = {"path": "/kv", "capacity_gib": 9.0, "host_gib": 8.0}
    said = (
        f"TIERS {dict(mimo=dict(tiers=settings))} None None"
        if form == "feature"
        else "TIERS {} MimoTieredConnector kv_both"
    )
    assert said in done.stdout, done.stdout


# -------------------------------------------------------------------------------------- plan


def plan_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run ``mimo plan --json``."""
    assert main.main(["plan", "--json", *arguments]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_plan_of_the_report_geometry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir(tmp_path / "m", REPORT_10F_60S)
    data = plan_of(capsys, "--model", path, "--kv-gib", "40")
    assert (data["full_layers"], data["swa_layers"], data["replay_tokens"]) == (10, 60, 7620)
    assert (data["checkpoint_blocks"], data["checkpoint_full_tokens"]) == (48, 1536)
    assert data["checkpoint_bytes"] == 37.5 * 2**20
    assert data["pool_blocks"] == 40 * 2**30 // 819_200
    assert [group["block_tokens"] for group in data["groups"]] == [32] + [16] * 6
    assert main.main(["plan", "--model", path, "--kv-gib", "40"]) == 0
    text = capsys.readouterr().out
    for said in ("48 blocks = 37.50 MiB = 1,536 tokens", "52,428 blocks", "7,620 tokens"):
        assert said in text


def test_plan_options_change_the_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir(tmp_path / "m", REPORT_10F_60S)
    base = plan_of(capsys, "--model", path)
    assert "pool_blocks" not in base
    fp8 = plan_of(capsys, "--model", path, "--kv-cache-dtype", "fp8")
    assert 2 * fp8["block_bytes"] == base["block_bytes"]
    split = plan_of(capsys, "--model", path, "--tp", "4")
    assert 4 * split["block_bytes"] == base["block_bytes"]
    drafts = plan_of(capsys, "--model", path, "--mtp-layers", "3")
    assert len(drafts["groups"]) == 8
    longer = plan_of(capsys, "--model", path, "--block-size", "64")
    assert longer["alignment_tokens"] == 128


def test_plan_memory_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir(tmp_path / "m", REPORT_10F_60S)
    gpu = ["--model", path, "--gpu-memory-gib", "100", "--overhead-gib", "10"]
    assert plan_of(capsys, *gpu, "--weights-gib", "40")["kv_bytes"] == 40 * 2**30
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\0" * (1 << 20))
    data = plan_of(capsys, *gpu, "--tp", "2")
    assert data["kv_bytes"] == 80 * 2**30 - (1 << 19)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--gpu-memory-gib", "80"], "--weights-gib"),
        (["--gpu-memory-gib", "80", "--weights-gib", "80"], "use a larger --tp"),
        (["--kv-gib", "nan"], "--kv-gib: found nan"),
        (["--kv-gib", "-1"], "--kv-gib: found -1"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: found 1.5"),
        (["--tp", "0"], "--tp: found 0"),
        (["--tp", "3"], "tensor parallel size: found 3"),
        (["--block-size", "0"], "block size: found 0"),
        (["--mtp-layers", "-1"], "--mtp-layers: found -1"),
    ],
)
def test_plan_options_that_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], said: str
) -> None:
    path = model_dir(tmp_path / "m", REPORT_10F_60S)
    assert said in error_of(capsys, "plan", "--model", path, *extra)


# ------------------------------------------------------------------------------- the command


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"mimo-plugin {__version__}"
    with pytest.raises(SystemExit) as stopped:
        main.main([])
    assert stopped.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        main.main(["doctr"])
    assert stopped.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_a_command_that_is_left_out_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "COMMANDS", ("flags", "absent"))
    with pytest.raises(SystemExit):
        main.main(["--help"])
    assert "flags" in capsys.readouterr().out


def test_the_tools_import_neither_engine_nor_torch(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "m", MIMO_V2_FLASH)
    code = (
        "import sys; from mimo_plugin.cli.main import main;"
        f"main(['flags', '--model', {path!r}]); main(['plan', '--model', {path!r}]);"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'vllm', 'torch', 'numpy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"
