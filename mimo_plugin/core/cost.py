# SPDX-License-Identifier: Apache-2.0
"""What a prefill costs, from a model's ``config.json`` and from measured step times.

The unit is the *equivalent token*: the compute of one prefill token without any full-attention
context.  A token's full attention grows with the keys before it; ``parity_tokens`` is the number of
attended keys at which it costs as much as all the rest of the token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from mimo_plugin.core.geometry import (
    GeometryError,
    LayerKv,
    _natural,
    _positive,
    _text_config,
    read_geometry,
)

_LOCAL = ("sliding", "local", "chunked")  # in the name of a layer that sees only near keys

DEFAULT_PARITY_TOKENS = 32_768.0
"""Parity of a model whose configuration tells nothing: the middle, on a logarithmic scale, between
MoE models with full attention everywhere (7,000) and dense hybrid ones (300,000)."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Compute of a prefill in equivalent tokens.

    Attributes:
        parity_tokens: attended keys at which one token's full attention costs as much as the rest
            of it; ``inf`` for a model without full attention.

    Raises:
        ValueError: ``parity_tokens`` is not above zero.
    """

    parity_tokens: float

    def __post_init__(self) -> None:
        if not self.parity_tokens > 0:  # also refuses NaN
            raise ValueError(f"parity_tokens: found {self.parity_tokens!r}; allowed: a number > 0")

    @staticmethod
    def attention_tokens(cached_tokens: float, uncached_tokens: float) -> float:
        """Pairs of a new token and a key it attends: each new token sees all that lie before it."""
        return uncached_tokens * (cached_tokens + uncached_tokens / 2)

    def cost(self, cached_tokens: float, uncached_tokens: float) -> float:
        """Equivalent tokens to prefill ``uncached_tokens`` behind ``cached_tokens``.

        Chunks add up: the cost of a prompt is that of its first part and of the rest behind it.
        """
        pairs = uncached_tokens * (cached_tokens + uncached_tokens / 2)
        return uncached_tokens + pairs / self.parity_tokens


def parity_tokens(config: Mapping[str, Any]) -> float:
    """Parity of the language model that ``config`` (a parsed ``config.json``) describes.

    Counts floating-point operations: 2 per active parameter (projections, dense MLPs, the experts
    that a token visits, shared experts, routers; three matrices per MLP) and sliding-window
    attention over a full window, against full attention per key.  Left out, as they add a few
    percent at most: embeddings and the output head (a prefill needs one row of logits), norms,
    biases, draft layers.  Estimates only: latent attention is counted in its expanded form, layers
    with a recurrent state as the projections of an attention layer.

    Returns:
        Attended keys; ``inf`` when no layer has full attention.

    Raises:
        GeometryError: a key is missing or has a value that makes no sense.
    """
    linear, per_key = _prefill_flops(_text_config(config))
    return linear / per_key if per_key else math.inf


def parity_tokens_or_default(config: Mapping[str, Any]) -> tuple[float, bool]:
    """Parity of the model, or ``DEFAULT_PARITY_TOKENS`` when its configuration can't be understood.

    Returns:
        The parity in tokens, and True when it was derived from ``config``.  Never raises.
    """
    try:
        return parity_tokens(config), True
    except Exception:  # configurations are free-form; a wrong guess must not stop an engine
        return DEFAULT_PARITY_TOKENS, False


def _prefill_flops(text: Mapping[str, Any]) -> tuple[float, float]:
    """Operations per token that don't depend on its position, and per attended key."""
    layers = _attention_layers(text)
    full_heads = _positive(text, "num_attention_heads")
    swa_heads = _positive(text, "swa_num_attention_heads", full_heads)
    count = len(layers)
    owning_kv = count - _natural(text, "num_kv_shared_layers")
    keyless, sparse = _keyless_layers(text, count), _sparse_layers(text, count)
    selected_keys = _natural(text, "index_topk") if text.get("kv_lora_rank") else 0
    linear = per_key = 0.0
    for index, layer in enumerate(layers):
        heads = swa_heads if layer.kind == "swa" else full_heads
        linear += 2 * _projections(text, layer, heads, owns_kv=index < owning_kv)
        linear += 2 * _mlp(text, index, index in sparse)
        pair = 2 * heads * (layer.k_dim + layer.v_dim)
        if index in keyless:
            continue
        if layer.window_tokens is not None:
            linear += pair * layer.window_tokens
        elif selected_keys:  # DeepSeek's sparse attention: a cheap indexer sees all the keys
            linear += pair * selected_keys
            per_key += 2 * _positive(text, "index_n_heads") * _positive(text, "index_head_dim")
        else:
            per_key += pair
    return linear, per_key


