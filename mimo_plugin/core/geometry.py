# SPDX-License-Identifier: Apache-2.0
"""KV geometry of a model: its layers, read from the model's ``config.json``.

Pure arithmetic on a mapping; no file is read and no engine imported.  ``core/pools.py`` turns the
result into blocks and bytes of a pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["full", "swa"]


class GeometryError(ValueError):
    """A model configuration whose KV geometry can't be told; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class LayerKv:
    """KV of one attention layer, over all tensor-parallel ranks.

    Attributes:
        kind: ``full`` or ``swa`` (sliding window).
        kv_heads: key/value heads.
        k_dim, v_dim: numbers per head of a key and of a value; they may differ.
        window_tokens: W, the query's own token included; None for full attention.
        draft: belongs to a multi-token-prediction layer, not to the model proper.
    """

    kind: Kind
    kv_heads: int
    k_dim: int
    v_dim: int
    window_tokens: int | None = None
    draft: bool = False

    def heads_per_rank(self, tp: int) -> int:
        """Heads that one of ``tp`` ranks holds; fewer heads than ranks are replicated."""
        larger, smaller = max(self.kv_heads, tp), min(self.kv_heads, tp)
        if larger % smaller:
            raise GeometryError(
                f"tensor parallel size: found {tp}; allowed: a divisor or a multiple of the "
                f"{self.kv_heads} KV heads; fix: choose another size"
            )
        return max(1, self.kv_heads // tp)

    def bytes_per_token(self, *, tp: int = 1, element_bytes: int = 2) -> int:
        """Bytes of one token's keys and values in this layer, on one rank."""
        return self.heads_per_rank(tp) * (self.k_dim + self.v_dim) * element_bytes


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """The attention layers of a model that own KV, first to last.

    Attributes:
        model_type: as in the configuration (empty when it has none).
        layers: layers that share another layer's KV are left out.
        element_bytes: bytes per stored number in the model's own dtype.
        max_len_tokens: longest sequence the model was made for; None when not said.
        mtp_layers: multi-token-prediction layers that the checkpoint holds.
    """

    model_type: str
    layers: tuple[LayerKv, ...]
    element_bytes: int
    max_len_tokens: int | None = None
    mtp_layers: int = 0

    def of_kind(self, kind: Kind) -> tuple[LayerKv, ...]:
        """The layers of one kind, draft layers included."""
        return tuple(layer for layer in self.layers if layer.kind == kind)

    @property
    def full_layers(self) -> int:
        """Number of full-attention layers."""
        return len(self.of_kind("full"))

    @property
    def swa_layers(self) -> int:
        """Number of sliding-window layers of the model proper."""
        return sum(not layer.draft for layer in self.of_kind("swa"))

    @property
    def is_hybrid(self) -> bool:
        """True when the model has both kinds of layer."""
        return self.full_layers > 0 and self.swa_layers > 0

    @property
    def window_tokens(self) -> int | None:
        """The largest sliding window, None without sliding-window layers."""
        return max((layer.window_tokens or 0 for layer in self.of_kind("swa")), default=None)

    @property
    def replay_tokens(self) -> int:
        """Tokens to recompute so that all sliding-window state is exact: (W - 1) per layer.

        The state after a layer depends on W - 1 more tokens than the state before it.
        """
        return sum(
            (layer.window_tokens or 1) - 1 for layer in self.of_kind("swa") if not layer.draft
        )

    def bytes_per_token(self, kind: Kind, *, tp: int = 1, element_bytes: int | None = None) -> int:
        """Bytes of one token over all layers of a kind, on one rank, without padding."""
        size = self.element_bytes if element_bytes is None else element_bytes
        return sum(layer.bytes_per_token(tp=tp, element_bytes=size) for layer in self.of_kind(kind))

    def with_draft_layers(self, count: int) -> ModelGeometry:
        """The model with ``count`` multi-token-prediction layers in the KV cache.

        MiMo's draft layers are sliding-window layers of the model's own shape.
        """
        swa = [layer for layer in self.of_kind("swa") if not layer.draft]
        if count and not swa:
            raise GeometryError("draft layers: the model has no sliding-window layer to shape them")
        drafts = (replace(swa[-1], draft=True),) * count if count else ()
        own = tuple(layer for layer in self.layers if not layer.draft)
        return replace(self, layers=own + drafts)


_FULL_NAMES = frozenset({"full_attention", "attention", "global_attention", "global"})
_SWA_NAMES = frozenset({"sliding_attention", "sliding_window_attention", "local_sliding", "local"})

# Layer pattern where the configuration names none: every n-th layer is a full-attention layer.
_FULL_EVERY = {
    "cohere2": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma4": 6,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "mimo_v2_flash": 6,
}

_NESTED = ("text_config", "llm_config", "language_config")

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2}

