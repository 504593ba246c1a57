# SPDX-License-Identifier: Apache-2.0
"""The MTP feature in ``vllm serve``: every layer, its own KV, the tokens of an engine without it.

The model is a copy draft (see ``copy_draft.py``): what its MTP layers draft is what the target
chooses, unless a row of their KV is wrong. So acceptance is a check of the KV and not a matter of
training. One layer is weakened where rejections are wanted; the layers behind it stay perfect.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from integration_tests.copy_draft import make_copy_draft
from integration_tests.kv_client import Client
from integration_tests.refusal import Refusal, check_refused, serve_all
from integration_tests.side_by_side import start_all
from tools.model_runner_v2 import environment
from tools.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

K = 3
MAX_MODEL_LEN = 512
SMALL_CHUNK = 96
PRESSED_BLOCKS = 62
LIMIT_TOKENS = 128
OUTPUT_TOKENS = 24
ARGUMENTS = (f"--max-model-len={MAX_MODEL_LEN}", "--max-num-seqs=8")
PROMPT_LENGTHS = (1, 2, 3, 17, 40, 95, 96, 97, 130, 255, 256, 300)
DRAFT_TOKENS = "mimo:mtp_drafted_tokens_total"
CHECKED, ACCEPTED = "mimo:mtp_checked_tokens_total", "mimo:mtp_accepted_tokens_total"


def prompts(seed: int = 0) -> list[list[int]]:
    """Random prompts of all lengths that are an edge for windows, chunks or blocks."""
    rng = random.Random(seed)
    return [[rng.randrange(300, 1000) for _ in range(n)] for n in PROMPT_LENGTHS]


def complete(server: VllmServer, asked: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts, served together."""
    client = Client(server)
    return [a.output for a in client.at_once(asked, OUTPUT_TOKENS)]


def counts(server: VllmServer, name: str) -> list[float]:
    """The counter by draft position, over all output bins."""
    return [server.metric(name, position=str(j)) or 0.0 for j in range(K)]


def speculation(**settings: object) -> str:
    return "--speculative-config=" + json.dumps({"method": "mtp", **settings})


@pytest.fixture(scope="module")
def perfect_model(tmp_path_factory):
    return make_copy_draft(tmp_path_factory.mktemp("perfect"))


@pytest.fixture(scope="module")
def weak_model(tmp_path_factory):
    return make_copy_draft(tmp_path_factory.mktemp("weak"), weaken=0.3)


@pytest.fixture(scope="module")
def blind_model(tmp_path_factory):
    return make_copy_draft(tmp_path_factory.mktemp("blind"), blind=True)


@pytest.fixture(scope="module")
def servers(serve_module, perfect_model, weak_model, blind_model):
    """All servers of the module, by the names of the fixtures below."""

    def drafting(model, *arguments, plugin="mimo:mtp", **settings):
        if settings:
            arguments += ("--additional-config", json.dumps({"mimo": {"mtp": settings}}))
        return partial(
            serve_module, model, *ARGUMENTS, *arguments, plugin=plugin, environment=environment()
        )

    chunks = f"--max-num-batched-tokens={SMALL_CHUNK}"
    return start_all(
        {
            "plain": partial(serve_module, weak_model, *ARGUMENTS),
            "chunked": drafting(weak_model, chunks),
            "pressed": drafting(
                perfect_model,
                chunks,
                f"--num-gpu-blocks-override={PRESSED_BLOCKS}",
                speculation(num_speculative_tokens=K),
                plugin="mimo",
            ),
            "adaptive": drafting(
                weak_model,
                speculation(num_speculative_tokens=K, max_model_len=LIMIT_TOKENS),
                adaptive_length=True,
            ),
            "blind": drafting(blind_model, warn_after_drafts=20),
        }
    )


@pytest.fixture(scope="module")
def plain(servers):
    """No speculation, Model Runner V1, no plugin; all models have the same target."""
    return servers["plain"]


@pytest.fixture(scope="module")
def expected(plain):
    return complete(plain, prompts())


@pytest.fixture(scope="module")
def chunked(servers):
    """The feature alone, as its user starts it: the plugin fills in the speculative config."""
    return servers["chunked"]


@pytest.fixture(scope="module")
def pressed(servers):
    """With ``kv``, the whole plugin and a pool in which requests are preempted."""
    return servers["pressed"]


@pytest.fixture(scope="module")
def adaptive(servers):
    """Draft lengths by measured acceptance, and a limit that long requests reach."""
    return servers["adaptive"]


@pytest.fixture(scope="module")
def blind(servers):
    """MTP layers that are never right."""
    return servers["blind"]


def test_cold_and_chunked_requests_get_the_same_tokens(chunked, expected):
    assert complete(chunked, prompts()) == expected


def test_each_step_has_a_layer(chunked, expected):
    """B30: three positions are drafted and accepted, and layer 0, which is weakened, not always."""
    assert "features=mtp" in chunked.log_text()
    checked, accepted = counts(chunked, CHECKED), counts(chunked, ACCEPTED)
    assert 0 < accepted[0] < checked[0]
    assert accepted[1] > 0 and accepted[2] > 0


@pytest.mark.parametrize("server", ["chunked", "pressed"])
def test_long_prompts_lose_nothing_to_rejections_hits_or_chunks(server, request, expected):
    """B32, B34, B73: exact, because every row of the KV is; cold, then from the cache."""
    server = request.getfixturevalue(server)
    client, long = Client(server), [p for p in prompts(seed=1) if len(p) > 24]
    hits = []
    # Of a batch too large for the pool nothing may be left; a prompt that was asked alone is.
    for asked in (long, long, long[-1:], long[-1:]):
        before = counts(server, CHECKED), counts(server, ACCEPTED)
        hits.append(any(answer.cached for answer in client.at_once(asked, OUTPUT_TOKENS)))
        checked, accepted = (
            [new - old for new, old in zip(counts(server, name), old, strict=True)]
            for name, old in zip((CHECKED, ACCEPTED), before, strict=True)
        )
        assert checked[1] > 0 and checked[2] > 0
        assert accepted[1:] == checked[1:]
    assert hits[-1] and not hits[0]


