# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint: same bytes for one seed, published names and shapes, usable chat format."""

import json

import pytest

from tools import tiny_mimo

pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("torch")

SMALL = {"layers": 5, "hidden_size": 64, "intermediate_size": 64, "heads": 4, "window_tokens": 32}


def tensors(path):
    with safetensors.safe_open(str(path / "model.safetensors"), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    size = tiny_mimo.TinyMiMo(**SMALL)
    return tiny_mimo.make(tmp_path_factory.mktemp("small"), size), size


def test_one_seed_gives_the_same_bytes(small, tmp_path):
    path, size = small
    again = tiny_mimo.make(tmp_path / "again", size)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (again / name).read_bytes() == (path / name).read_bytes()


def test_another_seed_gives_other_weights(small, tmp_path):
    path, _ = small
    other = tiny_mimo.make(tmp_path, tiny_mimo.TinyMiMo(seed=1, **SMALL))
    assert (other / "model.safetensors").read_bytes() != (path / "model.safetensors").read_bytes()


def test_a_finished_checkpoint_is_left_alone_and_a_changed_one_is_made_again(tmp_path):
    size = tiny_mimo.TinyMiMo(**SMALL)
    weights = tiny_mimo.make(tmp_path, size) / "model.safetensors"
    before = weights.stat().st_mtime_ns
    tiny_mimo.make(tmp_path, size)
    assert weights.stat().st_mtime_ns == before
    tiny_mimo.make(tmp_path, tiny_mimo.TinyMiMo(**{**SMALL, "layers": 6}))
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 6


def test_config_is_a_hybrid_mimo(small):
    path, size = small
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["MiMoV2FlashForCausalLM"]
    assert config["model_type"] == "mimo_v2_flash"
    assert config["hybrid_layer_pattern"] == [0, 1, 1, 1, 0]
    assert config["swa_num_key_value_heads"] != config["num_key_value_heads"]
    assert config["sliding_window_size"] == size.window_tokens == 32
    assert config["add_swa_attention_sink_bias"] is True
    assert config["moe_layer_freq"][0] == 0 and sum(config["moe_layer_freq"]) == 2


def test_tensors_have_published_names_and_shapes(small):
    path, size = small
    weights = tensors(path)
    query = size.heads * size.head_dim
    layer = "model.layers.{}.self_attn.{}"
    assert weights[layer.format(0, "q_proj.weight")].shape == (query, size.hidden_size)
    full, swa = (weights[layer.format(i, "k_proj.weight")].shape[0] for i in (0, 1))
    assert (full, swa) == (
        size.full_kv_heads * size.head_dim,
        size.swa_kv_heads * size.head_dim,
    )
    assert layer.format(0, "attention_sink_bias") not in weights
    assert weights[layer.format(1, "attention_sink_bias")].shape == (size.heads,)
    experts = {name.split(".")[5] for name in weights if ".mlp.experts." in name}
    assert len(experts) == size.experts
    for i in range(3):
        assert weights[f"model.mtp.layers.{i}.eh_proj.weight"].shape == (64, 128)
        assert f"model.mtp.layers.{i}.self_attn.attention_sink_bias" in weights
    assert "model.mtp.layers.3.eh_proj.weight" not in weights


@pytest.mark.parametrize("dtype", tiny_mimo.DTYPES)
def test_dtype_reaches_weights_and_config(tmp_path, dtype):
    path = tiny_mimo.make(tmp_path, tiny_mimo.TinyMiMo(dtype=dtype, **SMALL))
    assert str(tensors(path)["lm_head.weight"].dtype) == f"torch.{dtype}"
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == dtype


def test_tokenizer_encodes_every_text_and_marks_messages(small):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(small[0] / "tokenizer.json"))
    text = "<|im_start|>user\nZażółć 漢字 \x00 bale foti<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert ids[0] == tiny_mimo.SPECIAL_TOKENS.index("<|im_start|>")
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < small[1].vocab_size


def test_chat_template_renders_roles_and_tool_calls():
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment().from_string(tiny_mimo.CHAT_TEMPLATE)

    class Call:
        function = {"name": "add", "arguments": {}}

    class Message:
        def __init__(self, role, content=None, tool_calls=None):
            self.role, self.content, self.tool_calls = role, content, tool_calls

    text = template.render(
        messages=[Message("user", "hi"), Message("assistant", None, [Call()])],
        add_generation_prompt=True,
    )
    assert text.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n\n<tool_call>")
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>assistant\n")


def test_greedy_output_stays_speakable(small):
    path, size = small
    vocab, _ = tiny_mimo.vocabulary(size)
    head = tensors(path)["lm_head.weight"]
    assert head[vocab["<|im_end|>"]].abs().sum() > 0
    for silent in ("<|im_start|>", "<|endoftext|>", "Ċ"):
        assert head[vocab[silent]].abs().sum() == 0


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"dtype": "float8"}, "dtype"),
        ({"layers": 1}, "layers"),
        ({"moe_layers": 8}, "moe_layers"),
        ({"heads": 3, "swa_kv_heads": 2}, "swa_kv_heads"),
        ({"experts_per_token": 9}, "experts_per_token"),
        ({"vocab_size": 100}, "vocab_size"),
    ],
)
def test_impossible_sizes_are_named(sizes, named):
    with pytest.raises(ValueError, match=named):
        tiny_mimo.TinyMiMo(**sizes)


def test_command_line(tmp_path, capsys):
    arguments = [str(tmp_path), "--layers", "2", "--hidden-size", "32", "--window-tokens", "16"]
    assert tiny_mimo.main(arguments) == 0
    assert "2 layers, window 16" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tiny_mimo.main([str(tmp_path), "--layers", "1"])
