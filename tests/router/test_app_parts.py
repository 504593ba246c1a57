# SPDX-License-Identifier: Apache-2.0
"""Options, what workers say of themselves, speeds, usage: parts of the router by themselves."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mimo_plugin.cli.main import build_parser, main
from mimo_plugin.cli.router import settings_of
from mimo_plugin.core.cost import PrefillCost
from mimo_plugin.core.load import Speed
from mimo_plugin.errors import ConfigError
from mimo_plugin.router.metrics import OUTCOMES, Metrics
from mimo_plugin.router.model import read_model
from mimo_plugin.router.probe import Probe, ProbeError, Source, reachable
from mimo_plugin.router.relay import usage
from mimo_plugin.router.settings import (
    Settings,
    WorkerSpec,
    parse_worker,
    rank_address,
    read_key,
    read_workers,
    settings_text,
    worker_of,
    worker_url,
)
from mimo_plugin.router.speed import Speeds, fit
from tests.router.workers import FakeWorker

pytestmark = pytest.mark.timeout(30)


# Options


def of(*arguments: str) -> Settings:
    found = settings_of(build_parser().parse_args(["router", "--model", "m", *arguments]))
    assert isinstance(found, Settings)
    return found


def test_options_have_the_settings_defaults() -> None:
    assert of() == Settings(model="m")


def test_a_worker_with_all_of_its_keys() -> None:
    text = (
        "http://10.0.0.1:8001/,role=prefill,events=tcp://10.0.0.1:5557,"
        "replay=tcp://10.0.0.1:5558,ranks=2,engine=vllm"
    )
    spec = WorkerSpec(
        "http://10.0.0.1:8001", "prefill", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558", 2, "vllm"
    )
    assert of("--worker", text).workers == (spec,)
    assert worker_of({"url": spec.url, **settings_text(spec)}, "state") == spec


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h", "http://h:80"),
        ("https://H/", "https://h:443"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://h:1/base/", "http://h:1/base"),
    ],
)
def test_one_worker_has_one_name(text: str, url: str) -> None:
    assert worker_url(text) == url


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--worker", "ftp://h:1"], "--worker"),
        (["--worker", "h:1"], "--worker"),
        (["--worker", "http://u:secret@h:1"], "--worker"),
        (["--worker", "http://h:99999"], "--worker"),
        (["--worker", "http://h:1/a b"], "--worker"),
        (["--worker", "http://h:1,role=both,role=decode"], "--worker"),
        (["--worker", "http://h:1,role"], "--worker"),
        (["--worker", "http://h:1,roel=both"], "--worker: key"),
        (["--worker", "http://h:1,role=encode"], "--worker: role"),
        (["--worker", "http://h:1,engine=tgi"], "--worker: engine"),
        (["--worker", "http://h:1,ranks=0"], "--worker: ranks"),
        (["--worker", "http://h:1,ranks=x"], "--worker: ranks"),
        (["--worker", "http://h:1,events=h:5557"], "--worker: events"),
        (["--worker", "http://h:1,events=tcp://*:5557"], "--worker: events"),
        (["--worker", "http://h:1,replay=tcp://h"], "--worker: replay"),
        (["--worker", "http://h:1", "--worker", "http://h:1/"], "--worker"),
        (["--workers-file", "/nowhere.json"], "--workers-file"),
        (["--host", "0.0.0.0"], "--host"),
        (["--host", "router.example"], "--host"),
        (["--port", "70000"], "--port"),
        (["--state", "postgres://x"], "--state"),
        (["--tokenizer", "remote"], "--tokenizer"),
        (["--admin-key", ""], "--admin-key"),
        (["--admin-key", "two words"], "--admin-key"),
        (["--admin-key", "@/nowhere"], "--admin-key"),
        (["--worker-key", "ü"], "--worker-key"),
        (["--max-body-mib", "0"], "--max-body-mib"),
        (["--max-body-mib", "nan"], "--max-body-mib"),
        (["--max-buffered-mib", "0"], "--max-buffered-mib"),
        (["--max-headers", "1"], "--max-headers"),
        (["--max-in-flight", "0"], "--max-in-flight"),
        (["--retries", "-1"], "--retries"),
        (["--read-timeout", "0"], "--read-timeout"),
        (["--grace", "-1"], "--grace"),
        (["--queue-weight", "-1"], "--queue-weight"),
        (["--tokens-per-s", "0"], "--tokens-per-s"),
        (["--hash-block-tokens", "0"], "--hash-block-tokens"),
        (["--log-level", "loud"], "--log-level"),
    ],
)
def test_each_bad_option_is_one_line(
    arguments: list[str], setting: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["router", "--model", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"mimo router: error: {setting}: found ")
    assert "allowed: " in error and "fix: " in error
    assert "secret" not in error


def test_elsewhere_than_here_needs_a_key() -> None:
    assert of("--host", "0.0.0.0", "--admin-key", "k").admin_key == "k"
    assert of("--host", "::1").is_local and of("--host", "localhost").is_local
    with pytest.raises(ConfigError, match="--admin-key"):
        of("--host", "0.0.0.0")


def test_a_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (None, "{", "[]"):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        assert main(["router", "--model", str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith("mimo router: error: --model: found ")


def test_the_model_s_window_and_cost(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 64,
        "sliding_window": 128,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(str(tmp_path))
    assert model.window_tokens == 128 and model.parity_known
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "something else"}))
    assert read_model(str(tmp_path)).window_tokens is None


def test_a_key_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("abc\n")
    assert read_key("--admin-key", f"@{file}") == "abc"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w.json", '{"workers": [{"url": "http://a:1", "ranks": 2}, "http://b:1"]}'),
        ("w.json", '[{"url": "http://a:1", "ranks": 2}, {"url": "http://b:1"}]'),
        ("w.yaml", "workers:\n- url: http://a:1\n  ranks: 2\n- http://b:1\n"),
    ],
)
def test_workers_of_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found = read_workers(str(tmp_path / name))
    assert found == (WorkerSpec("http://a:1", ranks=2), WorkerSpec("http://b:1"))


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"workers": 1}', "[1]", '[{"url": "x"}]', '[{"role": "both"}]']
)
def test_a_bad_file_of_workers_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(ConfigError, match="--workers-file.*allowed"):
        read_workers(str(tmp_path / "w.json"))


def test_ranks_publish_one_port_after_the_other() -> None:
    assert rank_address("tcp://h:5557", 0) == "tcp://h:5557"
    assert rank_address("tcp://h:5557", 3) == "tcp://h:5560"
    assert rank_address("ipc:///x", 1) == "ipc:///x_dp1"
    assert parse_worker("http://h:1,events=ipc:///x").events == "ipc:///x"


# What workers say


INFO = (
    'vllm:cache_config_info{block_size="128",effective_attention_block_size="192",engine="%d",'
    'hash_block_size="None",kv_cache_size_tokens="5000",prefix_match_unit="None"} 1.0\n'
)


def facts_of(worker: FakeWorker, **spec: Any) -> Any:
    async def ask() -> Any:
        await worker.start()
        try:
            async with aiohttp.ClientSession() as session:
                return await Probe(session, "key").facts(WorkerSpec(worker.url, **spec))
        finally:
            await worker.stop()

    return asyncio.run(ask())


def test_a_vllm_worker_tells_blocks_ranks_and_events() -> None:
    worker = FakeWorker()
    worker.metrics = "# HELP x\n" + INFO % 0 + INFO % 1 + "mimo:checkpoints_created_total 1\n"
    source = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}
    other = {"publisher": "zmq", "endpoint": "tcp://10.0.0.9:5558", "topic": "kv"}
    worker.extra["/kv_event_sources"] = {"0": source, "1": other}
    found = facts_of(worker)
    assert (found.engine, found.version) == ("vllm", "0.32.0")
    assert found.hash_tokens == 64  # what 128 and 192 have in common
    assert found.layout == ("128", "192") and found.capacity_tokens == 5000
    assert found.ranks == (0, 1) and found.keeps_windows
    assert found.sources == {
        0: Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557"),
        1: Source("tcp://10.0.0.9:5558", None, "kv"),
    }
    # What was set goes before what was said.
    found = facts_of(worker, events="tcp://h:1000", replay="tcp://h:2000", ranks=1)
    assert found.ranks == (None,)
    assert found.sources == {None: Source("tcp://h:1000", "tcp://h:2000")}
    found = facts_of(worker, events="tcp://h:1000", ranks=2)
    assert found.sources[1].events == "tcp://h:1001"


def test_a_vllm_worker_that_tells_nothing() -> None:
    found = facts_of(FakeWorker())
    assert found.ranks == (None,) and not found.sources and found.hash_tokens is None
    assert not found.keeps_windows


def test_an_sglang_worker() -> None:
    worker = FakeWorker()
    worker.extra = {
        "/server_info": {
            "version": "0.5.23",
            "page_size": 64,
            "dp_size": 2,
            "chunked_prefill_size": 8192,
            "internal_states": [{"memory_usage": {"token_capacity": 9000}}],
            "kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:5557"}',
        }
    }
    found = facts_of(worker)
    assert (found.engine, found.version, found.hash_tokens) == ("sglang", "0.5.23", 64)
    assert found.ranks == (0, 1) and found.capacity_tokens == 9000 and found.chunk_tokens == 8192
    assert [found.sources[rank].events for rank in (0, 1)] == [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5558",
    ]


def test_a_worker_that_is_something_else() -> None:
    worker = FakeWorker()
    worker.models = []

    async def ask() -> None:
        await worker.start()
        async with aiohttp.ClientSession() as session:
            probe = Probe(session, timeout_s=0.5)
            assert await probe.models(worker.url) == {}
            await probe.healthy(worker.url)
            worker.healthy = False
            with pytest.raises(ProbeError, match="503"):
                await probe.healthy(worker.url)
            await worker.stop()
            with pytest.raises(ProbeError):
                await probe.models(worker.url)

    asyncio.run(ask())


def test_an_address_that_was_bound_everywhere_is_at_the_worker() -> None:
    assert reachable("tcp://*:5557", "http://[::1]:80") == "tcp://[::1]:5557"
    assert reachable("tcp://0.0.0.0:5557", "http://h:80") == "tcp://h:5557"
    assert reachable("tcp://10.0.0.1:5557", "http://h:80") == "tcp://10.0.0.1:5557"
    assert reachable("ipc:///x", "http://h:80") == "ipc:///x"


# Speeds


COST = PrefillCost(80_000.0)


def samples(
    rate: float, fixed_s: float, seed: int, count: int = 48, low: int = 100, high: int = 30_000
) -> list[tuple[int, float]]:
    rnd = random.Random(seed)
    found = []
    for _ in range(count):
        tokens = rnd.randint(low, high)
        seconds = fixed_s + COST.cost(0, tokens) / rate
        seconds *= rnd.lognormvariate(0, 0.05)
        if rnd.random() < 0.15:  # something else was in its way
            seconds *= rnd.uniform(2, 10)
        found.append((tokens, seconds))
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rate", "fixed_s"), [(500.0, 0.05), (20_000.0, 0.02), (3e5, 0.005)])
def test_a_speed_is_found_among_odd_values(rate: float, fixed_s: float, seed: int) -> None:
    pairs = [(COST.cost(0, tokens), s) for tokens, s in samples(rate, fixed_s, seed)]
    found, fixed = fit(pairs, 0.02)
    assert 0.75 < found / rate < 1.3
    assert fixed < 4 * fixed_s + 0.02 * max(seconds for _, seconds in pairs)


def test_prompts_of_one_length_give_a_speed_too() -> None:
    pairs = [(COST.cost(0, 4000), 0.5)] * 16
    rate, fixed_s = fit(pairs, 0.02)
    assert fixed_s == 0.02
    assert Speed(COST, rate, fixed_s).prefill_s(0, 4000) == pytest.approx(0.5)
    rate, fixed_s = fit([(1.0, 0.001)] * 16, 0.02)
    assert Speed(COST, rate, fixed_s).prefill_s(0, 1) == pytest.approx(0.001, rel=0.01)


def test_workers_that_are_about_as_fast_count_as_equal_and_others_do_not() -> None:
    speeds = Speeds(Speed(COST))
    for name, rate in (("a", 900.0), ("b", 1000.0), ("c", 1100.0), ("d", 4000.0)):
        changed = [speeds.observe(name, 0, t, s) for t, s in samples(rate, 0.02, 1)]
        assert any(changed)
    assert speeds.of("a") == speeds.of("b") == speeds.of("c") == speeds.of("new")
    assert 800 < speeds.of("a").tokens_per_s < 1200
    assert speeds.of("d").tokens_per_s > 3000
    speeds.forget("d")
    assert speeds.of("d") == speeds.of("a")


@pytest.mark.parametrize("seed", range(20))
def test_noise_makes_no_worker_faster(seed: int) -> None:
    """Workers share cores with others: the same prefill takes 0.05 to 2 s, whoever does it."""
    rnd, speeds = random.Random(seed), Speeds(Speed(COST))
    for number in range(150):
        name = "abc"[number % 3]
        tokens = rnd.randint(100, 900)
        speeds.observe(name, 0, tokens, 0.05 + tokens / 10_000 + rnd.expovariate(2.0))
        assert speeds.of("a") == speeds.of("b") == speeds.of("c")


def test_a_speed_that_was_set_stays() -> None:
    speeds = Speeds(Speed(COST, 123.0), fixed=True)
    assert not any(speeds.observe("a", 0, t, s) for t, s in samples(5000, 0.02, 1))
    assert speeds.of("a").tokens_per_s == 123.0


# Usage


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens": 4}}}', (4, 9)),
        (b'"usage": {"prompt_tokens": 9, "prompt_tokens_details": null}', (None, 9)),
        (b'"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":0}}', (0, 9)),
        (b'{"input_tokens":9,"cache_read_input_tokens":3}', (3, 9)),
        (b'{"content":"\\"cached_tokens\\": 7"}', (None, None)),
        (b'"cached_tokens":null', (None, None)),
        (b'{"prompt_tokens":1,"cached_tokens":1} {"prompt_tokens":2,"cached_tokens":2}', (2, 2)),
        (b"", (None, None)),
    ],
)
def test_what_an_answer_says_of_its_prompt(
    text: bytes, found: tuple[int | None, int | None]
) -> None:
    assert usage(text) == found


def test_every_outcome_can_be_counted() -> None:
    metrics = Metrics()
    for name in OUTCOMES:
        metrics.outcome(name)
        assert f'mimo_router:requests_total{{outcome="{name}"}} 1.0' in metrics.text().decode()
