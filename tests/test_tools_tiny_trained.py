# SPDX-License-Identifier: Apache-2.0
"""The trained tiny checkpoint and the plain-torch reference: whole, exact, worth drafting with."""

import json

import pytest

from tools import tiny_mimo, tiny_trained, tiny_trained_data

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")

from tools import mimo_torch, mimo_torch_drafts, tiny_trained_train  # noqa: E402

WINDOW = 128
COUNT = 20
MODES = mimo_torch_drafts.MODES


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return mimo_torch.load(tiny_trained.CHECKPOINT)


@pytest.fixture(scope="module")
def recipe():
    return json.loads((tiny_trained.CHECKPOINT / tiny_trained.RECIPE).read_text())


@pytest.fixture(scope="module")
def prompts():
    return tiny_trained.held_out_prompts(COUNT)


@pytest.fixture(scope="module")
def continuations(model, prompts):
    return [mimo_torch.greedy(model, prompt, 19) for prompt in prompts]


# --- checkpoint and recipe ------------------------------------------------------------------------


def test_weights_are_those_of_the_recipe(recipe):
    assert tiny_trained.weights_sha256(tiny_trained.CHECKPOINT) == recipe["weights_sha256"]
    assert recipe["size"] == json.loads(json.dumps(vars(tiny_trained_train.SIZE)))
    assert recipe["recipe"] == vars(tiny_trained_train.Recipe())
    assert sum(path.stat().st_size for path in tiny_trained.CHECKPOINT.iterdir()) <= 4e6


def test_config_is_a_dense_hybrid_mimo_with_three_mtp_layers(model):
    config = json.loads((tiny_trained.CHECKPOINT / "config.json").read_text())
    assert config == tiny_mimo.config_json(tiny_trained_train.SIZE)
    assert config["architectures"] == ["MiMoV2FlashForCausalLM"]
    assert config["hybrid_layer_pattern"] == [0, 1, 1, 0]
    assert (config["num_key_value_heads"], config["swa_num_key_value_heads"]) == (1, 2)
    assert config["sliding_window_size"] == WINDOW and not any(config["moe_layer_freq"])
    assert len(model.mtp) == 3


def test_tokenizer_has_the_special_tokens_first_and_encodes_every_text():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_trained.CHECKPOINT / "tokenizer.json"))
    assert [tokenizer.token_to_id(t) for t in tiny_mimo.SPECIAL_TOKENS] == list(
        range(len(tiny_mimo.SPECIAL_TOKENS))
    )
    text = "<|im_start|>user\nZażółć 漢字 \x00 def run(self):\n    return 1<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert ids[0] == tiny_mimo.SPECIAL_TOKENS.index("<|im_start|>")
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    # It was trained: code costs clearly fewer tokens than bytes.
    assert len(tokenizer.encode("    def __init__(self, name):\n        return").ids) <= 16


def test_greedy_text_is_code_without_structural_tokens(continuations):
    structural = range(1, len(tiny_mimo.SPECIAL_TOKENS))
    produced = [token for tokens in continuations for token in tokens]
    assert not set(produced) & set(structural)
    assert len(set(produced)) > 100, "outputs are all alike"


# --- text -----------------------------------------------------------------------------------------


def test_held_out_prompts_are_repeatable_distinct_and_in_no_training_text(prompts):
    from tokenizers import Tokenizer

    assert prompts == tiny_trained.held_out_prompts(COUNT)
    assert {len(prompt) for prompt in prompts} == {tiny_trained.PROMPT_TOKENS}
    assert len({tuple(prompt) for prompt in prompts}) == COUNT
    tokenizer = Tokenizer.from_file(str(tiny_trained.CHECKPOINT / "tokenizer.json"))
    training = "\n".join(tiny_trained_data.split_texts(held_out=False))
    texts = tiny_trained.held_out_texts(COUNT)
    assert texts == [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
    assert not any(text in training for text in texts)


def test_the_split_depends_on_the_name_alone():
    names = [f"package/module_{i}.py" for i in range(1000)]
    held_out = sum(tiny_trained_data.is_held_out(name) for name in names)
    assert 50 < held_out < 150
    root = tiny_trained_data.Path(tiny_trained_data.sysconfig.get_path("stdlib"))
    files = tiny_trained_data.source_files()
    assert len(files) == sum(len(tiny_trained_data.split_texts(side)) for side in (True, False))
    folders = {part for path in files for part in path.relative_to(root).parts[:-1]}
    assert "json" in folders and not folders & {"test", "site-packages", "__pycache__"}


def test_absent_sources_and_too_many_prompts_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="100000 prompts of 320 tokens"):
        tiny_trained.held_out_prompts(100_000)
    (tmp_path / "os.py").touch()
    with pytest.raises(RuntimeError, match="sources are absent: 1 files"):
        tiny_trained_data.source_files(tmp_path)


