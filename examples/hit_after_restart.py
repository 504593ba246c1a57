# SPDX-License-Identifier: Apache-2.0
"""Ask a server one long prompt, and print how much of it was reused.

    examples/serve_tiers.sh MODEL file /data/kv     # in another terminal; wait until it serves
    python examples/hit_after_restart.py            # reused 0 of … the first time
    # stop the server, start it again
    python examples/hit_after_restart.py            # reused from the store

Needs nothing but Python; the server runs with --enable-prompt-tokens-details.
"""

from __future__ import annotations

import argparse
import json
import urllib.request

PARAGRAPH = (
    "Keys and values of full attention are kept for every token. Those of a sliding window are "
    "kept where the next request will need them. "
)


def ask(url: str, body: dict[str, object] | None = None) -> dict[str, object]:
    """One request to the OpenAI API of a server."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        found: dict[str, object] = json.load(answer)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--paragraphs", type=int, default=60, help="length of the prompt")
    args = parser.parse_args()
    models = ask(f"{args.url}/models")
    name = models["data"][0]["id"]  # type: ignore[index]
    body = {
        "model": name,
        "prompt": PARAGRAPH * args.paragraphs,
        "max_tokens": 16,
        "temperature": 0,
    }
    answer = ask(f"{args.url}/completions", body)
    usage: dict[str, object] = answer["usage"]  # type: ignore[assignment]
    details = usage.get("prompt_tokens_details") or {}
    reused = details.get("cached_tokens") or 0  # type: ignore[attr-defined]
    print(f"reused {reused} of {usage['prompt_tokens']} prompt tokens")
    print(repr(answer["choices"][0]["text"]))  # type: ignore[index]


if __name__ == "__main__":
    main()
