# SPDX-License-Identifier: Apache-2.0
"""Write ``contracts.lock.json``: what each given source tree holds for its contract table.

Run after a change of a table, with every tested version's package directory:
``python tests/record_contracts.py PACKAGE_DIR [PACKAGE_DIR ...]``. A directory called ``sglang`` is
compared with SGLang's table and recorded in ``contracts_sglang.lock.json``.
Versions that are not given keep what was recorded before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mimo_plugin import contracts

LOCKS = {
    "vllm": Path(__file__).with_name("contracts.lock.json"),
    "sglang": Path(__file__).with_name("contracts_sglang.lock.json"),
}
TABLES = {"vllm": contracts.VLLM_CONTRACTS, "sglang": contracts.SGLANG_CONTRACTS}
CHECKS = {"vllm": contracts.check_vllm, "sglang": contracts.check_sglang}


def main(roots: list[Path]) -> int:
    """Record ``roots``; 1 when one of them breaks a contract."""
    status = 0
    for root in roots:
        engine = "sglang" if root.name == "sglang" else "vllm"
        path = LOCKS[engine]
        lock = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        version = contracts.source_version(root)
        if version is None:
            print(f"{root}: expected a package directory with _version.py", file=sys.stderr)
            return 2
        for problem in CHECKS[engine](root):
            print(f"{version}: {problem}", file=sys.stderr)
            status = 1
        lock[version] = contracts.record(root, TABLES[engine])
        path.write_text(_one_line_a_symbol(lock), encoding="utf-8")
    return status


def _one_line_a_symbol(lock: dict[str, dict[str, object]]) -> str:
    versions = []
    for version, symbols in sorted(lock.items()):
        lines = [f"  {json.dumps(key)}: {json.dumps(symbols[key])}" for key in sorted(symbols)]
        versions.append(f" {json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(versions) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
