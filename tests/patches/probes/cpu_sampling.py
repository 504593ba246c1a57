# SPDX-License-Identifier: Apache-2.0
"""Verify drafts with the rejection sampler of the V1 runner on CPU; print as JSON.

- ``expanded``: for each kind of sampling parameter, what a buffer of -7 holds after expansion;
- ``laws``: distance of output tokens from the target's law, as chi-square per degree of freedom,
  the number of tokens that the law excludes and of all, per kind of draft (``sampled`` from a
  distribution of its own, or ``fixed``, without one), group of requests and position;
- ``seeded``: whether requests with seeds repeat, and whether others don't.

Buffers start as NaN and huge integers, so that what nobody writes is not right by accident.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler as rejection
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

VOCAB = 16
STEPS = 2
REQUESTS = 12_000
GROUPS = {"warm": (1.5, VOCAB, 1.0), "top_k": (0.7, 5, 1.0), "top_p": (1.0, VOCAB, 0.8)}
"""Temperature, top-k and top-p of a third of the requests each."""
SEEDED = range(0, 300, 3)
TARGET = 1.5 * torch.randn(STEPS + 1, VOCAB, generator=torch.Generator().manual_seed(5))
"""Logits of each position, the last one's for the token after all drafts."""
DRAFTING = torch.randn(VOCAB, generator=torch.Generator().manual_seed(6))
"""Logits that drafts are sampled from."""


def expansions() -> dict[str, list[float]]:
    """Expand two requests, of one and three drafts, into a buffer of -7."""
    kinds = {
        "temperature": torch.tensor([0.0, 0.75]),
        "top_k": torch.tensor([3, 9], dtype=torch.int32),
        "int64": torch.tensor([3, 9]),
    }
    ends = torch.tensor([1, 4], dtype=torch.int32)
    results = {}
    for name, values in kinds.items():
        output = torch.full((4,), -7, dtype=values.dtype)
        rejection._expand(output, values, ends, replace_from=0, replace_to=1)
        results[name] = output.tolist()
    return results


def law(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Probabilities [VOCAB] after temperature, top-k and top-p."""
    scaled = logits.double() / temperature
    kept = torch.full_like(scaled, float("-inf"))
    best = scaled.topk(top_k)
    kept[best.indices] = best.values
    probs, order = kept.softmax(-1).sort(descending=True)
    probs[probs.cumsum(-1) - probs >= top_p] = 0.0
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


def verify(filtered: bool, sampled: bool, seeds: bool = False) -> torch.Tensor:
    """Output tokens [REQUESTS, STEPS + 1]; request i has the parameters of group i % 3."""
    drafting = DRAFTING.softmax(-1)
    count = REQUESTS * STEPS
    draft_tokens = TARGET[:STEPS].argmax(-1).repeat(REQUESTS)
    if sampled:
        draft_tokens = torch.multinomial(drafting, count, replacement=True)
    metadata = SpecDecodeMetadata.make_dummy(draft_tokens.view(-1, STEPS).tolist(), "cpu")
    rows = torch.arange(REQUESTS * (STEPS + 1), dtype=torch.int32).view(REQUESTS, STEPS + 1)
    metadata.target_logits_indices = rows[:, :STEPS].flatten()
    metadata.bonus_logits_indices = rows[:, STEPS].contiguous()
    columns = list(zip(*GROUPS.values(), strict=True))
    temperature, top_k, top_p = (torch.tensor(column).repeat(REQUESTS // 3) for column in columns)
    none = torch.zeros(REQUESTS)
    generators = {i: torch.Generator().manual_seed(i) for i in SEEDED} if seeds else {}
    sampling = SamplingMetadata(
        temperature=temperature,
        all_greedy=False,
        all_random=True,
        top_p=top_p if filtered else None,
        top_k=top_k.to(torch.int32) if filtered else None,
        generators=generators,
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = rejection.RejectionSampler(Sampler())
    draft_probs = drafting.repeat(count, 1) if sampled else None
    return sampler(metadata, draft_probs, TARGET.repeat(REQUESTS, 1), sampling).sampled_token_ids


def distance(tokens: torch.Tensor, filtered: bool) -> dict[str, list[float]]:
    """Chi-square per degree of freedom, tokens outside of the law, and tokens, by case."""
    results = {}
    for group, (name, parameters) in enumerate(GROUPS.items()):
        if not filtered:
            parameters = (parameters[0], VOCAB, 1.0)
        for position in range(STEPS + 1):
            found = tokens[group::3, position]
            found = found[found >= 0]
            counts = torch.bincount(found, minlength=VOCAB).double()
            expected = law(TARGET[position], *parameters) * len(found)
            inside = expected > 0
            chi = ((counts - expected)[inside] ** 2 / expected[inside]).sum()
            freedom = int(inside.sum()) - 1
            results[f"{name}/{position}"] = [
                float(chi) / freedom,
                int(counts[~inside].sum()),
                len(found),
            ]
    return results


def main() -> None:
    torch.manual_seed(11)
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    results: dict[str, Any] = {"expanded": expansions(), "laws": {}}
    for sampled in (True, False):
        kind = "sampled" if sampled else "fixed"
        for filtered in (False, True):
            try:
                laws = distance(verify(filtered, sampled), filtered)
            except (RuntimeError, IndexError) as error:
                laws = {"error": str(error)}
            results["laws"][f"{kind}/{'filtered' if filtered else 'temperature'}"] = laws
    try:
        # Drafts are the same both times, acceptance and replacements are drawn anew.
        first, second = (verify(False, False, seeds=True) for _ in range(2))
        same = (first == second).all(dim=1)
        others = torch.ones(REQUESTS, dtype=torch.bool)
        others[list(SEEDED)] = False
        results["seeded"] = [bool(same[~others].all()), float(same[others].double().mean())]
    except (RuntimeError, IndexError) as error:
        results["seeded"] = str(error)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
