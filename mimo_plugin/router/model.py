# SPDX-License-Identifier: Apache-2.0
"""What the router has to know of the model, from its ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mimo_plugin.core.cost import parity_tokens_or_default
from mimo_plugin.core.geometry import GeometryError, read_geometry
from mimo_plugin.errors import one_line, setting_error


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Of one model.

    Attributes:
        path: its directory.
        parity_tokens: see :func:`mimo_plugin.core.cost.parity_tokens`.
        parity_known: it was derived, and is no guess.
        window_tokens: of its largest sliding window, which a hit needs; None: it has none.
    """

    path: str
    parity_tokens: float
    parity_known: bool
    window_tokens: int | None = None


def read_model(path: str) -> ModelFacts:
    """Read the model's configuration.

    Raises:
        ConfigError: no such directory, or no configuration in it.
    """
    file = Path(path).expanduser() / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise setting_error(
            "--model",
            path,
            "a directory that holds config.json",
            "give the directory that the workers serve",
        ) from None
    except (OSError, ValueError) as error:
        raise setting_error("--model", path, "a readable config.json", one_line(error)) from None
    if not isinstance(config, dict):
        raise setting_error("--model", path, "a JSON object in config.json", "repair the file")
    parity, known = parity_tokens_or_default(config)
    try:
        window = read_geometry(config).window_tokens
    except GeometryError:
        # Latent attention and the like: full attention as far as hits are concerned.
        window = None
    return ModelFacts(path, parity, known, window)
