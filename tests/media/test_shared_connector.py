# SPDX-License-Identifier: Apache-2.0
"""The encoder-cache connector: what the scheduler promises, the worker finds."""

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402
from vllm.config import ECTransferConfig  # noqa: E402
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole  # noqa: E402
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory  # noqa: E402

from mimo_plugin.engines.vllm import (  # noqa: E402
    ec_key,
    ec_shared,
    ec_stats,
    ec_switch,
    register,
)
from mimo_plugin.engines.vllm.vision.names import SETUP_KEY  # noqa: E402
from mimo_plugin.errors import ConfigError, ContractError  # noqa: E402

pytestmark = pytest.mark.vllm


def configuration(role="ec_both", section=None, rule=None, media_io=None, kwargs=None, **extra):
    """An engine's configuration; ``model=`` and the like change what the encoder is."""
    encoder = {
        "model": "m",
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "hf_overrides": {},
    }
    encoder |= {name: extra.pop(name) for name in tuple(extra) if name in encoder}
    load_format, device = extra.pop("load_format", "auto"), extra.pop("device", "cpu")
    transfer = ECTransferConfig(
        ec_connector="MimoSharedECConnector",
        ec_role=role,
        ec_connector_module_path=ec_shared.__name__,
        ec_connector_extra_config={
            "capacity_mib": 1,
            "max_entries": 8,
            "name": f"test {os.getpid()}",
            **extra,
        },
    )
    return SimpleNamespace(
        ec_transfer_config=transfer,
        model_config=SimpleNamespace(
            **encoder,
            hf_config=SimpleNamespace(**({SETUP_KEY: rule} if rule else {})),
            multimodal_config=SimpleNamespace(
                media_io_kwargs=media_io or {}, mm_processor_kwargs=kwargs
            ),
        ),
        load_config=SimpleNamespace(load_format=load_format),
        device_config=SimpleNamespace(device_type=device),
        additional_config={} if section is None else {"mimo": section},
    )


@pytest.fixture
def make():
    made = []

    def start(side, **given):
        connector = ECConnectorFactory.create_connector(
            configuration(**given), getattr(ECConnectorRole, side)
        )
        made.append(connector)
        return connector

    yield start
    for connector in made:
        connector.shutdown()
    assert not [
        name for name in os.listdir("/dev/shm") if name in {c._cache.path.name for c in made}
    ]


def request(*items):
    features = [SimpleNamespace(identifier=name) for name, _ in items]
    return SimpleNamespace(
        mm_features=features, get_num_encoder_embeds=lambda index: items[index][1]
    )


