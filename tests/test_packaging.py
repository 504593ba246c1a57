# SPDX-License-Identifier: Apache-2.0
"""The wheel as users get it: both entry points, types, licence, nothing else."""

import ast
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import mimo_plugin

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from a copy of the sources, without network or isolation."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "mimo_plugin", source / "mimo_plugin", ignore=shutil.ignore_patterns("__pycache__")
    )
    # A neighbour that must not be packed.
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    code = f"import setuptools.build_meta as b; print(b.build_wheel({str(work)!r}))"
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr[-2000:]
    return work / built.stdout.strip().splitlines()[-1]


def read(wheel, ending):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(ending)]
        return archive.read(name).decode()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"mimo_plugin"}
    assert "mimo_plugin/py.typed" in names
    package = ROOT / "mimo_plugin"
    expected = {str(path.relative_to(ROOT)) for path in package.rglob("*.py")}
    page = (path for path in (package / "router" / "page").iterdir() if path.is_file())
    expected |= {str(path.relative_to(ROOT)) for path in page}
    assert expected <= set(names)


def test_metadata(wheel):
    metadata = Parser().parsestr(read(wheel, ".dist-info/METADATA"))
    assert metadata["Name"] == "mimo-plugin"
    assert metadata["Version"] == mimo_plugin.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"vllm", "sglang", "router", "tiers", "dev"} <= set(metadata.get_all("Provides-Extra"))
    for requirement in metadata.get_all("Requires-Dist") or ():
        assert "extra ==" in requirement, "no dependency at run time"
        assert requirement.split()[0].split(">")[0] not in ("vllm", "sglang", "torch")
    assert "Apache License" in read(wheel, "licenses/LICENSE")


def entry_points(wheel):
    groups = {}
    for line in read(wheel, "entry_points.txt").splitlines():
        if line.startswith("["):
            group = groups.setdefault(line.strip("[]"), {})
        elif line.strip():
            name, _, target = line.partition(" = ")
            group[name] = target
    return groups


def test_entry_points(wheel):
    assert entry_points(wheel) == {
        "console_scripts": {"mimo": "mimo_plugin.cli.main:main"},
        "vllm.general_plugins": {"mimo": "mimo_plugin.entrypoints:register_vllm"},
        "sglang.srt.plugins": {"mimo": "mimo_plugin.entrypoints:register_sglang"},
    }


def assigned_strings(package, names):
    """Values of the module constants ``names`` anywhere under an installed package's plugins."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    found = {}
    for path in Path(spec.submodule_search_locations[0]).rglob("plugins/*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id in names:
                        found[target.id] = node.value.value
    return found


@pytest.mark.vllm
def test_group_is_the_one_the_installed_vllm_reads(wheel):
    found = assigned_strings("vllm", {"DEFAULT_PLUGINS_GROUP"})
    assert found["DEFAULT_PLUGINS_GROUP"] in entry_points(wheel)


@pytest.mark.sglang
def test_group_is_the_one_the_installed_sglang_reads(wheel):
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    plugins = Path(spec.submodule_search_locations[0]) / "srt" / "plugins"
    assert any("'sglang.srt.plugins'" in _quoted(path) for path in plugins.rglob("*.py"))


def _quoted(path):
    return path.read_text().replace('"', "'")


def test_wheel_installs_and_is_found(wheel, tmp_path):
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        "from importlib.metadata import entry_points as e;"
        "import mimo_plugin, sys;"
        "fs = [p.load() for g in ('vllm.general_plugins', 'sglang.srt.plugins')"
        " for p in e(group=g) if p.name == 'mimo'];"
        "print(mimo_plugin.__file__, *[f.__name__ for f in fs])"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert out == [
        str(target / "mimo_plugin" / "__init__.py"),
        "register_vllm",
        "register_sglang",
    ]


def test_importing_the_package_takes_less_than_a_millisecond(tmp_path):
    def import_us():
        err = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "import mimo_plugin"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        (line,) = [line for line in err.splitlines() if line.endswith("| mimo_plugin")]
        return int(line.split("|")[1])

    import_us()
    assert min(import_us() for _ in range(5)) < 1000


def test_version_is_stated_once():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    assert project["dependencies"] == []
    assert project["optional-dependencies"]["vllm"] == []
    assert project["optional-dependencies"]["sglang"] == []
