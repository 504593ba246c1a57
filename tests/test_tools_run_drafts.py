# SPDX-License-Identifier: Apache-2.0
"""Speculation in `make run`: what the section serves and its arithmetic, without an engine."""

import dataclasses
import json
import re

import pytest

from tools import model_runner_v2, tiny_trained, tiny_trained_data
from tools.run import compare, drafts, drafts_page
from tools.run.replay import Record, hash_tokens


def record(session, answer):
    """A request of three prompt tokens."""
    return Record(
        session=session,
        turn=0,
        kind="held-out code",
        prompt_hash=hash_tokens([1, 2, 3]),
        prompt_tokens=3,
        cached_tokens=0,
        ttft_s=0.1,
        duration_s=1.0,
        answer=list(answer),
        prompt=[1, 2, 3],
    )


def spec_samples(rounds, accepted, plugin=False):
    """Counters of a server as vLLM (and the plugin) export them, in two engines."""
    samples = {
        drafts.ROUNDS: [({"engine": "0"}, rounds - 1.0), ({"engine": "1"}, 1.0)],
        drafts.ACCEPTED: [({"engine": "0"}, float(sum(accepted)))],
        drafts.ACCEPTED_AT: [
            ({"engine": str(engine), "position": str(place)}, value - 1.0 if engine else 1.0)
            for engine in (0, 1)
            for place, value in reversed(list(enumerate(accepted)))
        ],
    }
    if plugin:
        samples |= dict(zip(drafts.COUNTERS, ([({}, 1.0 * rounds)], [({}, 9.0)]), strict=True))
    return samples


def setup(**changes):
    options = {"quick": True, "arguments": ["--shared"], "user_arguments": [], "concurrency": 3}
    options |= {"model": None, "dtype": "float32", "exact": True, "encode": lambda text: [1, 2]}
    return drafts.prepare(**{**options, "ready_timeout_s": 9.0, **changes})


def side(name, accepted, answer=(4, 5), rounds=40):
    samples = spec_samples(rounds, accepted, plugin=name == "plugin")
    counters = drafts.require_counters(samples) if name == "plugin" else {}
    records = [record(0, (4, 5)), record(1, answer)]
    return drafts.Side(name, records, drafts.read_acceptance(samples, name), 1.0, 2.0, counters)


@pytest.fixture
def tiny_setup():
    return drafts.Setup("model", 3, [[1, 2, 3]] * 2, True, [], {}, 3, 9.0)


@pytest.fixture
def section(tiny_setup):
    return drafts.summary(tiny_setup, side("stock", [20, 10, 5]), side("plugin", [24, 18, 9]))


def test_acceptance_is_read_over_engines_and_by_position():
    acceptance = drafts.read_acceptance(spec_samples(40, [20, 10, 5]), "stock")
    assert acceptance.length_tokens == pytest.approx(1 + 35 / 40)
    assert acceptance.conditional == pytest.approx([0.5, 0.5, 0.5])
    never = drafts.read_acceptance(spec_samples(40, [20, 0, 0]), "stock")
    assert never.conditional == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("samples", [{}, {drafts.ROUNDS: [({}, 0.0)]}])
def test_a_server_that_drafts_nothing_is_refused(samples):
    with pytest.raises(compare.RunError, match="stock: the server drafted nothing"):
        drafts.read_acceptance(samples, "stock")


def test_the_feature_without_its_counters_is_refused():
    samples = spec_samples(40, [20, 10, 5], plugin=True)
    assert drafts.require_counters(samples) == dict(zip(drafts.COUNTERS, (40, 9), strict=True))
    for broken in (
        spec_samples(40, [20, 10, 5]),
        {**samples, drafts.COUNTERS[0]: [({}, 0.0)]},
        {name: value for name, value in samples.items() if name != drafts.COUNTERS[1]},
    ):
        with pytest.raises(compare.RunError, match="not active"):
            drafts.require_counters(broken)


def test_the_sections_figures_and_claims(section):
    assert section["accept_len_ratio"] == pytest.approx((1 + 51 / 40) / (1 + 35 / 40))
    assert section["runs"]["plugin"]["conditional"] == pytest.approx([0.6, 0.75, 0.5])
    claims = {claim["id"]: claim for claim in drafts.claims(section, "make run")}
    assert set(claims) == {"drafts_identical", "accept_len_ratio"}
    assert claims["drafts_identical"]["value"] == 1.0
    for claim in claims.values():
        assert set(claim) == {"id", "value", "stock", "bound", "unit", "seeds", "how"}
    printed = compare.format_table(drafts.table(section))
    assert re.search(r"tokens a round +1\.875 +2\.275 +1\.213", printed)
    assert re.search(r"draft 2 accepted, %.* +50\.0 +75\.0 +1\.500", printed)
    assert "2 of 2" in printed
    json.dumps([section, list(claims.values())])


