# SPDX-License-Identifier: Apache-2.0
"""A model directory, as far as the command line tools need it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimo_plugin.core.geometry import GeometryError, ModelGeometry, read_geometry
from mimo_plugin.errors import FeatureUnavailable, setting_error


@dataclass(frozen=True, kw_only=True)
class Model:
    """What was read from a model directory.

    Attributes:
        path: the directory, as the user wrote it.
        architecture: first entry of ``architectures``; empty when there is none.
        geometry: its attention layers.
        weight_bytes: bytes of its weight files; 0 when there are none.
        has_chat_template: the tokenizer brings one.
        needs_remote_code: the configuration names code of its own.
        has_towers: the configuration describes a vision and an audio tower.
        fused_qkv_ranks: ranks that its fused qkv weights are cut for; None: they are not fused.
    """

    path: str
    architecture: str
    geometry: ModelGeometry
    weight_bytes: int
    has_chat_template: bool
    needs_remote_code: bool
    has_towers: bool = False
    fused_qkv_ranks: int | None = None

    @property
    def summary(self) -> str:
        """One line: the kinds of layer and their heads."""
        geometry = self.geometry
        parts = []
        for kind, name in (("full", "full-attention"), ("swa", "sliding-window")):
            layers = geometry.of_kind("full" if kind == "full" else "swa")
            if layers:
                heads = "/".join(map(str, sorted({layer.kv_heads for layer in layers})))
                dims = ", ".join(sorted({f"{layer.k_dim}+{layer.v_dim}" for layer in layers}))
                parts.append(f"{len(layers)} {name} layers of {heads} KV heads x ({dims})")
        window = geometry.window_tokens
        return " and ".join(parts) + (f", window {window}" if window else "")


def load_model(path: str) -> Model:
    """Read ``config.json`` of a model directory.

    Raises:
        ConfigError: there is no such directory, no ``config.json``, or it makes no sense.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise setting_error(
            "--model",
            path,
            "an existing directory that holds config.json",
            "download the model first and give the directory it lies in",
        )
    file = folder / "config.json"
    config = _json(file)
    if config is None:
        raise setting_error(
            "--model",
            path,
            "a directory that holds config.json",
            "give the directory of a Hugging Face checkpoint",
        )
    try:
        geometry = read_geometry(config)
    except GeometryError as error:
        raise setting_error(
            "--model", path, "the configuration of a language model", f"{file}: {error}"
        ) from None
    architectures = config.get("architectures")
    tokenizer = _json(folder / "tokenizer_config.json") or {}
    return Model(
        path=path,
        architecture=str(architectures[0])
        if isinstance(architectures, list) and architectures
        else "",
        geometry=geometry,
        weight_bytes=sum(weights.stat().st_size for weights in folder.glob("*.safetensors")),
        has_chat_template=bool(tokenizer.get("chat_template"))
        or (folder / "chat_template.jinja").is_file()
        or (folder / "chat_template.json").is_file(),
        needs_remote_code="auto_map" in config,
        has_towers=all(config.get(name) for name in ("vision_config", "audio_config")),
        fused_qkv_ranks=config.get("num_key_value_heads")
        if config.get("attention_projection_layout") == "fused_qkv"
        else None,
    )


def require_hybrid(model: Model) -> None:
    """Refuse a model without both kinds of layer.

    Raises:
        FeatureUnavailable: with what the model has instead.
    """
    if not model.geometry.is_hybrid:
        raise FeatureUnavailable(
            f"--model: found {model.path!r} with {model.summary}; allowed: a model with "
            "full-attention and sliding-window layers; fix: serve this one without --plugin"
        )


def _json(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None when there is no such file.

    Raises:
        ConfigError: the file isn't a JSON object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise setting_error(
            str(file), str(error), "a readable JSON object", "repair the file"
        ) from None
    if not isinstance(value, dict):
        raise setting_error(str(file), type(value).__name__, "a JSON object", "repair the file")
    return value
