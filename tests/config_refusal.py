# SPDX-License-Identifier: Apache-2.0
"""What a refused section must say."""

from __future__ import annotations

import pytest

from mimo_plugin import config as cfg
from mimo_plugin.errors import ConfigError


def parse_section(feature: str, section: object) -> cfg.MimoConfig:
    """The configuration in which only ``feature`` has settings."""
    parsed = cfg.parse_config({feature: section}, environ={})
    assert parsed is not None
    return parsed


def refusal_of(feature: str, section: object) -> str:
    """The one line that refuses the section, with what is allowed and the fix."""
    with pytest.raises(ConfigError) as caught:
        parse_section(feature, section)
    text = str(caught.value)
    assert "\n" not in text and "allowed:" in text and "fix:" in text
    return text
