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

from mimo_plugin.engines.vllm import ec_shared  # noqa: E402
from mimo_plugin.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.vllm


def configuration(role="ec_both", model="m", **extra):
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
    model_config = SimpleNamespace(
        model=model, revision=None, dtype=torch.bfloat16, quantization=None
    )
    load_config = SimpleNamespace(load_format="auto")
    return SimpleNamespace(
        ec_transfer_config=transfer, model_config=model_config, load_config=load_config
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
    """One engine step for one request; which of its items were taken from the cache."""
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
    assert scheduler._cache.counts.mismatches == 1
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


def test_other_checkpoints_have_other_caches(make):
    assert make("WORKER")._cache.path == make("SCHEDULER")._cache.path
    assert make("WORKER", model="other")._cache.path != make("WORKER")._cache.path


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
