# SPDX-License-Identifier: Apache-2.0
"""Which SGLang is installed, and whether it is in the range that was tested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

from mimo_plugin.errors import VersionError

SUPPORTED_RELEASES: tuple[tuple[int, int, int], ...] = ((0, 5, 23),)
"""(major, minor, patch) of the releases that the contracts are checked against.

SGLang changes internals in patch releases, so all three count.
"""

SUPPORTED_TEXT = "sglang ==0.5.23"


@dataclass(frozen=True)
class InstalledSglang:
    """The installed engine.

    Attributes:
        version: as its metadata says, e.g. ``0.5.23``.
        distribution: the distribution that owns the package ``sglang``.
    """

    version: str
    distribution: str

    @property
    def label(self) -> str:
        """``sglang 0.5.23``, with the distribution in brackets when it has another name."""
        suffix = "" if self.distribution == "sglang" else f" ({self.distribution})"
        return f"sglang {self.version}{suffix}"


@lru_cache(maxsize=1)
def installed_sglang() -> InstalledSglang:
    """Find the distribution that provides the package ``sglang``.

    Raises:
        VersionError: none is found, or two with different versions own the package.
    """
    names = sorted(set(metadata.packages_distributions().get("sglang", ())))
    found = [InstalledSglang(metadata.version(name), name) for name in names]
    if not found:  # an editable or partial installation lists no files
        try:
            found = [InstalledSglang(metadata.version("sglang"), "sglang")]
        except metadata.PackageNotFoundError:
            raise VersionError(
                "SGLang: found no installed distribution that provides the package 'sglang'; "
                f"allowed: {SUPPORTED_TEXT}; fix: install SGLang into this environment"
            ) from None
    if len({engine.version for engine in found}) > 1:
        listing = ", ".join(f"{engine.distribution} {engine.version}" for engine in found)
        raise VersionError(
            f"SGLang: found two distributions of the package 'sglang' ({listing}); allowed: one; "
            "fix: uninstall both and install the one you want"
        )
    return found[0]


def is_supported(version: str) -> bool:
    """Whether ``version`` is a tested release, with any suffix (``.post1``, ``+cpu``)."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)(?:\D|$)", version)
    return match is not None and tuple(map(int, match.groups())) in SUPPORTED_RELEASES


def require_supported() -> InstalledSglang:
    """The installed engine.

    Raises:
        VersionError: it is outside the tested range.
    """
    engine = installed_sglang()
    if not is_supported(engine.version):
        raise VersionError(
            f"SGLang: found {engine.label}; allowed: {SUPPORTED_TEXT}; fix: install that version, "
            "or a mimo-plugin release that supports yours"
        )
    return engine
