# SPDX-License-Identifier: Apache-2.0
"""``mimo flags --engine sglang``: what it recommends, and what it refuses.

``integration_tests/test_sglang_flags.py`` gives every option to SGLang's own parser.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mimo_plugin.cli import main
from mimo_plugin.core.geometry import GeometryError, read_geometry
from mimo_plugin.core.pool_ratio import least_swa_tokens, swa_per_full
from mimo_plugin.core.pools import GIB, split_pools
from tests.published_models import (
    GPT_OSS_20B,
    LLAMA_31_8B,
    MIMO_V2_5_PRO,
    MIMO_V2_FLASH,
    REPORT_10F_60S,
)
from tests.test_flags import command_of, error_of, model_dir

TOWERS = {"vision_config": {"depth": 1}, "audio_config": {"layers": 1}}
OMNI = MIMO_V2_5_PRO | TOWERS


def sglang(capsys: pytest.CaptureFixture[str], path: str, *arguments: str) -> list[str]:
    """The words of the command."""
    return command_of(capsys, "--engine", "sglang", "--model", path, *arguments)


def value(command: list[str], option: str) -> str:
    """What follows an option."""
    return command[command.index(option) + 1]


def test_command_for_mimo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir(tmp_path / "a model", MIMO_V2_FLASH, chat_template=True, mtp_layers=3)
    command = sglang(capsys, path, "--tp", "4", "--max-model-len", "65536")
    assert command == [
        *("sglang", "serve", "--model-path", path),
        *("--plugin", value(command, "--plugin")),
        *("--tp-size", "4"),
        *("--page-size", "16"),
        *("--swa-full-tokens-ratio", "0.161"),
        *("--chunked-prefill-size", "8192"),
        *("--context-length", "65536"),
        *("--reasoning-parser", "mimo"),
        *("--tool-call-parser", "mimo"),
        *("--speculative-algorithm", "EAGLE"),
        *("--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
        "--enable-multi-layer-eagle",
    ]
    assert value(command, "--plugin").startswith("mimo:kv,scheduler")


@pytest.mark.parametrize(("config", "layers"), [(MIMO_V2_FLASH, 0), (GPT_OSS_20B, None)])
def test_no_drafts_without_mtp_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], layers: int | None
) -> None:
    path = model_dir(tmp_path / "m", config, mtp_layers=layers)
    assert not [word for word in sglang(capsys, path) if "specul" in word or "eagle" in word]


def test_drafts_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir(tmp_path / "m", MIMO_V2_FLASH, mtp_layers=3)
    assert "--speculative-algorithm" not in sglang(capsys, path, "--no-drafts")


def test_pools_for_draft_layers_that_the_configuration_hides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B33: SGLang sizes the pools for as many draft layers as config.json says."""
    says = {"num_nextn_predict_layers": 3}
    for config, expected in ((MIMO_V2_FLASH, True), (MIMO_V2_FLASH | says, False)):
        path = model_dir(tmp_path / str(expected), config, mtp_layers=3)
        assert main.main(["flags", "--engine", "sglang", "--model", path]) == 0
        assert ("without the KV of draft layers" in capsys.readouterr().err) is expected


@pytest.mark.parametrize("config", [MIMO_V2_FLASH, MIMO_V2_5_PRO, REPORT_10F_60S, GPT_OSS_20B])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_the_ratio_gives_windows_their_share_of_the_bytes(
    config: dict[str, Any], tp: int, share: float
) -> None:
    geometry = read_geometry(config)
    ratio = swa_per_full(geometry, share=share, tp=tp)
    pools = split_pools(geometry, 8 * GIB, swa_per_full=ratio, page_tokens=16, tp=tp)
    assert ratio == 1.0 or pools.swa_bytes / pools.bytes == pytest.approx(share, abs=0.001)
    assert pools.swa_bytes / pools.bytes <= share + 0.001


def test_the_ratio_never_passes_one() -> None:
    """Windows of one layer beside many full ones are cheap, but no window is longer than all."""
    few = GPT_OSS_20B | {"layer_types": ["full_attention"] * 23 + ["sliding_attention"]}
    assert swa_per_full(read_geometry(few)) == 1.0
    with pytest.raises(GeometryError, match="two pools"):
        swa_per_full(read_geometry(LLAMA_31_8B))


def test_running_requests_hold_windows_and_what_is_not_yet_freed() -> None:
    least = least_swa_tokens(
        128, page_tokens=16, chunk_tokens=512, running=2, freed_every_tokens=100, draft_tokens=3
    )
    assert least == 2 * (128 + 100 * 4 + 32) + 512


