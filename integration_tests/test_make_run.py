# SPDX-License-Identifier: Apache-2.0
"""`make run` in short: stock and plugin servers, one workload, the same answers, less work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 480


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """(report, page) of a quick run that succeeded."""
    out = tmp_path_factory.mktemp("run")
    done = subprocess.run(
        [sys.executable, "-m", "tools.run", "--quick", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((out / "report.json").read_text()), (out / "report.html").read_text()


def claims(report):
    return {claim["id"]: claim["value"] for claim in report["claims"]}


def test_quick_run_is_identical_and_recomputes_less(quick_run):
    report, page = quick_run
    assert claims(report)["tokens_identical"] == 1.0
    assert claims(report)["recomputed_ratio"] < 1.0
    assert "answers identical" in page and "data:image/png;base64," in page


def test_drafts_are_accepted_and_change_no_answer(quick_run):
    report, page = quick_run
    section = report["drafts"]
    assert "runs" in section, section
    assert claims(report)["drafts_identical"] == 1.0
    assert section["identical_requests"] == section["prompts"] >= 8
    for run in section["runs"].values():
        assert run["accept_len"] > 1.5
        assert len(run["conditional"]) == 3 and min(run["conditional"]) > 0.3
    # So few prompts show that all layers draft, not how much better than stock they do.
    assert claims(report)["accept_len_ratio"] > 0.9
    rounds, accepted = section["plugin_counters"].values()
    assert (rounds, accepted) == tuple(
        section["runs"]["plugin"][name] for name in ("rounds", "accepted_tokens")
    )
    assert "<h2>Drafts</h2>" in page and "tokens a round" in page
