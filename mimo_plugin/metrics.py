# SPDX-License-Identifier: Apache-2.0
"""Metric names, their labels, and the buffer that carries values between processes.

The scheduler's process counts into a ``MetricsBuffer`` and drains it once per step; the API
process applies the drained payload to Prometheus. This module knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PREFIX = "mimo:"
"""Prefix of every exported metric name."""

PAYLOAD_VERSION = 1
MAX_OBSERVATIONS = 65_536
"""Observations one histogram series may hold undrained; further ones count as dropped."""

CLASS_LABELS = ("turn_end", "boundary", "junction", "prompt_end", "tail", "ladder", "none")
TRIM_REASONS = (
    "no_checkpoint",
    "checkpoint_evicted",
    "below_block",
    "diverged",
    "draft_lookahead",
)
BLOCK_KINDS = ("full", "swa")
ADMISSION_REASONS = ("arrival", "affinity", "priority", "max_wait", "preempted")
DEFERRAL_REASONS = ("duplicate", "lane")
DRAFT_POSITIONS = tuple(map(str, range(8)))
"""Position of a token in its draft, from 0; the last one holds all later ones too."""
OUTPUT_BINS = ("0-127", "128-255", "256+")
"""Index of a token in the output of its request."""
DRAFT_LENGTHS = tuple(map(str, range(9)))
WASTE_REASONS = ("rejected", "unverified")
MEDIA_KINDS = ("image", "video")
PIXEL_FORMS = ("pixels", "rows")
VIDEO_FRAMES = ("file", "decoded", "taken", "dropped")
VIDEO_REFUSALS = ("input", "busy")
PIXEL_BACKENDS = ("triton", "cpu", "reference")
POOL_LANES = ("short", "long")
JOB_OUTCOMES = ("done", "failed", "timeout", "crashed", "refused")
LOOKUP_OUTCOMES = ("hit", "miss", "mismatch")
STORE_OUTCOMES = ("stored", "refused")
DIRECTIONS = ("read", "written")
TIER_MISSES = ("absent", "no_window", "host_capacity")
TIER_KINDS = ("full", "swa", "draft", "other")
TIER_PAGES = ("written", "read", "touched", "missed", "damaged", "dropped", "evicted", "repaired")
AFFINITY_OUTCOMES = ("new", "stayed", "moved", "other")

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: without prefix; Prometheus appends ``_total`` to counters.
        kind: counter, gauge or histogram.
        help: what an operator reads.
        labels: label name to its allowed values; an empty tuple allows any string.
        buckets: upper bounds of a histogram, ascending.
        per_process: a gauge of each API process; several of them add up.
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...]]
    buckets: tuple[float, ...] = ()
    per_process: bool = False


def _spec(
    kind: Kind,
    name: str,
    text: str,
    labels: Mapping[str, tuple[str, ...]] | None = None,
    **more: Any,
) -> MetricSpec:
    return MetricSpec(name=name, kind=kind, help=text, labels=labels or {}, **more)


_CLS = {"cls": CLASS_LABELS}
_KIND = {"kind": BLOCK_KINDS}
_OUTPUT = {"output": OUTPUT_BINS}
_MEDIA = {"kind": MEDIA_KINDS, "form": PIXEL_FORMS}
_BACKEND = {"backend": PIXEL_BACKENDS}
_LANE = {"lane": POOL_LANES}
_DRAFT = {"position": DRAFT_POSITIONS, **_OUTPUT}

METRICS: tuple[MetricSpec, ...] = (
    _spec(
        "counter",
        "full_hit_tokens",
        "Prompt tokens whose full-attention KV was cached, before the window rule.",
    ),
    _spec(
        "counter",
        "window_safe_hit_tokens",
        "Prompt tokens that were really reused: full KV and the window before the hit present.",
    ),
    _spec("counter", "prompt_lookup_tokens", "Prompt tokens of the requests that were looked up."),
    _spec(
        "counter",
        "trimmed_tokens",
        "Prompt tokens with cached full-attention KV that could not be reused, by reason.",
        {"reason": TRIM_REASONS},
    ),
    _spec(
        "counter",
        "evicted_blocks",
        "Cached blocks given up for new ones, by kind and checkpoint class.",
        {**_KIND, **_CLS},
    ),
    _spec("counter", "checkpoints_created", "Checkpoints kept, by class.", _CLS),
    _spec(
        "counter",
        "checkpoints_refused",
        "Checkpoints not kept because a share limit left no room, by class.",
        _CLS,
    ),
    _spec("counter", "deduplicated_blocks", "Blocks dropped because an equal one was cached."),
    _spec(
        "counter",
        "lookups",
        "Prefix look-ups, in full or answered from the memo of a waiting request.",
        {"kind": ("full", "memo")},
    ),
    _spec(
        "counter",
        "scheduler_admissions",
        "Requests started, by reason: first in order of arrival, moved ahead by the affinity order "
        "or by priority, overdue (max_wait), or resumed after a preemption.",
        {"reason": ADMISSION_REASONS},
    ),
    _spec(
        "counter",
        "scheduler_deferrals",
        "Requests held back though they were next: a leader computes what they miss, or their "
        "lane is full.",
        {"reason": DEFERRAL_REASONS},
    ),
    _spec(
        "counter",
        "scheduler_guard_steps",
        "Steps in which others were held back for an overdue request that did not fit yet.",
    ),
    _spec(
        "counter",
        "mtp_draft_rounds",
        "Drafts that were verified, by index of their first token in the request's output.",
        _OUTPUT,
    ),
    _spec(
        "counter",
        "mtp_drafted_tokens",
        "Drafted tokens, by position in the draft and output index.",
        _DRAFT,
    ),
    _spec(
        "counter",
        "mtp_checked_tokens",
        "Drafted tokens whose predecessors in the draft were all accepted.",
        _DRAFT,
    ),
    _spec("counter", "mtp_accepted_tokens", "Drafted tokens that were accepted.", _DRAFT),
    _spec(
        "counter",
        "mtp_wasted_drafts",
        "Drafted tokens that were rejected, or never verified because the request ended, was "
        "preempted, or its grammar refused them.",
        {"reason": WASTE_REASONS},
    ),
    _spec(
        "counter",
        "mtp_draft_length",
        "Tokens drafted for a request after a step, by length of the draft.",
        {"length": DRAFT_LENGTHS},
    ),
    _spec(
        "counter",
        "mtp_self_check_failures",
        "Warnings that no drafted token was ever accepted.",
    ),
    _spec(
        "counter",
        "mtp_handovers",
        "Requests whose KV came from another engine, by whether all rows of the MTP layers are "
        "exact.",
        {"complete": ("yes", "no")},
    ),
    _spec(
        "counter",
        "mtp_handover_repeated_tokens",
        "Loaded tokens that were computed again to make the MTP layers' rows exact.",
    ),
    _spec(
        "counter",
        "vision_items",
        "Images and videos handed to the model's process, as pixels or, resized before, as patch "
        "rows; one that the processor's cache holds counts once.",
        _MEDIA,
    ),
    _spec("counter", "vision_bytes", "Bytes of those images and videos.", _MEDIA),
    _spec(
        "counter",
        "vision_refused",
        "Requests refused because an image or video can't be served.",
        {"kind": MEDIA_KINDS},
    ),
    _spec(
        "counter",
        "vision_host_seconds",
        "Time that the API process spent on pixels after decoding.",
    ),
    _spec(
        "counter",
        "vision_kernel_passes",
        "Kernel passes that made patch rows beside the model, one for each encoder batch.",
        _BACKEND,
    ),
    _spec(
        "counter",
        "vision_kernel_items",
        "Images and videos in those passes.",
        _BACKEND,
    ),
    _spec(
        "counter",
        "vision_kernel_seconds",
        "Host time of those passes; on a GPU that of the launch.",
        _BACKEND,
    ),
    _spec(
        "counter",
        "vision_encode_seconds",
        "Host time of the vision tower behind them; on a GPU that of the launches.",
        _BACKEND,
    ),
    _spec(
        "counter",
        "video_files",
        "Videos read, whose frames travel as pixels or, resized by the loader, as patch rows.",
        {"form": PIXEL_FORMS},
    ),
    _spec("counter", "video_bytes", "Bytes of the frames taken.", {"form": PIXEL_FORMS}),
    _spec(
        "counter",
        "video_frames",
        "Frames of the videos read: all in the files, those that decoders made, those taken, and "
        "those that were to be taken but could not be decoded.",
        {"what": VIDEO_FRAMES},
    ),
    _spec("counter", "video_decode_seconds", "Time that the pool worked on videos."),
    _spec(
        "counter",
        "video_wait_seconds",
        "Time that videos waited for the pool, and their frames for the way back.",
    ),
    _spec(
        "counter",
        "video_refused",
        "Videos refused: their input can't be served, or the pool had no place or memory.",
        {"reason": VIDEO_REFUSALS},
    ),
    _spec(
        "counter",
        "media_jobs",
        "Pictures and clips given to the decoding pool, by how that ended.",
        {**_LANE, "outcome": JOB_OUTCOMES},
    ),
    _spec("counter", "media_wait_seconds", "Time that they waited for a worker.", _LANE),
    _spec("counter", "media_run_seconds", "Time that workers took for those done.", _LANE),
    _spec("counter", "media_workers_started", "Decoding processes started.", _LANE),
    _spec(
        "counter",
        "encoder_cache_lookups",
        "Items looked up in the shared embedding cache; a mismatch has another length.",
        {"outcome": LOOKUP_OUTCOMES},
    ),
    _spec(
        "counter",
        "encoder_cache_stores",
        "Embeddings put into the shared cache, or refused for want of room.",
        {"outcome": STORE_OUTCOMES},
    ),
    _spec("counter", "encoder_cache_evictions", "Embeddings given up for new ones."),
    _spec("counter", "encoder_cache_recovered", "Rooms taken back from writers that died."),
    _spec(
        "counter",
        "encoder_cache_bytes",
        "Bytes of embeddings that went through the shared cache.",
        {"direction": DIRECTIONS},
    ),
    _spec(
        "counter",
        "tier_hit_tokens",
        "Tokens that look-ups found in the store with all that a hit needs.",
    ),
    _spec(
        "counter",
        "tier_missed_tokens",
        "Tokens that look-ups did not find, found without the window at their end, or for which "
        "host memory had no room.",
        {"reason": TIER_MISSES},
    ),
    _spec(
        "counter",
        "tier_bytes",
        "Bytes that went to and from the store, by kind of layers.",
        {"direction": DIRECTIONS, "kind": TIER_KINDS},
    ),
    _spec(
        "counter",
        "tier_pages",
        "Pages of the store: written, read, kept alive, asked for and missing, damaged, not "
        "written for want of room or by a failure, given up for others, and, of those written, "
        "found missing while a higher tier had them.",
        {"what": TIER_PAGES},
    ),
    _spec(
        "counter",
        "tier_host_hit_tokens",
        "Tokens that look-ups found in host memory with all that a hit needs.",
    ),
    _spec(
        "counter",
        "tier_host_bytes",
        "Bytes that went between the device and host memory, by kind of layers.",
        {"direction": DIRECTIONS, "kind": TIER_KINDS},
    ),
    _spec(
        "counter",
        "tier_adopted_bytes",
        "Bytes of hits from lower tiers that were not read, because the device still had them.",
        {"kind": TIER_KINDS},
    ),
    _spec(
        "counter",
        "tier_failed_calls",
        "Calls to stores of which no answer came in time, or an error.",
    ),
    _spec(
        "counter",
        "dp_affinity_requests",
        "Requests by data-parallel rank, and why they went there: the first of a chat in that API "
        "process, at the chat's rank, elsewhere because that rank was loaded, or by vLLM's own "
        "choice.",
        {"outcome": AFFINITY_OUTCOMES, "rank": ()},
    ),
    _spec("counter", "metrics_dropped", "Observations lost because nobody collected them."),
    _spec(
        "gauge",
        "cached_blocks",
        "Blocks that hold cached KV now, by kind and checkpoint class.",
        {**_KIND, **_CLS},
    ),
    _spec("gauge", "pool_blocks", "Blocks in the KV cache pool."),
    _spec("gauge", "swa_share", "Largest share of the pool for cached sliding-window blocks."),
    _spec("gauge", "waiting_uncached_tokens", "Tokens that the waiting requests have to compute."),
    _spec("gauge", "scheduler_parked_requests", "Waiting requests that wait for a leader."),
    _spec("gauge", "prefill_tokens_per_s", "Measured prefill speed without context."),
    _spec(
        "gauge",
        "attention_parity_tokens",
        "Context length at which full attention costs a token as much as all else.",
    ),
    _spec("gauge", "media_workers", "Decoding processes now.", _LANE, per_process=True),
    _spec("gauge", "media_queued_jobs", "Jobs waiting for one now.", _LANE, per_process=True),
    _spec("gauge", "media_running_jobs", "Jobs being decoded now.", _LANE, per_process=True),
    _spec(
        "gauge",
        "media_result_bytes",
        "Shared memory of decoded media that are still in use.",
        _LANE,
        per_process=True,
    ),
    _spec("gauge", "encoder_cache_used_bytes", "Bytes held in the node's shared embedding cache."),
    _spec("gauge", "encoder_cache_entries", "Embeddings held there."),
    _spec("gauge", "tier_held_bytes", "Bytes that the store holds, of all who share it."),
    _spec("gauge", "tier_stores_down", "Stores left alone now, because calls to them failed."),
    _spec("gauge", "degraded", "1 when the plugin was asked for and the engine runs without it."),
    _spec(
        "gauge",
        "info",
        "Always 1; the labels say what is active.",
        {"version": (), "engine_version": (), "features": ()},
    ),
    _spec(
        "histogram",
        "hit_length_tokens",
        "Length of the reused prefix per looked-up request.",
        buckets=(0.0, *(float(2**exponent) for exponent in range(6, 21))),
    ),
    _spec(
        "histogram",
        "queue_wait_s",
        "Time from arrival in the queue to the first step, by lane: the number of uncached tokens "
        "that its requests exceed.",
        {"lane": ()},
        buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 600),
    ),
    _spec(
        "histogram",
        "residence_s",
        "Time a cached sliding-window block had lived when it was evicted, by class.",
        _CLS,
        buckets=(0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 14400, 86400),
    ),
)

SPECS: dict[str, MetricSpec] = {spec.name: spec for spec in METRICS}

_Key = tuple[str, tuple[str, ...]]


class MetricsBuffer:
    """Values since the last ``drain``. Not thread-safe: one scheduler owns it.

    A name or label that ``METRICS`` does not have is our bug and fails an assertion.
    """

    __slots__ = ("_inc", "_obs", "_set")

    def __init__(self) -> None:
        self._inc: dict[_Key, float] = {}
        self._set: dict[_Key, float] = {}
        self._obs: dict[_Key, list[float]] = {}

    def inc(self, name: str, value: float = 1, **labels: str) -> None:
        """Add ``value`` >= 0 to a counter."""
        assert value >= 0, f"counter {name} can't go down by {value}"
        key = _key("counter", name, labels)
        self._inc[key] = self._inc.get(key, 0) + value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; the last value before a drain wins."""
        self._set[_key("gauge", name, labels)] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        values = self._obs.setdefault(_key("histogram", name, labels), [])
        if len(values) < MAX_OBSERVATIONS:
            values.append(value)
        else:
            self.inc("metrics_dropped")

    def drain(self) -> dict[str, Any] | None:
        """Hand over and forget everything collected; None when there is nothing.

        The payload holds only lists, strings and numbers (JSON and msgpack take it)::

            {"v": 1, "inc": [[name, [label values in spec order], value], ...],
             "set": [[name, [label values], value], ...],
             "obs": [[name, [label values], [value, ...]], ...]}
        """
        if not (self._inc or self._set or self._obs):
            return None
        payload: dict[str, Any] = {
            "v": PAYLOAD_VERSION,
            "inc": [[name, list(labels), value] for (name, labels), value in self._inc.items()],
            "set": [[name, list(labels), value] for (name, labels), value in self._set.items()],
            "obs": [[name, list(labels), values] for (name, labels), values in self._obs.items()],
        }
        self._inc, self._set, self._obs = {}, {}, {}
        return payload


def merge_payloads(*payloads: dict[str, Any] | None) -> dict[str, Any] | None:
    """One payload of several buffers' drains; None when all are."""
    given = [payload for payload in payloads if payload is not None]
    if len(given) < 2:
        return given[0] if given else None
    merged: dict[str, Any] = {"v": PAYLOAD_VERSION}
    for part in ("inc", "set", "obs"):
        merged[part] = [row for payload in given for row in payload[part]]
    return merged


def _key(kind: Kind, name: str, labels: Mapping[str, str]) -> _Key:
    spec = SPECS.get(name)
    assert spec is not None and spec.kind == kind, f"no {kind} named {name!r}"
    assert labels.keys() == spec.labels.keys(), (
        f"{name}: labels {sorted(labels)} given, {sorted(spec.labels)} declared"
    )
    values = []
    for label, allowed in spec.labels.items():
        value = labels[label]
        assert not allowed or value in allowed, f"{name}: {label}={value!r} not in {allowed}"
        values.append(value)
    return name, tuple(values)