def embedding(rows, seed=0, width=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(torch.bfloat16)


def step(scheduler, worker, asked, cache):
    """One engine step for one request; which of its items were taken from the cache.

    As in vLLM, every item gets room in the encoder cache, whether it is loaded or made.
    """
    scheduler.ensure_cache_available(asked, 0)
    taken = []
    for index, feature in enumerate(asked.mm_features):
        if scheduler.has_cache_item(feature.identifier):
            taken.append(feature.identifier)
        scheduler.update_state_after_alloc(asked, index)
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    worker.start_load_caches(cache)
    report = SimpleNamespace(ec_connector_worker_meta=worker.build_connector_worker_meta())
    scheduler.update_connector_output(report)
    worker.clear_connector_metadata()
    return taken


def test_one_instance_stores_and_another_loads(make):
    first, scheduler, worker = make("WORKER"), make("SCHEDULER"), make("WORKER")
    outputs = {"image": embedding(7, 1)}
    first.save_caches(outputs, "image")
    cache = {}
    assert step(scheduler, worker, request(("image", 7), ("new", 3)), cache) == ["image"]
    assert cache.keys() == {"image"}
    assert torch.equal(cache["image"], outputs["image"])
    assert cache["image"].dtype == torch.bfloat16
    assert scheduler._holds == {} and scheduler._in_flight == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_and_shape_comes_back_bit_for_bit(make, dtype):
    worker, scheduler = make("WORKER"), make("SCHEDULER")
    sent = embedding(12).to(dtype).view(4, 3, 16)[:, 1:]  # not contiguous
    worker.save_caches({"x": sent}, "x")
    cache = {}
    step(scheduler, worker, request(("x", 4)), cache)
    assert torch.equal(cache["x"], sent) and cache["x"].dtype == dtype


def test_b37_a_length_that_differs_is_encoded_again(make):
    worker, scheduler = make("WORKER"), make("SCHEDULER")
    worker.save_caches({"x": embedding(256)}, "x")
    cache = {}
    assert step(scheduler, worker, request(("x", 275)), cache) == []
    assert cache == {}
    assert lookups(scheduler) == {"mismatch": 1}
    worker.save_caches({"x": embedding(275)}, "x")  # what the encoder made now
    assert step(scheduler, worker, request(("x", 275)), cache) == ["x"]


def test_an_item_nobody_asked_about_with_a_length_is_no_hit(make):
    worker, scheduler = make("WORKER"), make("SCHEDULER")
    worker.save_caches({"x": embedding(4)}, "x")
    assert not scheduler.has_cache_item("x")


def test_what_was_promised_is_not_evicted_before_it_is_loaded(make):
    worker, scheduler = make("WORKER"), make("SCHEDULER")
    sent = embedding(400, width=1000)  # 0.8 of 1 MiB
    worker.save_caches({"x": sent}, "x")
    asked = request(("x", 400))
    scheduler.ensure_cache_available(asked, 0)
    assert scheduler.has_cache_item("x")
    scheduler.update_state_after_alloc(asked, 0)
    plan = scheduler.build_connector_meta(None)
    scheduler.build_connector_meta(None)  # the next step is planned before this one ran
    worker.save_caches({"y": embedding(400, width=1000)}, "y")  # finds no room
    scheduler.request_finished(asked)  # cancelled meanwhile
    worker.bind_connector_metadata(plan)
    cache = {}
    worker.start_load_caches(cache)
    assert torch.equal(cache["x"], sent)
    report = SimpleNamespace(ec_connector_worker_meta=worker.build_connector_worker_meta())
    scheduler.update_connector_output(report)
    worker.save_caches({"y": embedding(400, width=1000)}, "y")
    assert worker._cache.contains("y") and not worker._cache.contains("x")


def test_what_was_asked_about_and_not_scheduled_is_let_go(make):
    worker, scheduler = make("WORKER"), make("SCHEDULER")
    worker.save_caches({"x": embedding(4)}, "x")
    scheduler.ensure_cache_available(request(("x", 4)), 0)
    assert scheduler.has_cache_item("x")
    assert scheduler.build_connector_meta(None).lengths == {}
    assert scheduler._holds == {}


def test_roles(make):
    producer = make("WORKER", role="ec_producer")
    consumer, scheduler = make("WORKER", role="ec_consumer"), make("SCHEDULER", role="ec_consumer")
    consumer.save_caches({"x": embedding(4)}, "x")
    cache = {}
    assert step(scheduler, consumer, request(("x", 4)), cache) == []
    producer.save_caches({"x": embedding(4)}, "x")
    assert step(scheduler, consumer, request(("x", 4)), cache) == ["x"]
    alone = make("SCHEDULER", role="ec_producer")
    alone.ensure_cache_available(request(("x", 4)), 0)
    assert not alone.has_cache_item("x")


def test_workers_of_one_instance_all_have_to_report():
    both = ec_shared.Loaded({"a", "b"}).aggregate(ec_shared.Loaded({"b", "c"}))
    assert both.identifiers == {"b"}


VISION = {"backend": "auto", "mean_std": "checkpoint", "once": False, "decode": "auto"}
RULE = {"spec": {"mean": [1.0], "std": [2.0]}, "config": VISION, "engine_token": "a"}
WITH_VISION = {"section": {"features": ["vision"], "vision": VISION}, "rule": RULE}


def with_vision(rule=None, features=("vision",), **settings):
    vision = VISION | settings
    section = {"features": list(features), "vision": vision, "kv": {"swa_share": 0.5}}
    return {"section": section, "rule": RULE | {"config": vision} | (rule or {})}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"model": "other"}),
        ({}, {"revision": "1"}),
        ({}, {"dtype": torch.float16}),
        ({}, {"quantization": "fp8"}),
        ({}, {"load_format": "dummy"}),
        ({}, {"device": "cuda"}),
        ({}, {"hf_overrides": {"vision_config": {"depth": 1}}}),
        ({}, {"media_io": {"video": {"num_frames": 4}}}),
        ({}, {"kwargs": {"max_pixels": 1024}}),
        ({}, WITH_VISION),
        (WITH_VISION, with_vision(mean_std="stock")),
        (WITH_VISION, with_vision(once=True)),
        (WITH_VISION, with_vision(backend="reference")),
        (WITH_VISION, with_vision({"spec": {"mean": [1.5], "std": [2.0]}})),
        (WITH_VISION, with_vision({"video_max_pixels": 9})),
        ({"name": "tenant a"}, {"name": "tenant b"}),
    ],
    ids=lambda given: "-".join(given) or "stock",
)
def test_engines_that_embed_differently_never_meet(one, other, make):
    first, second = make("WORKER", **one), make("WORKER", **other)
    assert first._cache.path != second._cache.path
    first.save_caches({"x": embedding(4)}, "x")
    scheduler = make("SCHEDULER", **other)
    assert step(scheduler, second, request(("x", 4)), {}) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {}),
        ({}, {"role": "ec_consumer"}),
        (WITH_VISION, with_vision({"engine_token": "b"})),
        (WITH_VISION, with_vision(decode="stock", decode_workers=3)),
        ({}, {"section": {"features": ["kv"], "kv": {"swa_share": 0.4}}}),
        (WITH_VISION, with_vision(features=("kv", "vision"))),
        ({}, {"media_io": {"mimo_plugin": {"token": "random"}}}),
        ({}, {"kwargs": {}}),
    ],
    ids=lambda given: "-".join(given) or "stock",
)
def test_what_makes_no_difference_to_embeddings_does_not_part_engines(one, other):
    names = {ec_key.cache_name(configuration(**given), "x") for given in (one, other)}
    assert len(names) == 1


