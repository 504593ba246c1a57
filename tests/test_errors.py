# SPDX-License-Identifier: Apache-2.0
"""Error messages: one line that names the setting, the value, what is allowed and the fix."""

import pytest

from mimo_plugin import errors


def test_setting_error_has_all_four_parts_on_one_line():
    error = errors.setting_error("mimo.kv.order", "new\nest", "value, lru", "use one of\nthem")
    assert isinstance(error, errors.ConfigError)
    text = str(error)
    assert "\n" not in text
    for part in ("mimo.kv.order", "'new\\nest'", "allowed: value, lru", "fix: use one of them"):
        assert part in text


def test_long_values_are_cut():
    text = str(errors.setting_error("mimo", "x" * 5000, "an object", "shorten it"))
    assert len(text) < 300
    assert "..." in text


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("swa_shar", "swa_share"), ("SWA_SHARE", "swa_share"), ("zzz", None), ("", None)],
)
def test_nearest(typed, meant):
    assert errors.nearest(typed, ("swa_share", "order", "memoise")) == meant


@pytest.mark.parametrize(
    "kind",
    [errors.ConfigError, errors.FeatureUnavailable, errors.ContractError, errors.VersionError],
)
def test_every_error_is_a_mimo_error(kind):
    assert issubclass(kind, errors.MimoError)
    assert str(kind("done")) == "done"