# --- the reference --------------------------------------------------------------------------------


def plain_hidden(model, tokens, window=WINDOW):
    """Final-normed hidden states, written out position by position, sharing only the matrices."""
    rows = [model.model.embed_tokens.weight[token] for token in tokens]
    for layer in model.model.layers:
        normed = [layer.input_layernorm(row) for row in rows]
        attended = plain_attention(layer.self_attn, normed, window)
        rows = [row + more for row, more in zip(rows, attended, strict=True)]
        rows = [row + layer.mlp(layer.post_attention_layernorm(row)) for row in rows]
    return torch.stack([model.model.norm(row) for row in rows])


def plain_attention(attention, rows, window):
    """Attention of each row over the rows it may see, one head after the other."""
    dim, turning = attention.head_dim, attention.rotary_dim
    swa = attention.window_tokens is not None

    def turn(vector, position):
        out = vector.clone()
        for pair in range(turning // 2):
            angle = torch.tensor(position / attention.theta ** (2 * pair / turning))
            a, b = vector[pair], vector[pair + turning // 2]
            out[pair] = a * angle.cos() - b * angle.sin()
            out[pair + turning // 2] = b * angle.cos() + a * angle.sin()
        return out

    def split(projection, row, size):
        return projection(row).split(size)

    keys = [[turn(k, p) for k in split(attention.k_proj, r, dim)] for p, r in enumerate(rows)]
    values = [split(attention.v_proj, row, attention.value_dim) for row in rows]
    result = []
    for position, row in enumerate(rows):
        seen = range(max(0, position - window + 1) if swa else 0, position + 1)
        mixed = []
        for head, query in enumerate(split(attention.q_proj, row, dim)):
            kv_head = head * attention.kv_heads // attention.heads
            turned = turn(query, position)
            scores = [turned @ keys[i][kv_head] / dim**0.5 for i in seen]
            if swa:
                scores.append(attention.attention_sink_bias[head])
            weights = torch.stack(scores).softmax(0)
            parts = [w * 0.707 * values[i][kv_head] for w, i in zip(weights, seen, strict=False)]
            mixed.append(torch.stack(parts).sum(0))
        result.append(attention.o_proj(torch.cat(mixed)))
    return result


def test_hidden_states_equal_a_computation_position_by_position(model, prompts):
    """Rotary style, scaled values, sinks, grouped heads and masks, each written out."""
    tokens = prompts[0][:24]
    torch.testing.assert_close(
        mimo_torch.hidden_states(model, tokens), plain_hidden(model, tokens), atol=1e-4, rtol=1e-4
    )


def test_window_is_that_many_tokens_wide(prompts):
    """With a window of 7, 24 rows cross it; a window one wider or narrower gives other numbers."""
    config = {**tiny_mimo.config_json(tiny_trained_train.SIZE), "sliding_window_size": 7}
    narrow = mimo_torch.MiMo(config, 3)
    narrow.load_state_dict(mimo_torch.load(tiny_trained.CHECKPOINT).state_dict())
    narrow.requires_grad_(False)
    tokens = prompts[1][:24]
    found = mimo_torch.hidden_states(narrow, tokens)
    torch.testing.assert_close(found, plain_hidden(narrow, tokens, 7), atol=1e-4, rtol=1e-4)
    for other in (6, 8):
        assert (found - plain_hidden(narrow, tokens, other)).abs().max() > 1e-2


@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1, 200])
def test_rows_in_pieces_equal_rows_at_once(model, prompts, length):
    """Earlier rows kept as keys and values, around and past the window."""
    tokens = torch.tensor([prompts[2][:length]])
    whole, _ = model(tokens)
    first, past = model(tokens[:, :-3])
    # Rows past the start are replaced, whatever they hold.
    stale = [(k.clone(), v.clone()) for k, v in past]
    for k, v in stale:
        k[:, :, -2:] = 100.0
        v[:, :, -2:] = 100.0
    pieces = [first[:, :-2]]
    for start in range(length - 5, length):
        rows, stale = model(tokens[:, start : start + 1], start, stale)
        pieces.append(rows)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-4, rtol=1e-4)


