# SPDX-License-Identifier: Apache-2.0
"""What one engine's videos are read by: frame rules, pixel rule, limits, settings.

It is resolved where the engine is configured and travels in the model's configuration. Its key, a
digest, is in the options of the loader, in the metadata of its videos, and so in vLLM's hashes of
them: engines with other settings share nothing, replicas with the same settings do.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from mimo_plugin.config_video import VideoConfig
from mimo_plugin.core.frames import FrameRules, VideoError
from mimo_plugin.core.pixels import PixelSpec
from mimo_plugin.engines.vllm.video.names import CONFIG_KEY, SETUP_KEY
from mimo_plugin.engines.vllm.vision.limits import Limits


@dataclass(frozen=True, kw_only=True)
class VideoSetup:
    """How the loader reads the videos of one engine.

    Attributes:
        spec: how pixels are wanted.
        limits: of the pixels of a video, with what the engine's ``mm_processor_kwargs`` change.
        rules: which frames are taken; None: as vLLM's own loader does.
        rows_dtype: type of patch rows made by the loader, as ``torch`` names it; None: it makes
            none, and frames travel as pixels.
        host_resize_ratio: source pixels per target pixel above which it makes patch rows.
        config: the user's settings.
    """

    spec: PixelSpec
    limits: Limits
    rules: FrameRules | None
    rows_dtype: str | None
    host_resize_ratio: float
    config: VideoConfig

    @cached_property
    def key(self) -> str:
        """The digest of everything above."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; :meth:`from_dict` makes an equal object of it."""
        return {**asdict(self), "key": self.key}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> VideoSetup:
        """The object of :meth:`to_dict`, whether or not JSON was in between."""
        fields = {name: value for name, value in raw.items() if name != "key"}
        spec = {**raw["spec"], "mean": tuple(raw["spec"]["mean"]), "std": tuple(raw["spec"]["std"])}
        fields["spec"] = PixelSpec(**spec)
        fields["limits"] = Limits(**raw["limits"])
        fields["rules"] = raw["rules"] and FrameRules(**raw["rules"])
        fields["config"] = VideoConfig(**raw["config"])
        return cls(**fields)


_setups: dict[str, VideoSetup] = {}
_lock = threading.Lock()


def add_setup(setup: VideoSetup) -> None:
    """Make a set-up known to the loader in this process."""
    with _lock:
        _setups[setup.key] = setup


def find_setup(key: object) -> VideoSetup:
    """The set-up that an engine of this process was given.

    Raises:
        VideoError: there is none: the key did not come from the engine's own configuration.
    """
    with _lock:
        found = _setups.get(key) if isinstance(key, str) else None
    if found is None:
        raise VideoError(
            f"media_io_kwargs.video.{SETUP_KEY}: found {repr(key)[:80]}; allowed: what the feature "
            "video writes at start; fix: leave it out, and start with --plugin mimo:vision,video"
        )
    return found


def key_of(hf_config: Any) -> str | None:
    """Key of the set-up in a model's configuration; None where the feature is off."""
    raw = getattr(hf_config, CONFIG_KEY, None)
    return str(raw["key"]) if isinstance(raw, Mapping) else None
