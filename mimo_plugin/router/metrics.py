# SPDX-License-Identifier: Apache-2.0
"""What the router counts: ``mimo_router:*`` at ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

PREFIX = "mimo_router"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OUTCOMES = (
    "ok",  # answered, with whatever status the worker gave below 500
    "worker_error",  # the worker answered with 500 or more
    "refused",  # by the router: malformed, too large, unknown model, not allowed
    "overloaded",  # too many in flight
    "no_worker",  # none could take it
    "unstarted",  # no worker began to answer, after all retries
    "broken",  # the worker stopped within its answer
    "disconnected",  # the client went away
    "timeout",  # the client did not send it, or the worker did not answer it, in time
    "internal",  # the router failed
)
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_SMALL_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)

Values = Iterable[tuple[tuple[str, ...], float]]
"""Label values and value, of one gauge."""
Gauge = tuple[str, str, tuple[str, ...], Values]
"""Name, help, label names and values."""


class Metrics:
    """The counters of one router process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests, by what became of them.", ("outcome",))
        self.retries = self._counter("retries", "Requests sent again, to another worker.", ())
        self.decisions = self._counter("decisions", "Decisions, by reason.", ("reason",))
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Tokens of prompts that were routed.", ()
        )
        self.predicted = self._counter(
            "hit_tokens_predicted", "Tokens that the chosen workers were thought to have.", ()
        )
        self.actual = self._counter(
            "hit_tokens_actual", "Tokens that workers say they had, where they say it.", ()
        )
        self.compared_prompts = self._counter(
            "prompt_tokens_reported", "Prompt tokens of the answers that told their hit.", ()
        )
        self.ttft = self._histogram(
            "ttft_seconds", "From the request to the first byte of a streamed answer.", _TTFT_S
        )
        self.decision_s = self._histogram(
            "decision_seconds", "Look-up and choice, CPU time of one decision.", _SMALL_S
        )
        self.tokenise_s = self._histogram(
            "tokenise_seconds", "From a request's body to its block hashes.", _SMALL_S
        )
        self._outcomes = {name: self.requests.labels(name) for name in OUTCOMES}

    def outcome(self, name: str) -> None:
        """Count a request."""
        self._outcomes[name].inc()

    def expose(self, gauges: Callable[[], Iterable[Gauge]]) -> None:
        """Have gauges that are read when somebody asks."""
        self.registry.register(_Gauges(gauges))

    def text(self) -> bytes:
        """All of it, in Prometheus' text form."""
        return bytes(generate_latest(self.registry))

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Any:
        return Counter(f"{PREFIX}:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        return Histogram(f"{PREFIX}:{name}", text, buckets=buckets, registry=self.registry)


class _Gauges:
    """Values that are only looked up for a scrape, and the process' CPU time."""

    def __init__(self, gauges: Callable[[], Iterable[Gauge]]) -> None:
        self._gauges = gauges

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterable[Any]:
        for name, text, labels, values in self._gauges():
            gauge = GaugeMetricFamily(f"{PREFIX}:{name}", text, labels=labels)
            for label_values, value in values:
                gauge.add_metric(label_values, value)
            yield gauge
        cpu = CounterMetricFamily(f"{PREFIX}:cpu_seconds", "CPU time of the router's process.")
        cpu.add_metric((), time.process_time())
        yield cpu


def flat(status: Mapping[str, Any]) -> dict[str, float]:
    """The numbers and flags of a status, nested ones left out."""
    return {
        key: float(value) for key, value in status.items() if isinstance(value, (bool, int, float))
    }