def test_a_perfect_copy_reaches_all_positions(pressed, expected):
    """B32: acceptance length k + 1, beside ``kv`` and ``scheduler``, preempted and not."""
    assert complete(pressed, prompts()) == expected
    assert complete(pressed, prompts()) == expected
    long = [p for p in prompts(seed=2) if len(p) > 24]
    rejected = "mimo:mtp_wasted_drafts_total"
    before = pressed.metric(rejected, reason="rejected") or 0.0
    accepted = counts(pressed, ACCEPTED)
    complete(pressed, long)
    assert (pressed.metric(rejected, reason="rejected") or 0.0) == before
    assert all(new > old for new, old in zip(counts(pressed, ACCEPTED), accepted, strict=True))
    assert (pressed.metric("mimo:window_safe_hit_tokens_total") or 0) > 0


def test_preempted_requests_get_the_same_tokens(pressed, plain):
    """A request that starts again has its rows computed again, drafts or not."""
    rng = random.Random(6)
    asked = [[rng.randrange(300, 1000) for _ in range(40)] for _ in range(8)]
    one, other = (Client(server).at_once(asked, 160) for server in (plain, pressed))
    assert [a.output for a in one] == [a.output for a in other]
    assert pressed.metric("vllm:num_preemptions_total"), "the pool was meant to be too small"


def test_the_metrics_of_the_engine_agree(chunked, expected):
    theirs = Counter()
    for labels, value in chunked.metrics()["vllm:spec_decode_num_accepted_tokens_per_pos_total"]:
        theirs[labels["position"]] += value
    assert [theirs[str(j)] for j in range(K)] == counts(chunked, ACCEPTED)
    drafted, accepted = sum(counts(chunked, DRAFT_TOKENS)), sum(counts(chunked, ACCEPTED))
    assert drafted == accepted + (chunked.metric("mimo:mtp_wasted_drafts_total") or 0)


def test_lengths_adapt_and_drafting_stops_at_its_limit(adaptive, expected):
    """Serving goes on past the draft's limit, with the same tokens."""
    assert complete(adaptive, prompts()) == expected
    before = adaptive.metric(DRAFT_TOKENS) or 0.0
    past = [p for p in prompts(seed=3) if len(p) > LIMIT_TOKENS]
    assert past and all(len(tokens) == OUTPUT_TOKENS for tokens in complete(adaptive, past))
    assert (adaptive.metric(DRAFT_TOKENS) or 0.0) == before
    near = [p[: LIMIT_TOKENS - 10] for p in past]
    complete(adaptive, near)
    assert (adaptive.metric(DRAFT_TOKENS) or 0.0) > before
    assert adaptive.metric("mimo:mtp_draft_length_total", length="0")


def test_sampled_tokens_have_the_distribution_of_an_engine_without_drafts(plain, chunked):
    """Two samples of pairs of tokens, out of four that are allowed; both servers draw alike."""
    prompt = prompts(seed=4)[-1]
    allowed = [400, 500, 600, 700]
    samples = 64

    def draw(server: VllmServer) -> Counter:
        found: Counter = Counter()
        for start in range(0, samples, 8):
            reply = server.post(
                "/v1/completions",
                {
                    "prompt": prompt,
                    "n": 8,
                    "seed": start,
                    "temperature": 1.5,
                    "max_tokens": 3,
                    "ignore_eos": True,
                    "allowed_token_ids": allowed,
                    "return_token_ids": True,
                },
            )
            found.update(tuple(choice["token_ids"][1:]) for choice in reply["choices"])
        return found

    one, other = draw(plain), draw(chunked)
    assert sum(one.values()) == sum(other.values()) == samples
    pairs = set(one) | set(other)
    assert len(pairs) > 4
    statistic = sum((one[p] - other[p]) ** 2 / (one[p] + other[p]) for p in pairs)
    # chi square with len(pairs) - 1 degrees of freedom: mean d, standard deviation sqrt(2 d)
    degrees = len(pairs) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5, (one, other)


def test_a_draft_that_is_never_accepted_is_reported_once(blind):
    """B32: useless MTP layers; the text is right and one line says that the drafts are not."""
    rng = random.Random(5)
    asked = [[rng.randrange(300, 1000) for _ in range(30)] for _ in range(4)]
    Client(blind).at_once(asked, 16)
    assert blind.log_text().count("found no accepted token in 20 drafts") == 1
    assert blind.metric("mimo:mtp_self_check_failures_total") == 1


REFUSALS = {
    "no layers": Refusal(["--plugin=mimo:mtp"], ["holds no MTP layers"], environment=environment()),
    "first model runner": Refusal(
        ["--plugin=mimo:mtp", speculation(num_speculative_tokens=3)],
        ["Model Runner V1", "VLLM_USE_V2_MODEL_RUNNER=1"],
    ),
}


@pytest.fixture(scope="module")
def refused(perfect_model, tmp_path_factory):
    """How the commands of ``REFUSALS`` ended."""
    bare = make_copy_draft(tmp_path_factory.mktemp("bare"), mtp_layers=0)
    refusals = {**REFUSALS, "no layers": replace(REFUSALS["no layers"], model=bare)}
    return serve_all(perfect_model, refusals)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_draft_is_refused(refused, name):
    check_refused(refused[name], REFUSALS[name].words)