_GEMMA4_GLOBAL_HEAD_DIM = 512


def read_geometry(config: Mapping[str, Any]) -> ModelGeometry:
    """Geometry of the language model that ``config`` (a parsed ``config.json``) describes.

    Understands MiMo's ``hybrid_layer_pattern`` and ``swa_*`` keys, ``layer_types``,
    ``sliding_window_pattern`` (a number or letters such as ``LLLG``), Gemma 4's global heads and
    shared KV layers, and nested text configurations.

    Raises:
        GeometryError: a key is missing or has a value that makes no sense.
    """
    text = _text_config(config)
    count = _positive(text, "num_hidden_layers")
    if text.get("kv_lora_rank"):
        raise GeometryError("kv_lora_rank: latent attention has no sliding-window KV to manage")
    kinds = _kinds(text, count)
    own = count - _natural(text, "num_kv_shared_layers")
    shapes = {kind: _shape(text, kind) for kind in ("full", "swa") if kind in kinds}
    overrides = text.get("per_layer_config") or {}
    layers = []
    for index, kind in enumerate(kinds[:own]):
        layer = shapes[kind]
        override = overrides.get(str(index), overrides.get(index))
        layers.append(_overridden(layer, override) if override else layer)
    if not layers:
        raise GeometryError("num_kv_shared_layers: no layer is left that owns KV")
    max_len = text.get("max_position_embeddings")
    return ModelGeometry(
        model_type=str(text.get("model_type") or config.get("model_type") or ""),
        layers=tuple(layers),
        element_bytes=_element_bytes(config, text),
        max_len_tokens=max_len if isinstance(max_len, int) else None,
        mtp_layers=_mtp_layers(config, text),
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if "num_hidden_layers" in config:
        return config
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping) and "num_hidden_layers" in nested:
            return nested
    raise GeometryError(
        "num_hidden_layers: missing, also in " + ", ".join(_NESTED) + "; fix: give the config.json "
        "of a language model"
    )


def _kinds(text: Mapping[str, Any], count: int) -> list[Kind]:
    if text.get("use_sliding_window") is False:
        return ["full"] * count
    named = text.get("hybrid_layer_pattern")
    if named is not None:
        return [_pattern_kind(value) for value in _of_length(named, "hybrid_layer_pattern", count)]
    named = text.get("layer_types")
    if named is not None:
        return [_named_kind(value) for value in _of_length(named, "layer_types", count)]
    pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern"))
    model_type = str(text.get("model_type", ""))
    if isinstance(pattern, str) and pattern:
        letters = [pattern[index % len(pattern)].upper() for index in range(count)]
        return ["swa" if letter == "L" else "full" for letter in letters]
    if pattern is None:
        pattern = _FULL_EVERY.get(model_type)
    if pattern is None:
        return ["swa" if _window(text) else "full"] * count
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise GeometryError(
            f"sliding_window_pattern: found {pattern!r}; allowed: a number >= 1 or letters L and G"
        )
    kinds: list[Kind] = ["full" if (index + 1) % pattern == 0 else "swa" for index in range(count)]
    if model_type.startswith("gemma4"):
        kinds[-1] = "full"
    if model_type == "mimo_v2_flash":
        kinds[0] = "full"
    return kinds


