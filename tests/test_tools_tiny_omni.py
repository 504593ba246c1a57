# SPDX-License-Identifier: Apache-2.0
"""The tiny multimodal checkpoint: complete, always the same, refused where it could not load."""

import json

import pytest

from tools import tiny_mimo, tiny_omni

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_omni.make(tmp_path_factory.mktemp("omni"))


def read(path):
    return json.loads(path.read_text())


def test_files_are_those_of_a_published_checkpoint(checkpoint):
    names = {path.name for path in checkpoint.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert read(checkpoint / "config.json")["architectures"] == ["MiMoV2OmniForCausalLM"]


def test_pixel_statistics_differ_from_those_that_vllm_has_built_in(checkpoint):
    mean = read(checkpoint / "preprocessor_config.json")["image_mean"]
    assert [round(255 * value, 2) for value in mean] != [123.68, 116.28, 103.53]


def test_media_tokens_are_single_ids_and_configured(checkpoint):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    config = read(checkpoint / "config.json")
    for token, expected in tiny_omni.TinyOmni().token_ids.items():
        assert tokenizer.encode(token, add_special_tokens=False).ids == [expected]
    assert config["image_token_id"] == tokenizer.token_to_id("<|image_pad|>")
    assert config["processor_config"]["video_end_token_id"] == tokenizer.token_to_id(
        "<|video_end|>"
    )
    assert max(tiny_omni.TinyOmni().token_ids.values()) == config["vocab_size"] - 1


def test_no_media_token_is_ever_generated(checkpoint):
    from safetensors.torch import load_file

    head = load_file(str(checkpoint / "model.safetensors"))["lm_head.weight"]
    for index in tiny_omni.TinyOmni().token_ids.values():
        assert not head[index].any()


def test_same_seed_same_weights_another_seed_others(checkpoint, tmp_path):
    from safetensors.torch import load_file

    first = load_file(str(checkpoint / "model.safetensors"))
    again = load_file(str(tiny_omni.make(tmp_path / "again") / "model.safetensors"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    text = tiny_mimo.TinyMiMo(layers=4, full_every=2, mtp_layers=0, seed=1)
    other = tiny_omni.make(tmp_path / "other", tiny_omni.TinyOmni(text=text))
    tower = load_file(str(other / "model.safetensors"))["visual.patch_embed.proj.weight"]
    assert not torch.equal(first["visual.patch_embed.proj.weight"], tower)


def test_a_complete_checkpoint_is_left_alone(checkpoint):
    before = (checkpoint / "model.safetensors").stat().st_mtime_ns
    tiny_omni.make(checkpoint)
    assert (checkpoint / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"vision_heads": 3}, "vision_heads is 3"),
        ({"image_min_pixels": 10, "image_max_pixels": 9}, "image_min_pixels is 10"),
        ({"video_min_pixels": 0}, "video_min_pixels is 0"),
    ],
)
def test_sizes_that_could_not_load_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        tiny_omni.TinyOmni(**sizes)


def test_command_line(tmp_path, capsys):
    argv = [str(tmp_path / "m"), "--image-mean", "0.5", "0.5", "0.5", "--dtype", "bfloat16"]
    assert tiny_omni.main(argv) == 0
    assert "2 for vision" in capsys.readouterr().out
    assert read(tmp_path / "m" / "preprocessor_config.json")["image_mean"] == [0.5] * 3
    assert read(tmp_path / "m" / "config.json")["torch_dtype"] == "bfloat16"
