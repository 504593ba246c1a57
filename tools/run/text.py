# SPDX-License-Identifier: Apache-2.0
"""Messages as token ids: a model's chat markers, and seeded prose of an exact token count.

Prompts are built as token ids and sent as such, so that the answer a server generated is continued
exactly, without a detour through text that could be split into tokens differently.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROSE = """
the a of to in and is that it for on with as this be by are from at or an not have you which can
will one more time when there all new use over each other into only some two after like first
any our may then them most many water light house river stone paper music garden winter summer
letter window table morning evening machine engine number answer question reason story market
captain doctor teacher village harbour bridge mountain forest kitchen journey picture write read
open close build carry follow measure travel listen gather answer explain compare quiet early
narrow golden simple sudden heavy gentle distant careful empty honest modern wooden
"""
WORDS = PROSE.split()

KNOWN_FORMATS = (
    ("<|im_start|>{role}\n", "<|im_end|>\n"),
    ("<|start|>{role}<|message|>", "<|end|>"),
    ("<start_of_turn>{role}\n", "<end_of_turn>\n"),
    ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
)
"""(opening, closing) of a message; a format is used when its first special token is known."""

PLAIN_FORMAT = ("\n\n{role}: ", "")


@dataclass(frozen=True)
class ChatText:
    """Turns messages and prose into token ids of one model."""

    encode: Callable[[str], list[int]]
    opening: str
    closing: str

    def open_message(self, role: str) -> list[int]:
        """Tokens that start a message of ``role``."""
        return self.encode(self.opening.format(role=role))

    def close_message(self) -> list[int]:
        """Tokens that end a message."""
        return self.encode(self.closing) if self.closing else []

    def message(self, role: str, content: list[int]) -> list[int]:
        """A whole message."""
        return [*self.open_message(role), *content, *self.close_message()]

    def prose(self, rng: random.Random, tokens: int) -> list[int]:
        """Seeded English-looking text of exactly ``tokens`` tokens."""
        ids: list[int] = []
        while len(ids) < tokens:
            sentence = " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 14)))
            ids += self.encode(" " + sentence.capitalize() + ".")
        return ids[:tokens]


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer: its ``tokenizer.json`` where there is one, else transformers' loader.

    The result has ``encode_ids(text)``, ``decode_ids(ids)`` and ``knows(token)``.
    """
    path = Path(model) / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        return _Fast(Tokenizer.from_file(str(path)))
    from transformers import AutoTokenizer

    return _Slow(AutoTokenizer.from_pretrained(model, trust_remote_code=True))


class _Fast:
    """Adapter of a ``tokenizers.Tokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_ids(self, text: str) -> list[int]:
        """Token ids of ``text``, nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode_ids(self, ids: list[int]) -> str:
        """Text of ``ids`` with special tokens shown."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def knows(self, token: str) -> bool:
        """Whether ``token`` is one token."""
        return self._tokenizer.token_to_id(token) is not None


class _Slow:
    """Adapter of a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_ids(self, text: str) -> list[int]:
        """Token ids of ``text``, nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode_ids(self, ids: list[int]) -> str:
        """Text of ``ids`` with special tokens shown."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def knows(self, token: str) -> bool:
        """Whether ``token`` is one token."""
        return token in self._tokenizer.get_vocab()


def chat_text(tokenizer: Any) -> ChatText:
    """The chat format of ``tokenizer``, recognised by its special tokens, else plain text."""
    for opening, closing in KNOWN_FORMATS:
        special = opening.split("{", 1)[0]
        if tokenizer.knows(special):
            return ChatText(tokenizer.encode_ids, opening, closing)
    return ChatText(tokenizer.encode_ids, *PLAIN_FORMAT)