def test_greedy_equals_recomputing_everything_for_each_token(model, prompts):
    tokens = list(prompts[3][:150])
    for token in mimo_torch.greedy(model, prompts[3][:150], 6):
        assert token == int(mimo_torch.target_logits(model, tokens)[-1].argmax())
        tokens.append(token)


def test_mtp_layers_differ_and_each_predicts_its_own_token(model, prompts):
    """Layer i is best at token p+2+i, so a swapped or shifted layer shows."""
    right = torch.zeros(3, 3)
    for prompt in prompts[:8]:
        hidden = mimo_torch.hidden_states(model, prompt)
        for i, logits in enumerate(mimo_torch.mtp_logits(model, prompt, hidden)):
            assert logits.shape == (len(prompt) - 1 - i, 1024)
            guesses = logits.argmax(-1)
            for ahead in range(3):
                text = torch.tensor(prompt[2 + ahead :])
                rows = min(len(text), len(guesses))
                right[i, ahead] += float((guesses[:rows] == text[:rows]).float().mean()) / 8
    assert right.diagonal().min() > 0.2
    for i in range(3):
        assert right[i].argmax() == i, right


def naive_drafts(model, tokens, drafts, mode):
    """Drafts after ``tokens``, everything recomputed for each of them, nothing kept."""
    hidden = model(torch.tensor([tokens]))[0]
    row, guesses = len(tokens) - 2, []
    for i in range(drafts):
        if mode == "layer0":
            # Rows up to p are true; each later row has a draft and the previous output.
            inputs, known = hidden[:, : row + 1], [*tokens, *guesses]
            for _ in range(i):
                embeddings = model.embed(torch.tensor([known[1 : inputs.shape[1] + 1]]))
                output, _ = model.mtp[0](embeddings, inputs)
                inputs = torch.cat([inputs, output[:, -1:]], dim=1)
            embeddings = model.embed(torch.tensor([known[1 : inputs.shape[1] + 1]]))
            output, _ = model.mtp[0](embeddings, inputs)
        else:
            inputs = hidden[:, : row + 1]
            for j in range(i + 1) if mode == "chained" else [i]:
                known = [*tokens, *guesses][1 + j : row + 2 + j]
                output, _ = model.mtp[j](model.embed(torch.tensor([known])), inputs)
                inputs = output if mode == "chained" else inputs
        guesses.append(int(model.logits(output[0, -1]).argmax()))
    return guesses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 2, 3, WINDOW - 1, WINDOW + 2, 300])
def test_rounds_equal_a_computation_without_kept_rows(model, prompts, mode, length):
    """Short histories, the window's edge and histories longer than it; right and wrong drafts."""
    prompt = prompts[5][:length]
    rounds = mimo_torch_drafts.speculate(model, prompt, 12, 3, mode)
    outputs = mimo_torch.greedy(model, prompt, 15)
    index = 1
    for found in rounds:
        assert found.output_index == index
        drafts = naive_drafts(model, prompt + outputs[:index], 3, mode)
        assert list(found.drafts) == drafts
        right = [a == b for a, b in zip(drafts, outputs[index:], strict=False)]
        assert found.accepted == [*right, False].index(False)
        index += found.accepted + 1
    assert index >= 12