def _attention_layers(text: Mapping[str, Any]) -> tuple[LayerKv, ...]:
    """One entry for each hidden layer, also where the KV geometry names none."""
    plain = dict(text)
    plain["num_kv_shared_layers"] = None  # such layers attend all the same
    if text.get("kv_lora_rank"):
        plain["kv_lora_rank"] = None
        plain["num_key_value_heads"] = text.get("num_attention_heads")
        plain["head_dim"] = _positive(text, "qk_nope_head_dim") + _natural(text, "qk_rope_head_dim")
    names = text.get("layer_types")
    if names is not None:
        local = [any(word in str(name) for word in _LOCAL) for name in names]
        plain["layer_types"] = ["sliding_attention" if a else "full_attention" for a in local]
        if "chunked_attention" in names and not text.get("sliding_window"):
            # A chunk's tokens see half of it on average.
            plain["sliding_window"] = max(1, _positive(text, "attention_chunk_size") // 2)
    return read_geometry(plain).layers


def _keyless_layers(text: Mapping[str, Any], count: int) -> frozenset[int]:
    """Layers that attend to no keys: recurrent states, convolutions and the like."""
    names = text.get("layer_types") or text.get("layers_block_type")
    words = ("attention", "global", *_LOCAL)
    letters, numbers = text.get("hybrid_override_pattern"), text.get("attn_type_list")
    listed = (text.get("linear_attn_config") or {}).get("full_attn_layers")  # counted from 1
    period = _natural(text, "full_attention_interval")
    offset = period - 1
    if text.get("attn_layer_period"):
        period, offset = _positive(text, "attn_layer_period"), _natural(text, "attn_layer_offset")
    attending = [not period or index % period == offset for index in range(count)]
    if names:
        attending = ["linear" not in n and any(word in n for word in words) for n in names]
    elif letters:
        attending = [letter == "*" for letter in letters]
    elif numbers:
        attending = [number == 1 for number in numbers]
    elif listed:
        attending = [index + 1 in listed for index in range(count)]
    return frozenset(index for index, attends in enumerate(attending[:count]) if not attends)


def _projections(text: Mapping[str, Any], layer: LayerKv, heads: int, *, owns_kv: bool) -> int:
    """Parameters of a layer's attention projections."""
    hidden, width = _positive(text, "hidden_size"), heads * layer.k_dim
    latent, rope = _natural(text, "kv_lora_rank"), _natural(text, "qk_rope_head_dim")
    q_rank = _natural(text, "q_lora_rank")
    query = q_rank * (hidden + width) if q_rank else hidden * width
    if latent:
        kv = hidden * (latent + rope) + latent * heads * (layer.k_dim - rope + layer.v_dim)
    else:
        kv = hidden * layer.kv_heads * (layer.k_dim + layer.v_dim) if owns_kv else 0
    return query + kv + heads * layer.v_dim * hidden


_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SPARSE_STEP = ("decoder_sparse_step", "interleave_moe_layer_step")


def _first(text: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The first of the keys that has a value; 0 when none has."""
    return next((_positive(text, key) for key in keys if text.get(key)), 0)


def _sparse_layers(text: Mapping[str, Any], count: int) -> frozenset[int]:
    """Layers whose MLP is a mixture of experts."""
    if not _first(text, _EXPERTS):
        return frozenset()
    every = text.get("moe_layer_freq")
    listed = text.get("mlp_layer_types") if every is None or isinstance(every, int) else every
    if listed is not None:
        if len(listed) < count:
            raise GeometryError(f"moe layers: found {len(listed)} entries; allowed: {count}")
        return frozenset(index for index in range(count) if listed[index] not in (0, "dense"))
    step = _first(text, _SPARSE_STEP) or 1
    dense = set(text.get("mlp_only_layers") or ())
    return frozenset(
        index
        for index in range(_natural(text, "first_k_dense_replace"), count)
        if index % (every or 1) == 0 and (index + 1) % step == 0 and index not in dense
    )


def _mlp(text: Mapping[str, Any], index: int, sparse: bool) -> int:
    """Parameters of a layer's MLP that one token visits."""
    matrices = 3 * _positive(text, "hidden_size")
    if not sparse:
        return matrices * _dense_width(text, index)
    width = _first(text, ("moe_intermediate_size", "intermediate_size"))
    active = _first(text, _ACTIVE)
    if not width or not active:
        raise GeometryError("experts: found no size or no number per token; allowed: both > 0")
    shared = _natural(text, "shared_expert_intermediate_size") or width * _first(text, _SHARED)
    if text.get("enable_moe_block"):  # Gemma 4: a dense MLP beside the experts
        shared += _dense_width(text, index)
    router = _positive(text, "hidden_size") * _first(text, _EXPERTS)
    return matrices * (active * width + shared) + router


def _dense_width(text: Mapping[str, Any], index: int) -> int:
    width = text.get("intermediate_size_mlp") or text.get("intermediate_size")
    if isinstance(width, (list, tuple)):
        width = width[index]
    return _positive({"intermediate_size": width}, "intermediate_size")


_START_STEPS, _START_ROUNDS = 32, 5  # fitted together, so that slow first steps stand out
_MEMORY_STEPS = 512  # a step's weight falls to 1/e after so many later ones
_CLIP = 4.0  # an error counts up to so many standard deviations
_MIN_NOISE = 0.03  # relative; below it, the model's own misfit is what is left
_NOISE_STEPS = 50
_PRIOR_SPREAD = 0.5  # standard deviation of attention's cost around the geometry's, relative to it
_FIXED_SPREAD = 0.5  # the same of the fixed time around zero, relative to a typical step
_BOUND = 4.0  # the measured parity stays within this factor of the prior
_MIN_SECONDS, _MAX_SECONDS = 1e-6, 3600.0
_MAX_CONTEXT_TOKENS = 1e9


class StepTimes:
    """Parity and speed of an engine, learnt from its step times.

    Fits ``seconds = fixed + per_token * tokens + per_attention * attention_tokens`` to relative
    errors, forgetting old steps exponentially; no coefficient falls below zero.  The prior says
    that the geometry's parity holds, and is as strong as the noise of the steps makes it: steps
    that say nothing about attention leave the parity where it was.  An error far outside the usual
    ones is cut to the edge of them; a lasting change is followed within some hundreds of steps.

    Feed it steps that are mostly prefill: decoding is bound by memory and its attention costs
    something else.  One observation takes constant time, some microseconds.
    """

    def __init__(self, prior_parity_tokens: float) -> None:
        """Start from a parity in tokens (> 0, may be ``inf``), else raise ValueError."""
        self._prior = PrefillCost(prior_parity_tokens).parity_tokens
        self._observed = 0
        self._start: list[tuple[float, float, float]] | None = []
        self._noise = 10 * _MIN_NOISE
        self._fixed = self._linear = self._attention = 0.0
        self._count = 0.0  # sum of the steps' weights, forgetting included
        # Sums of 1, t, z, t*t, t*z, z*z and of s, s*t, s*z, each also weighted by 1/expected**2.
        self._sums, self._right = [0.0] * 6, [0.0] * 3

    @property
    def num_observed(self) -> int:
        """Steps that were used, those left out for their values not counted."""
        return self._observed

    @property
    def parity_tokens(self) -> float:
        """The measured parity, within a factor of 4 of the prior; the prior until 32 steps."""
        return self._prior * self._parity_ratio()

    @property
    def tokens_per_s(self) -> float | None:
        """Equivalent tokens per second, without the steps' fixed time.

        None until 32 steps, and while steps take equally long whatever is in them.
        """
        if self._start is not None:
            return None
        weight, attention_weight = self._sums[1], self._sums[2]
        seconds = self._linear * weight + self._attention * attention_weight
        tokens = weight + attention_weight / self._parity_ratio()
        return tokens / seconds if seconds > 0 else None

    def observe(self, tokens: int, attention_tokens: float, seconds: float) -> None:
        """Learn from one step.

        Args:
            tokens: tokens computed in the step.
            attention_tokens: sum of ``PrefillCost.attention_tokens`` over the step's requests.
            seconds: how long the step took.

        A step without tokens, one below a microsecond or above an hour, and values that are no
        finite numbers are ignored.
        """
        if not (tokens > 0 and 0 <= attention_tokens <= tokens * _MAX_CONTEXT_TOKENS < math.inf):
            return
        if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
            return
        self._observed += 1
        # In equivalent tokens by the prior: both slopes are equal when the prior is right.
        attention = attention_tokens / self._prior
        if self._start is not None:
            self._start.append((float(tokens), attention, seconds))
            if len(self._start) == _START_STEPS:
                self._fit_start(self._start)
                self._start = None
            return
        expected = self._expected(tokens, attention)
        limit = _CLIP * self._noise
        error = max(-limit, min(limit, seconds / expected - 1))
        # A mean absolute error is 0.8 standard deviations.
        noise = self._noise + (1.25 * abs(error) - self._noise) / _NOISE_STEPS
        self._noise = max(_MIN_NOISE, noise)
        keep = 1 - 1 / _MEMORY_STEPS
        self._count *= keep
        self._sums, self._right = ([value * keep for value in v] for v in (self._sums, self._right))
        self._add(tokens, attention, expected * (1 + error), expected)
        if self._observed % 4 == 0:  # four steps in hundreds change little
            self._fit()

    def _parity_ratio(self) -> float:
        if self._linear == self._attention:  # also before the first fit
            return 1.0
        if self._linear >= self._attention * _BOUND:
            return _BOUND
        return max(1 / _BOUND, self._linear / self._attention)

    def _expected(self, tokens: float, attention: float) -> float:
        seconds = self._fixed + self._linear * tokens + self._attention * attention
        # A slope may be zero for a while; no step is free for that.
        slope = (self._linear + self._attention) / 2
        return max(seconds, slope * (tokens + attention) / 10)

    def _add(self, tokens: float, attention: float, seconds: float, expected: float) -> None:
        w = 1 / expected**2
        wt, wz = w * tokens, w * attention
        terms = (w, wt, wz, wt * tokens, wt * attention, wz * attention)
        self._count += 1
        self._sums = [a + b for a, b in zip(self._sums, terms, strict=True)]
        self._right = [a + b * seconds for a, b in zip(self._right, terms[:3], strict=True)]

    def _fit(self) -> None:
        one, t, z, tt, tz, zz = self._sums
        variance = self._noise**2
        typical_slope = math.sqrt(self._count / (tt + 2 * tz + zz))
        slope = max((self._linear + self._attention) / 2, typical_slope / 10)
        # Penalises (attention - linear)**2, the distance from the prior's parity.
        tie = variance / (_PRIOR_SPREAD * slope) ** 2
        fixed = one * (1 + variance / (_FIXED_SPREAD**2 * self._count))
        matrix = [[fixed, t, z], [t, tt + tie, tz - tie], [z, tz - tie, zz + tie]]
        self._fixed, self._linear, self._attention = _solve_non_negative(matrix, self._right)

    def _fit_start(self, steps: list[tuple[float, float, float]]) -> None:
        """Fit the first steps at once: weigh down, then leave out, those that stand apart."""
        slope = median(s / (t + z) for t, z, s in steps)
        expected = [max(s, slope * (t + z)) for t, z, s in steps]
        kept = [True] * len(steps)
        for _ in range(_START_ROUNDS):
            self._count, self._sums, self._right = 0.0, [0.0] * 6, [0.0] * 3
            for (t, z, s), usual, keep in zip(steps, expected, kept, strict=True):
                if keep:
                    self._add(t, z, s, usual)
            self._fit()
            expected = [self._expected(t, z) for t, z, _ in steps]
            errors = [abs(s / e - 1) for (_, _, s), e in zip(steps, expected, strict=True)]
            self._noise = max(_MIN_NOISE, 1.48 * median(errors))
            kept = [error <= _CLIP * self._noise for error in errors]


def _solve_non_negative(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Least squares from normal equations; what comes out negative is held at zero."""
    free = list(range(len(right)))
    result = [0.0] * len(right)
    while free:
        values = _solve([[*(matrix[i][j] for j in free), right[i]] for i in free])
        lowest = min(values)
        if lowest >= 0:
            for index, value in zip(free, values, strict=True):
                result[index] = value
            break
        del free[values.index(lowest)]
    return result


def _solve(rows: list[list[float]]) -> list[float]:
    """Eliminates rows that end in their right side; positive definite, so any pivot will do."""
    for step in range(len(rows)):
        pivot = rows[step][step]
        scaled = rows[step] = [value / pivot for value in rows[step]]
        for index, row in enumerate(rows):
            if index != step:
                factor = row[step]
                rows[index] = [a - factor * b for a, b in zip(row, scaled, strict=True)]
    return [row[-1] for row in rows]