def test_no_address_of_an_object_is_in_the_name():
    """Scheduler and worker are processes of their own and must meet."""

    def overrides():
        return lambda config: config

    both = overrides(), overrides()
    names = {ec_key.cache_name(configuration(hf_overrides=one), "x") for one in both}
    assert len(names) == 1


def test_a_model_without_media_has_a_cache_that_nobody_fills():
    vllm_config = configuration()
    vllm_config.model_config.multimodal_config = None
    assert ec_key.cache_name(vllm_config, "x").startswith("mimo-ec-")


def test_another_version_makes_other_embeddings(monkeypatch):
    before = ec_key.cache_name(configuration(), "x")
    monkeypatch.setattr(ec_key, "__version__", "9.9")
    assert ec_key.cache_name(configuration(), "x") != before


# -- counters --------------------------------------------------------------------------------


def counted(stats):
    return {(name, *labels): value for name, labels, value in stats.data["inc"]}


def lookups(scheduler):
    stats = scheduler.get_ec_connector_stats()
    return {key[1]: v for key, v in counted(stats).items() if key[0] == "encoder_cache_lookups"}


def test_look_ups_loads_and_stores_are_counted(make, monkeypatch):
    monkeypatch.setattr(ec_stats, "LOOK_EVERY_S", 0.0)
    scheduler, worker = make("SCHEDULER"), make("WORKER")
    outputs = {"x": embedding(10), "large": embedding(1 << 20)}
    for name in outputs:
        worker.save_caches(outputs, name)
    step(scheduler, worker, request(("x", 10), ("new", 3)), {})
    stats = scheduler.get_ec_connector_stats()
    size = 10 * 16 * 2
    assert counted(stats) == {
        ("encoder_cache_lookups", "hit"): 1,
        ("encoder_cache_lookups", "miss"): 1,
        ("encoder_cache_stores", "stored"): 1,
        ("encoder_cache_stores", "refused"): 1,
        ("encoder_cache_bytes", "written"): size,
        ("encoder_cache_bytes", "read"): size,
    }
    gauges = {name: value for name, _, value in stats.data["set"]}
    assert gauges == {"encoder_cache_used_bytes": size, "encoder_cache_entries": 1}
    assert counted(scheduler.get_ec_connector_stats()) == {}
    monkeypatch.setattr(ec_stats, "LOOK_EVERY_S", 1e9)
    scheduler.get_ec_connector_stats()
    assert scheduler.get_ec_connector_stats() is None
    assert worker.build_connector_worker_meta() is None


