# SPDX-License-Identifier: Apache-2.0
"""All measurements on one source tree of SGLang, in one process: its import takes the longest.

Prints one JSON object: what each probe measured, and what the plugin's contracts say.
"""

from __future__ import annotations

import json

import sglang_policy
import sglang_retention
import sglang_storage

from mimo_plugin.contracts import check_sglang


def main() -> None:
    """Measure and print."""
    found = {
        "policy": sglang_policy.measure(),
        "retention": sglang_retention.measure(),
        "storage": sglang_storage.measure(),
        "contracts": list(check_sglang()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
