# SPDX-License-Identifier: Apache-2.0
"""``mimo doctor --engine sglang``: what differs from vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import mimo_plugin
from mimo_plugin import contracts
from mimo_plugin.cli import _environment, _plugins
from tests.test_doctor import Site, only, problems

ENTRY_POINTS = f"[{_plugins.SGLANG_GROUP}]\nmimo = {_plugins.SGLANG_ENTRY}\n"
ROOT = Path(__file__).resolve().parents[1]


def sources() -> Path | None:
    """SGLang's package, here or in its environment beside this one."""
    found = [contracts.find_package("sglang")]
    found += sorted(ROOT.glob(".venv-sglang/lib/python*/site-packages/sglang"))
    return next((root for root in found if root is not None), None)


@pytest.fixture(scope="session")
def engine_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SGLang's Python files, as far as the contracts can lead."""
    root = sources()
    if root is None:
        pytest.skip("SGLang is not installed; `make setup-sglang`")
    target = tmp_path_factory.mktemp("engine") / "sglang"
    for path in (root / "srt").rglob("*.py"):
        copy = target / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(path)
    (target / "__init__.py").touch()
    shutil.copy(root / "_version.py", target / "_version.py")
    return target


@pytest.fixture
def site(tmp_path: Path, engine_files: Path) -> Site:
    made = Site(tmp_path, engine_files)
    (made.engine / "vllm").unlink()
    (made.engine / "sglang").symlink_to(engine_files)
    return made


@pytest.fixture
def healthy(site: Site) -> Site:
    site.plugin(entry_points=ENTRY_POINTS)
    site.distribution("sglang", "0.5.23", files="sglang/__init__.py")
    return site


def own_engine(site: Site) -> Path:
    """Replace the link to the engine's files by links of its own that a test may change."""
    link = site.engine / "sglang"
    source = link.resolve()
    link.unlink()
    shutil.copytree(source, link, symlinks=True)
    return link


def report(site: Site, *options: str, **environment: str) -> dict[str, Any]:
    """The report on SGLang."""
    return site.report("--engine", "sglang", *options, **environment)


pytestmark = pytest.mark.sglang


def test_a_healthy_installation(healthy: Site) -> None:
    found = report(healthy)
    assert problems(found) == []
    assert found["engine"] == "sglang"
    (group,) = found["groups"]
    assert group["group"] == "sglang.srt.plugins"
    assert group["found"] == [f"mimo (mimo-plugin {mimo_plugin.__version__})"]
    checks = {finding["check"] for finding in found["findings"]}
    assert {"engine", "contracts", "entry point", "allow-list", "loading"} <= checks


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("mimmo", "did you mean 'mimo'?"),
        ("other", "leaves out 'mimo'"),
        ("mimo,othre", "'othre' is no installed plugin"),
        ("", None),
        (" , ", None),
        (" other , mimo ", None),
    ],
)
def test_allow_list(healthy: Site, value: str, said: str | None) -> None:
    """B47: SGLang strips names, and an empty list loads all."""
    healthy.distribution("other-plugin", "1", "[sglang.srt.platforms]\nother = os:getcwd\n")
    found = report(healthy, SGLANG_PLUGINS=value)
    if said is None:
        assert problems(found) == []
    else:
        assert said in only(found, "allow-list")


def test_wrong_group(site: Site) -> None:
    """B50."""
    site.distribution("sglang", "0.5.23", files="sglang/__init__.py")
    site.plugin(entry_points=ENTRY_POINTS.replace("sglang.srt.plugins", "sglang.plugins"))
    text = only(report(site), "entry point")
    assert "'sglang.plugins'" in text and "SGLang reads 'sglang.srt.plugins'" in text


def test_an_environment_without_sglang(healthy: Site) -> None:
    (healthy.engine / "sglang").unlink()
    found = report(healthy)
    assert only(found, "engine") == "SGLang is not installed"
    (fix,) = [f["fix"] for f in found["findings"] if f["level"] == "problem"]
    assert "make setup-sglang" in fix


def test_version_outside_the_tested_range(site: Site, tmp_path: Path) -> None:
    site.plugin(entry_points=ENTRY_POINTS)
    site.distribution("sglang", "0.5.24", files="sglang/__init__.py")
    link = own_engine(site)
    (link / "_version.py").write_text("__version__ = '0.5.24'\n", encoding="utf-8")
    assert "==0.5.23" in only(report(site), "engine")
    assert problems(report(site, MIMO_STRICT="0")) == []


def test_contract_mismatch(healthy: Site) -> None:
    path = own_engine(healthy) / "srt" / "mem_cache" / "registry.py"
    text = path.read_text(encoding="utf-8").replace("cache_class", "kind")
    path.unlink()
    path.write_text(text, encoding="utf-8")
    assert "create_unified_radix_cache" in only(report(healthy), "contracts")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "not valid JSON"),
        ('{"kv": {"ladder_growths": 0.5}}', "did you mean 'ladder_growth'?"),
        ('{"features": ["mtp"]}', "not in this version for SGLang"),
        ("/no/such/file", "can't be read"),
    ],
)
def test_settings_that_would_be_refused(healthy: Site, value: str, said: str) -> None:
    assert said in only(report(healthy, MIMO_CONFIG=value), "variables")


def test_settings_that_would_be_accepted(healthy: Site) -> None:
    found = report(healthy, MIMO_CONFIG='{"kv": {"ladder_growth": 0.5}}')
    assert problems(found) == []
    assert any("asks for kv" in finding["text"] for finding in found["findings"])


@pytest.mark.parametrize(
    ("gpus", "platforms", "level", "said"),
    [
        ([], [], "note", "no device here"),
        ([], ["mimo_cpu"], "ok", "platform plugin mimo_cpu"),
        (["GPU 0: H200"], [], "ok", "1 NVIDIA GPU"),
    ],
)
def test_devices(gpus: list[str], platforms: list[str], level: str, said: str) -> None:
    first = _environment.check_gpu(gpus, _plugins.SGLANG, platforms)[0]
    assert (first.level, said in first.text) == (level, True)