def _of_length(value: object, key: str, count: int) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < count:
        size = len(value) if isinstance(value, Sequence) else type(value).__name__
        raise GeometryError(f"{key}: found {size} entries; allowed: one for each of {count} layers")
    return value[:count]


def _pattern_kind(value: object) -> Kind:
    if value in (0, 1) and not isinstance(value, (bool, float)):
        return "swa" if value else "full"
    raise GeometryError(
        f"hybrid_layer_pattern: found {value!r}; allowed: 0 (full) or 1 (sliding window)"
    )


def _named_kind(value: object) -> Kind:
    if value in _FULL_NAMES:
        return "full"
    if value in _SWA_NAMES:
        return "swa"
    raise GeometryError(
        f"layer_types: found {value!r}; allowed: full_attention, sliding_attention; the KV of "
        "other layers is not managed here"
    )


def _window(text: Mapping[str, Any]) -> int | None:
    for key in ("sliding_window_size", "sliding_window"):
        if text.get(key):
            return _positive(text, key)
    return None


def _shape(text: Mapping[str, Any], kind: Kind) -> LayerKv:
    heads = _positive(text, "num_attention_heads")
    kv_heads = _positive(text, "num_key_value_heads", heads)
    k_dim = _positive(text, "head_dim", _positive(text, "hidden_size", heads) // heads)
    v_dim = _positive(text, "v_head_dim", k_dim)
    model_type = str(text.get("model_type", ""))
    if kind == "full":
        if model_type.startswith("gemma4") or "global_head_dim" in text:
            k_dim = v_dim = _positive(text, "global_head_dim", _GEMMA4_GLOBAL_HEAD_DIM)
            if text.get("attention_k_eq_v"):
                kv_heads = _positive(text, "num_global_key_value_heads", kv_heads)
        return LayerKv(kind="full", kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim)
    window = _window(text)
    if window is None:
        raise GeometryError("sliding_window: missing; allowed: the window in tokens, > 0")
    if model_type == "mimo_v2_flash" and "hybrid_layer_pattern" not in text:
        kv_heads *= 2  # this form of the configuration leaves the doubling to the model's code
    swa_k_dim = _positive(text, "swa_head_dim", k_dim)
    return LayerKv(
        kind="swa",
        kv_heads=_positive(text, "swa_num_key_value_heads", kv_heads),
        k_dim=swa_k_dim,
        v_dim=_positive(text, "swa_v_head_dim", swa_k_dim if "swa_head_dim" in text else v_dim),
        window_tokens=window,
    )


def _overridden(layer: LayerKv, override: Mapping[str, Any]) -> LayerKv:
    dim = _positive(override, "head_dim", layer.k_dim)
    return replace(
        layer,
        kv_heads=_positive(override, "num_key_value_heads", layer.kv_heads),
        k_dim=dim,
        v_dim=dim if "head_dim" in override else layer.v_dim,
    )


def _mtp_layers(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    for key in ("num_nextn_predict_layers", "mtp_num_layers"):
        if text.get(key) or config.get(key):
            return _natural(text if text.get(key) else config, key)
    return 0


def _element_bytes(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    for holder in (text, config):
        for key in ("dtype", "torch_dtype"):
            name = holder.get(key)
            if isinstance(name, str):
                return _ELEMENT_BYTES.get(name.removeprefix("torch."), 2)
    return 2


def _positive(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        if default is None:
            raise GeometryError(f"{key}: missing; allowed: a number > 0")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise GeometryError(f"{key}: found {value!r}; allowed: a number > 0")
    return value


def _natural(values: Mapping[str, Any], key: str) -> int:
    return _positive(values, key) if values.get(key) else 0
