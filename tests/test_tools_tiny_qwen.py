# SPDX-License-Identifier: Apache-2.0
"""The tiny Qwen-VL checkpoints: complete, always the same, refused where they could not load."""

from __future__ import annotations

import json

import pytest

from tools import tiny_qwen
from tools.tiny_qwen import FAMILIES, TinyQwen

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_files_are_those_of_a_published_checkpoint(family, tmp_path):
    from safetensors.torch import load_file

    made = tiny_qwen.make(tmp_path / "one", TinyQwen(family=family))
    config = json.loads((made / "config.json").read_text())
    assert config["architectures"] == [f"{FAMILIES[family].classes}ForConditionalGeneration"]
    ids = {config[f"{name}_token_id"] for name in ("image", "video", "vision_start", "vision_end")}
    assert len(ids) == 4 and max(ids) < 1024
    assert (made / "video_preprocessor_config.json").exists() == family.startswith("qwen3")
    again = tiny_qwen.make(tmp_path / "two", TinyQwen(family=family))
    weights, same = (load_file(str(p / "model.safetensors")) for p in (made, again))
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not weights["lm_head.weight"][list(ids)].any()


def test_choices_that_no_engine_could_load_are_refused(capsys, tmp_path):
    for wrong in ({"family": "qwen"}, {"layers": 1}, {"min_pixels": 9, "max_pixels": 8}):
        with pytest.raises(ValueError, match=f"tiny qwen: {next(iter(wrong))}"):
            TinyQwen(**wrong)
    with pytest.raises(SystemExit):
        tiny_qwen.main([str(tmp_path), "--family", "qwen"])
    assert "allowed: qwen2_vl" in capsys.readouterr().err


def test_the_command_line_says_what_it_made(capsys, tmp_path):
    assert tiny_qwen.main([str(tmp_path / "made"), "--family", "qwen2_vl", "--layers", "2"]) == 0
    assert "qwen2_vl, 2 layers, 3 for vision" in capsys.readouterr().out