@pytest.mark.parametrize("exact", [True, False])
def test_other_answers_fail_the_run_in_fp32_only(tiny_setup, exact):
    setup = dataclasses.replace(tiny_setup, exact=exact)
    sides = side("stock", [20, 10, 5]), side("plugin", [20, 10, 5], answer=(4, 6))
    section = drafts.summary(setup, *sides)
    good, line = drafts.verdict(section)
    assert good is not exact and "session 1, turn 0" in line
    assert drafts.claims(section, "")[0]["value"] == 0.75


def test_a_section_without_figures_has_its_line():
    assert drafts.verdict({"left_out": "no triton"}) == (True, "drafts: left out, no triton")
    assert drafts.verdict({"failed": "dead"}) == (False, "drafts: dead")
    for section in ({"left_out": "<none>"}, {"failed": "<none>"}):
        assert drafts.claims(section, "") == []
        text = drafts_page.build(section)
        assert "<h2>Drafts</h2>" in text and "&lt;none&gt;" in text and "<img" not in text


def test_the_sections_page(section):
    pytest.importorskip("matplotlib")
    text = drafts_page.build(section)
    assert "2 of 2" in text and "data:image/png;base64," in text
    assert "tokens a round" in text and f"{drafts.COUNTERS[0]} 40" in text
    section |= {"first_difference": "<here>", "identical_requests": 1}
    assert "first at &lt;here&gt;" in drafts_page.build(section)


def write_model(folder, architectures, tensors):
    (folder / "config.json").write_text(json.dumps({"architectures": architectures}))
    if tensors is not None:
        index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


@pytest.mark.parametrize(
    ("architectures", "tensors", "reason"),
    [
        (["LlamaForCausalLM"], ["model.mtp.layers.0.x"], "LlamaForCausalLM, not MiMo-V2"),
        (None, [], "unknown, not MiMo-V2"),
        (["MiMoV2FlashForCausalLM"], ["model.layers.0.x"], "holds no MTP layers"),
        (["MiMoV2FlashForCausalLM"], ["model.mtp.layers.1.x"], "can't be counted"),
        (["MiMoV2FlashForCausalLM"], None, "can't be counted"),
    ],
)
def test_models_without_mtp_layers_leave_the_section_out(tmp_path, architectures, tensors, reason):
    model = write_model(tmp_path, architectures, tensors)
    with pytest.raises(drafts.LeftOut, match=reason):
        setup(model=model)


def test_unreadable_models_leave_the_section_out(tmp_path):
    with pytest.raises(drafts.LeftOut, match="can't be read"):
        setup(model=str(tmp_path))


@pytest.mark.parametrize("option", ["--speculative-config={}", "-sc.method=ngram", "--spec-tokens"])
def test_speculation_of_the_users_own_leaves_the_section_out(option):
    with pytest.raises(drafts.LeftOut, match="choose the speculation themselves"):
        setup(user_arguments=["--seed=1", option])


@pytest.fixture
def cpu(monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(drafts, "is_cpu_build", lambda: True)


def test_what_is_not_installed_leaves_the_section_out(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(model_runner_v2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(drafts.LeftOut, match="needs the package triton"):
        setup()
    monkeypatch.setattr(drafts, "is_cpu_build", lambda: False)
    monkeypatch.setattr(tiny_trained_data.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(drafts.LeftOut, match="sources are absent"):
        setup()


def test_the_tiny_run_takes_the_trained_checkpoint(cpu, monkeypatch):
    monkeypatch.setattr(model_runner_v2.importlib.util, "find_spec", lambda name: object())
    found = setup(user_arguments=["--seed=1"])
    assert (found.model, found.layers) == (str(tiny_trained.CHECKPOINT), 3)
    assert [len(prompt) for prompt in found.prompts] == [320] * drafts.QUICK_PROMPTS
    assert found.environment["TRITON_INTERPRET"] == "1"
    assert {"--dtype=float32", "--seed=1", "--enforce-eager"} <= set(found.arguments)
    assert "--shared" not in found.arguments
    (option, value), plugin = found.own_arguments("stock"), found.own_arguments("plugin")
    assert option == "--speculative-config"
    assert json.loads(value) == {"method": "mtp", "num_speculative_tokens": 3}
    assert plugin == ["--plugin", "mimo:mtp"]
    monkeypatch.setattr(drafts, "is_cpu_build", lambda: False)
    assert setup().environment == {} and "--enforce-eager" not in setup().arguments


def test_a_given_model_is_asked_in_its_own_tokens(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(drafts, "is_cpu_build", lambda: False)
    model = write_model(tmp_path, ["MiMoV2ForCausalLM"], ["model.mtp.layers.0.x"])
    found = setup(model=model, encode=lambda text: [len(text)], quick=False)
    assert (found.model, found.layers, found.arguments) == (model, 1, ["--shared"])
    assert found.speculation["num_speculative_tokens"] == 1
    assert len(found.prompts) == drafts.PROMPTS and all(prompt[0] > 320 for prompt in found.prompts)
