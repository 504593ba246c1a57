# SPDX-License-Identifier: Apache-2.0
"""The tier runner: a tier that runs nothing, fails or hangs is never taken for a good one."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tools import tiers

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "tests").mkdir()

    def run(body, limit_s=120.0):
        if body is not None:
            (tmp_path / "tests" / "test_it.py").write_text(body)
        tier = tiers.Tier("unit", ("tests",), limit_s=limit_s)
        return tiers.run_tier(tier, tmp_path, tmp_path / "out")

    return run


def test_a_passing_tier_is_good(project):
    result = project("def test_one(): pass\ndef test_two(): pass\n")
    assert (result.passed, result.failed, result.problem) == (2, 0, None)


def test_an_empty_tier_fails(project):
    assert project(None).problem == "ran no test"
    assert project("x = 1\n").problem == "ran no test"


def test_a_tier_of_skipped_tests_fails(project):
    body = "import pytest\n@pytest.mark.skip\ndef test_one(): pass\n"
    result = project(body)
    assert (result.skipped, result.problem) == (1, "ran no test")


def test_a_failing_tier_fails(project):
    result = project("def test_one(): pass\ndef test_two(): assert False\n")
    assert (result.passed, result.failed) == (1, 1)
    assert result.problem == "pytest ended with status 1"


def test_an_error_while_collecting_fails(project):
    assert project("import no_such_module_at_all\n").problem == "pytest ended with status 2"


def test_a_tier_that_hangs_is_stopped(project):
    result = project("import time\ndef test_one(): time.sleep(600)\n", limit_s=4)
    assert result.problem == "ran past its limit of 4 s"
    assert result.duration_s < 60


def test_a_tier_without_its_paths_fails(tmp_path):
    tier = tiers.Tier("engine", ("nowhere",))
    result = tiers.run_tier(tier, tmp_path, tmp_path)
    assert "none of nowhere exists" in result.problem


def test_a_tier_without_its_environment_fails(tmp_path):
    """SGLang's tests are never left out in silence."""
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    tier = tiers.Tier("sglang", ("test_*.py",), python=tmp_path / "venv" / "bin" / "python")
    result = tiers.run_tier(tier, tmp_path, tmp_path)
    assert result.passed == 0 and "make setup-all" in result.problem


def test_files_run_side_by_side_where_no_engine_runs(tmp_path):
    assert {tier.name for tier in tiers.TIERS if not tier.parallel} == {"engine", "sglang"}
    for tier in tiers.TIERS[:3]:
        side_by_side = any("numprocesses" in part for part in tier.command(ROOT, tmp_path, ()))
        assert side_by_side is tier.parallel


def test_every_test_file_belongs_to_one_tier():
    unit, contracts, engine, sglang = tiers.TIERS
    assert unit.ignored == contracts.paths
    assert engine.ignored == sglang.paths and sglang.python == tiers.SGLANG_PYTHON
    for path in (*unit.paths, *engine.paths):
        assert (ROOT / path).is_dir()
    for tier in (contracts, sglang):
        assert any(list(ROOT.glob(path)) for path in tier.paths)


def test_the_last_line_counts_tests_in_plain_form():
    results = [
        tiers.Result("lint", 5, 0, 0, 1.0, None),
        tiers.Result("unit", 10, 1, 2, 1.0, "pytest ended with status 1"),
        tiers.Result("engine", 3, 0, 0, 1.0, None),
    ]
    lines = tiers.summary_lines(results)
    assert lines[-1] == "total: 13 passed, 1 failed, 2 skipped"
    assert len(lines) == 4 and "pytest ended with status 1" in lines[1]


def test_ci_runs_make_test_and_make_runs_the_tiers():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^exec make test$", script.read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(
        r"^test: \$\(TEST_READY\)\n\t@\$\(PYTHON\) -m tools\.tiers ", makefile, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("options", "both"),
    [((), True), (("TIER=sglang",), True), (("TIER=unit",), False), (("PY=/x",), True)],
)
def test_make_test_sets_up_what_its_tiers_need(options, both):
    done = subprocess.run(
        ["make", "--dry-run", "test", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("tools.setup_sglang" in done.stdout) is both
    assert ("tools.setup_vllm" in done.stdout) is ("PY=/x" not in options)
