# SPDX-License-Identifier: Apache-2.0
"""Metric table, buffer and Prometheus sink (no engine)."""

import json

import pytest

from mimo_plugin import metrics
from mimo_plugin.config import CHECKPOINT_CLASSES
from mimo_plugin.engines.vllm import metrics as transport


def test_table_is_sound():
    assert len(metrics.SPECS) == len(metrics.METRICS)
    for spec in metrics.METRICS:
        assert spec.help.endswith(".")
        assert bool(spec.buckets) == (spec.kind == "histogram")
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert not {"model_name", "engine", "le"} & set(spec.labels)
    assert (*CHECKPOINT_CLASSES, "none") == metrics.CLASS_LABELS
    buckets = metrics.SPECS["hit_length_tokens"].buckets
    assert buckets[:2] == (0, 64) and buckets[-1] == 2**20 and len(buckets) == 16


def test_drain_collects_and_forgets():
    buffer = metrics.MetricsBuffer()
    assert buffer.drain() is None
    buffer.inc("full_hit_tokens", 100)
    buffer.inc("full_hit_tokens")
    buffer.inc("trimmed_tokens", 5, reason="diverged")
    buffer.set("cached_blocks", 3, kind="swa", cls="tail")
    buffer.set("cached_blocks", 4, kind="swa", cls="tail")
    buffer.observe("hit_length_tokens", 64)
    buffer.observe("hit_length_tokens", 0)
    payload = buffer.drain()
    assert (
        json.loads(json.dumps(payload))
        == payload
        == {
            "v": 1,
            "inc": [["full_hit_tokens", [], 101], ["trimmed_tokens", ["diverged"], 5]],
            "set": [["cached_blocks", ["swa", "tail"], 4]],
            "obs": [["hit_length_tokens", [], [64, 0]]],
        }
    )
    assert buffer.drain() is None


def test_labels_follow_the_declared_order():
    buffer = metrics.MetricsBuffer()
    buffer.inc("evicted_blocks", cls="none", kind="full")
    assert buffer.drain()["inc"] == [["evicted_blocks", ["full", "none"], 1]]


def test_undrained_observations_are_bounded(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_OBSERVATIONS", 3)
    buffer = metrics.MetricsBuffer()
    for value in range(5):
        buffer.observe("hit_length_tokens", value)
    payload = buffer.drain()
    assert payload["obs"] == [["hit_length_tokens", [], [0, 1, 2]]]
    assert payload["inc"] == [["metrics_dropped", [], 2]]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda b: b.inc("nonsense"),
        lambda b: b.inc("pool_blocks"),
        lambda b: b.inc("full_hit_tokens", -1),
        lambda b: b.inc("trimmed_tokens"),
        lambda b: b.inc("trimmed_tokens", reason="bad luck"),
        lambda b: b.set("pool_blocks", 1, kind="full"),
        lambda b: b.observe("full_hit_tokens", 1),
    ],
)
def test_our_own_misuse_fails(misuse):
    with pytest.raises(AssertionError):
        misuse(metrics.MetricsBuffer())


class Stats:
    def __init__(self, kv_connector_stats):
        self.kv_connector_stats = kv_connector_stats


def test_payload_is_taken_and_a_connectors_entries_stay():
    alone = Stats({"mimo": {"v": 1}})
    assert transport.take_payload(alone) == {"v": 1}
    assert alone.kv_connector_stats is None
    beside = Stats({"mimo": {"v": 1}, "transfers": 3})
    assert transport.take_payload(beside) == {"v": 1}
    assert beside.kv_connector_stats == {"transfers": 3}
    for untouched in (Stats(None), Stats({"transfers": 3}), None):
        assert transport.take_payload(untouched) is None


def test_sink_applies_payloads_per_engine():
    prometheus = pytest.importorskip("prometheus_client")

    def sample(name, **labels):
        return prometheus.REGISTRY.get_sample_value(name, {"model_name": "sink-test", **labels})

    sink = transport.PrometheusSink("sink-test", [0, 1])
    assert sample("mimo:full_hit_tokens_total", engine="1") == 0
    buffer = metrics.MetricsBuffer()
    buffer.inc("full_hit_tokens", 128)
    buffer.inc("trimmed_tokens", 7, reason="below_block")
    buffer.set("pool_blocks", 500)
    buffer.observe("hit_length_tokens", 100)
    buffer.observe("residence_s", 3, cls="ladder")
    payload = buffer.drain()
    sink.apply(payload, 1)
    # A second engine in one process re-uses the collectors and keeps counting.
    transport.PrometheusSink("sink-test", [0]).apply(payload, 1)
    assert sample("mimo:full_hit_tokens_total", engine="1") == 256
    assert sample("mimo:full_hit_tokens_total", engine="0") == 0
    assert sample("mimo:trimmed_tokens_total", engine="1", reason="below_block") == 14
    assert sample("mimo:pool_blocks", engine="1") == 500
    assert sample("mimo:hit_length_tokens_bucket", engine="1", le="64.0") == 0
    assert sample("mimo:hit_length_tokens_bucket", engine="1", le="128.0") == 2
    assert sample("mimo:residence_s_sum", engine="1", cls="ladder") == 6


def test_sink_skips_what_another_version_sends(caplog):
    pytest.importorskip("prometheus_client")
    sink = transport.PrometheusSink("sink-skip", [0])
    sink.apply({"v": 99, "inc": [["full_hit_tokens", [], 1]]}, 0)
    sink.apply({"v": 1, "inc": [["future_metric", ["x"], 1]]}, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
