# SPDX-License-Identifier: Apache-2.0
"""Which SGLang counts as tested: the exact release, with any suffix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata

import pytest

from mimo_plugin.engines.sglang import version
from mimo_plugin.errors import VersionError


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    version.installed_sglang.cache_clear()
    yield
    version.installed_sglang.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, found: Mapping[str, str]) -> None:
    def of(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"sglang": list(found)})
    monkeypatch.setattr(metadata, "version", of)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("0.5.23", True),
        ("0.5.23.post1", True),
        ("v0.5.23+cpu", True),
        ("0.5.22", False),
        ("0.5.230", False),
        ("0.6.23", False),
        ("1.5.23", False),
        ("0.5", False),
        ("", False),
    ],
)
def test_tested_releases(text: str, good: bool) -> None:
    assert version.is_supported(text) is good


def test_a_tested_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"sglang-fork": "0.5.23"})
    assert version.require_supported().label == "sglang 0.5.23 (sglang-fork)"


@pytest.mark.parametrize("found", [{}, {"sglang": "0.5.20"}, {"a": "0.5.23", "sglang": "0.5.22"}])
def test_anything_else_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str]
) -> None:
    installed(monkeypatch, found)
    with pytest.raises(VersionError) as caught:
        version.require_supported()
    assert "fix:" in str(caught.value) and "\n" not in str(caught.value)


def test_the_text_says_what_the_table_says() -> None:
    releases = [".".join(map(str, release)) for release in version.SUPPORTED_RELEASES]
    assert f"sglang =={', =='.join(releases)}" == version.SUPPORTED_TEXT
