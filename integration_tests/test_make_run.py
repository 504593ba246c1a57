# SPDX-License-Identifier: Apache-2.0
"""`make run` in short: stock and plugin servers, one workload, the same answers, less work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 400


def test_quick_run_is_identical_and_recomputes_less(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tools.run", "--quick", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    claims = {claim["id"]: claim["value"] for claim in report["claims"]}
    assert claims["tokens_identical"] == 1.0
    assert claims["recomputed_ratio"] < 1.0
    page = (tmp_path / "report.html").read_text()
    assert "answers identical" in page and "data:image/png;base64," in page