@pytest.mark.parametrize(
    ("kv_gib", "running"), [("3.6", "64"), ("1", "16"), ("0.3", "2"), ("40", "64")]
)
def test_a_known_pool_has_room_for_what_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kv_gib: str, running: str
) -> None:
    """B15: the pool for windows holds the running requests and a chunk, never one page only."""
    path = model_dir(tmp_path / "m", MIMO_V2_FLASH)
    command = sglang(capsys, path, "--tp", "4", "--kv-gib", kv_gib, "--running", running)
    ratio, chunk = (
        float(value(command, option))
        for option in ("--swa-full-tokens-ratio", "--chunked-prefill-size")
    )
    pools = split_pools(
        read_geometry(MIMO_V2_FLASH),
        int(float(kv_gib) * GIB),
        swa_per_full=ratio,
        page_tokens=16,
        tp=4,
    )
    assert ratio <= 1
    assert pools.full_tokens >= chunk
    assert pools.swa_tokens >= int(running) * (128 + 128 + 2 * 16) + chunk - 16
    # No smaller chunk, and no larger share for windows, than the pool asks for.
    if kv_gib == "40":
        assert (ratio, chunk) == (0.173, 8192)


def test_a_pool_that_is_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir(tmp_path / "m", MIMO_V2_FLASH)
    wanted = ("flags", "--engine", "sglang", "--model", path, "--kv-gib")
    line = error_of(capsys, *wanted, "0.1")
    assert "at least" in line and "64 running requests" in line
    enough = line.partition("at least ")[2].split()[0]
    assert main.main([*wanted, str(float(enough) + 0.01)]) == 0


def test_host_memory_and_pages_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_dir(tmp_path / "m", MIMO_V2_FLASH)
    host = sglang(capsys, path, "--hicache")
    assert "--enable-hierarchical-cache" in host
    assert value(host, "--hicache-mem-layout") == "page_first_direct"
    assert "--hicache-storage-backend" not in host
    both = sglang(capsys, path, "--hicache-path", "/data/kv", "--hicache-gib", "500")
    extra = json.loads(value(both, "--hicache-storage-backend-extra-config"))
    assert (extra["path"], extra["capacity_gib"], extra["interface_v1"]) == ("/data/kv", 500, 1)


def test_images_where_the_model_has_the_towers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for config, expected in ((OMNI, True), (MIMO_V2_5_PRO, False), (GPT_OSS_20B, False)):
        path = model_dir(tmp_path / str(len(config)), config)
        features = value(sglang(capsys, path), "--plugin").split(":")[1].split(",")
        assert ("vision" in features) is expected


def test_encoder_and_language_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir(tmp_path / "m", OMNI, mtp_layers=3)
    encoder = sglang(capsys, path, "--role", "encoder", "--encoder-url", "http://p:8997")
    assert encoder == [
        *("sglang", "serve", "--model-path", path, "--plugin", "mimo:vision"),
        *("--encoder-only", "--enable-prefix-mm-cache"),
        *("--encoder-register-urls", "http://p:8997"),
    ]
    language = sglang(capsys, path, "--role", "language")
    assert "--language-only" in language and "--enable-multi-layer-eagle" in language
    assert value(language, "--encoder-bootstrap-port") == "8997"
    named = sglang(
        capsys, path, "--role", "language", "--encoder-url", "http://a", "--encoder-url", "http://b"
    )
    at = named.index("--encoder-urls")
    assert named[at + 1 : at + 3] == ["http://a", "http://b"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--role", "encoder"), "without a vision and an audio tower"),
        (("--encoder-url", "http://a"), "with --role"),
        (("--hicache-path", "/data"), "with --hicache-gib"),
        (("--hicache-path", "/data", "--hicache-gib", "nan"), "a number > 0"),
        (("--kv-gib", "-1"), "a number > 0"),
        (("--running", "0"), "a number > 0"),
        (("--tp", "0"), "a number > 0"),
        (("--tp", "3"), "fits the KV heads"),
        (("--max-model-len", "9999999"), "1 to 262144"),
        (("--features", "mtp"), "not in this version for SGLang"),
    ],
)
def test_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    path = model_dir(tmp_path / "m", MIMO_V2_FLASH)
    assert said in error_of(capsys, "flags", "--engine", "sglang", "--model", path, *arguments)


def test_an_encoder_has_only_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("flags", "--engine", "sglang", "--model", model_dir(tmp_path / "m", OMNI))
    assert "vision, with --role encoder" in error_of(
        capsys, *wanted, "--role", "encoder", "--features", "kv"
    )


def test_ranks_that_fused_weights_are_not_cut_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fused = MIMO_V2_FLASH | {"attention_projection_layout": "fused_qkv"}
    path = model_dir(tmp_path / "m", fused)
    assert "a divisor of 4" in error_of(
        capsys, "flags", "--engine", "sglang", "--model", path, "--tp", "8"
    )
    assert sglang(capsys, path, "--tp", "2")


@pytest.mark.parametrize(
    "arguments", [("--hicache",), ("--role", "encoder"), ("--no-drafts",), ("--running", "3")]
)
def test_options_of_the_other_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    path = model_dir(tmp_path / "m", MIMO_V2_FLASH)
    line = error_of(capsys, "flags", "--model", path, *arguments)
    assert f"{arguments[0]}: found it with --engine vllm" in line