def test_the_workers_of_one_instance_add_up():
    one = ec_shared.Loaded({"a"}, {"stored": 1, "bytes_read": 5})
    both = one.aggregate(ec_shared.Loaded({"a"}, {"stored": 2}))
    assert both.counts == {"stored": 3, "bytes_read": 5}


def test_counters_reach_prometheus_and_the_log():
    prometheus = pytest.importorskip("prometheus_client")
    connector = ec_shared.MimoSharedECConnector
    report = ec_stats.SchedulerReport(SimpleNamespace(used_bytes=lambda: 64, entries=lambda: 2))
    report.looked_up("hit")
    sent = report.drain().data
    types = {getattr(prometheus, name): None for name in ("Gauge", "Counter", "Histogram")}
    vllm_config = SimpleNamespace(ec_transfer_config=None)
    exported = connector.build_prom_metrics(
        vllm_config, types, ["model_name", "engine"], {0: ["ec-test", "0"], 1: ["ec-test", "1"]}
    )
    exported.observe(sent, 1)

    def sample(name, **labels):
        return prometheus.REGISTRY.get_sample_value(
            f"mimo:encoder_cache_{name}", {"model_name": "ec-test", "engine": "1", **labels}
        )

    assert sample("lookups_total", outcome="hit") == 1
    assert (sample("entries"), sample("evictions_total")) == (2, 0)
    stats = connector.build_ec_connector_stats(sent)
    report.looked_up("hit")
    report.looked_up("miss")
    total = stats.aggregate(connector.build_ec_connector_stats(report.drain().data))
    assert total.reduce() == {"lookups_hit": 2, "lookups_miss": 1, "used_bytes": 64, "entries": 2}
    total.reset()
    assert total.is_empty()


# -- the switch ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [dict, lambda **given: ECTransferConfig(**given)])
def test_the_name_is_enough(kind):
    given = kind(ec_connector="MimoSharedECConnector", ec_role="ec_both")
    arguments = SimpleNamespace(ec_transfer_config=given)
    assert ec_switch.is_ours(given)
    register.prepare_parts(arguments, {})
    found = arguments.ec_transfer_config
    path = found["ec_connector_module_path"] if kind is dict else found.ec_connector_module_path
    assert path == ec_shared.__name__
    assert ec_switch.is_ours(found)
    register.prepare_parts(arguments, {})  # a second time


def test_other_connectors_are_left_alone():
    for given in (
        None,
        ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both"),
        {"ec_connector": "MimoSharedECConnector", "ec_connector_module_path": "theirs"},
    ):
        arguments = SimpleNamespace(ec_transfer_config=given)
        register.prepare_parts(arguments, {})
        assert arguments.ec_transfer_config is given


def test_a_vllm_that_lacks_something_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(register, "first_problem", lambda tag: f"{tag}: gone")
    given = {"ec_connector": "MimoSharedECConnector", "ec_role": "ec_both"}
    with pytest.raises(ContractError, match="ec_connector: found 'MimoShared.*encoder cache: gone"):
        register.prepare_parts(SimpleNamespace(ec_transfer_config=given), {})


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"capacity_mib": 0}, "capacity_mib: found 0; allowed: a whole number above 0"),
        ({"capacity_mib": "1"}, "capacity_mib: found '1'"),
        ({"max_entries": True}, "max_entries: found True"),
        ({"size": 3}, "size: found 3; allowed: one of capacity_mib, max_entries, name"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(extra, said):
    with pytest.raises(ConfigError, match=said):
        ec_shared.MimoSharedECConnector(configuration(**extra), ECConnectorRole.WORKER)