def test_acceptance_counts_conditionally_and_by_output():
    made = mimo_torch_drafts.Round
    rounds = [made(1, (5, 6, 7), 3), made(5, (5, 6, 7), 0), made(6, (5, 6, 7), 1)]
    found = mimo_torch_drafts.acceptance([rounds[:2], rounds[2:]])
    assert (found.tried, found.accepted) == ((3, 2, 1), (2, 1, 1))
    assert found.conditional == (2 / 3, 1 / 2, 1.0)
    assert found.length_tokens == 1 + 4 / 3
    late = mimo_torch_drafts.acceptance([rounds], first_output=5, end_output=6)
    assert (late.tried, late.accepted) == ((1, 0, 0), (0, 0, 0))


def test_three_exact_layers_beat_the_ablations(model):
    """Over the first six outputs: longer greedy texts of a small model repeat themselves."""
    found = {}
    asked = tiny_trained.held_out_prompts(100)
    known = [mimo_torch.greedy(model, prompt, 9) for prompt in asked]
    for mode in MODES:
        rounds = [
            mimo_torch_drafts.speculate(model, prompt, 6, 3, mode, outputs)
            for prompt, outputs in zip(asked, known, strict=True)
        ]
        found[mode] = mimo_torch_drafts.acceptance(rounds)
    exact = found["exact"]
    assert exact.conditional[0] > 0.5
    assert min(exact.conditional[1:]) > 0.6
    assert exact.length_tokens > 2.15
    # The first step is the same in all modes; what differs comes after it.
    for mode in ("chained", "layer0"):
        assert found[mode].length_tokens < exact.length_tokens - 0.05
        assert max(found[mode].conditional[1:]) < min(exact.conditional[1:])


# --- refusals -------------------------------------------------------------------------------------


def test_what_cannot_be_computed_is_refused(model):
    config = {**model.config, "moe_layer_freq": [0, 1, 1, 1]}
    with pytest.raises(ValueError, match="MoE layers"):
        mimo_torch.MiMo(config, 3)
    with pytest.raises(ValueError, match="drafts is 4; the model has 3 MTP layers"):
        mimo_torch_drafts.speculate(model, [1, 2, 3], 4, drafts=4)
    with pytest.raises(ValueError, match="mode is 'tree'"):
        mimo_torch_drafts.speculate(model, [1, 2, 3], 4, mode="tree")
    with pytest.raises(ValueError, match="7 needed"):
        mimo_torch_drafts.speculate(model, [1, 2, 3], 4, continuation=[1, 2])


# --- training -------------------------------------------------------------------------------------


def test_training_learns_and_one_seed_gives_the_same_weights():
    size = tiny_mimo.TinyMiMo(
        layers=2,
        full_every=2,
        moe_layers=0,
        window_tokens=8,
        hidden_size=32,
        intermediate_size=32,
        vocab_size=300,
    )
    recipe = tiny_trained_train.Recipe(
        steps=40, mtp_steps=10, batch=2, sequence_tokens=12, warmup_steps=2, learning_rate=1e-2
    )
    tokens = torch.arange(12).repeat(50) + 20

    def trained():
        model = tiny_trained_train.new_model(size, recipe)
        tiny_trained_train.train(model, tokens, recipe, report=lambda _: None)
        return model

    model = trained()
    left = [loss.item() for loss in tiny_trained_train.losses(model, tokens[None, :28])]
    # Untrained it is log(300) = 5.7; four heads, each with its own label.
    assert len(left) == 4 and max(left) < 1.5
    again = trained().state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_saved_weights_are_rounded_once_and_load_again(model, tmp_path):
    from safetensors.torch import load_file

    path = tmp_path / "model.safetensors"
    mimo_torch.save_weights(model, path, torch.bfloat16)
    stored = load_file(str(tiny_trained.CHECKPOINT / "model.safetensors"))
    again = load_file(str(path))
    assert set(stored) == set(again)
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    assert "model.mtp.layers.2.self_attn.attention_sink_bias" in stored
    assert stored["lm_head.weight"].dtype == torch.bfloat16
