# SPDX-License-Identifier: Apache-2.0
"""Text to token ids with a fast tokenizer, piece by piece: a chat's next turn costs only its new
messages.

Added tokens that are matched before normalisation (``normalized`` is off: ``<|im_start|>`` and the
like) cut a text into pieces that the ``tokenizers`` library normalises, splits and encodes
independently of each other. What a piece becomes is kept in an LRU. Two rules make that exact:

* Cuts are found with all tokens of that kind, the longest at a place first, as the library does;
  cuts are made only at those that take no white space with them.
* A piece is encoded behind the token on its left, so it sees what it would see in the whole text
  (a Metaspace that marks the text's first word only).

A tokenizer for which this does not hold encodes whole texts; :func:`why_whole` says why.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

#: what an entry of the cache takes beside its text and ids
_ENTRY_BYTES = 300
#: post-processors that only put fixed tokens around a text, or touch no ids at all
_PLAIN_POST_PROCESSORS = frozenset(
    {"ByteLevel", "TemplateProcessing", "RobertaProcessing", "BertProcessing"}
)
_PROBES = ("a", "b c", "")


def why_whole(description: Mapping[str, Any]) -> str | None:
    """Why texts of this tokenizer must be encoded as a whole; None if pieces give the same ids.

    Args:
        description: the tokenizer as its JSON describes it.
    """
    tokens = [t for t in description.get("added_tokens") or () if not t.get("normalized")]
    if any(t.get("single_word") for t in tokens):
        return "an added token matches whole words only"
    if not anchors_of(description):
        return "no added token cuts a text before normalisation"
    if (description.get("model") or {}).get("dropout"):
        return "its merges are random (dropout)"
    if not _is_plain(description.get("post_processor")):
        return "its post-processor may do more than put tokens around a text"
    return None


def anchors_of(description: Mapping[str, Any]) -> list[str]:
    """Added tokens at which a text may be cut: taken from the raw text, white space left alone."""
    tokens = [t for t in description.get("added_tokens") or () if not t.get("normalized")]
    greedy = any(t.get("lstrip") or t.get("rstrip") for t in tokens)
    found = []
    for token in tokens:
        text = token.get("content") or ""
        if not text or token.get("lstrip") or token.get("rstrip"):
            continue
        # A neighbour that takes white space may take the edge of a token made of it.
        if not (greedy and any(c.isspace() for c in text)):
            found.append(text)
    return found


def _is_plain(post_processor: Mapping[str, Any] | None) -> bool:
    if not post_processor:
        return True
    kind = post_processor.get("type")
    if kind == "Sequence":
        return all(_is_plain(p) for p in post_processor.get("processors") or ())
    return kind in _PLAIN_POST_PROCESSORS


@dataclass(slots=True)
class CacheCounts:
    """What the cache of pieces did: pieces found, pieces encoded, bytes held."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0


class SegmentEncoder:
    """One fast tokenizer with a cache of pieces. Safe to use from several threads.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``; copied, so that nobody else's padding or truncation
            acts on it.
        cache_bytes: bound of the cache, its own overhead counted.

    Raises:
        ValueError: pieces would not be exact for this tokenizer; says why.
    """

    def __init__(self, tokenizer: Any, cache_bytes: int = 64 << 20) -> None:
        from tokenizers import Tokenizer

        try:
            text = tokenizer.to_str()
        except Exception as error:  # a normaliser or pre-tokeniser written in Python
            raise ValueError(f"it has no JSON form ({error})") from error
        description = json.loads(text)
        reason = why_whole(description)
        if reason is None and tokenizer.encode_special_tokens:
            reason = "special tokens are encoded as text"
        if reason is not None:
            raise ValueError(reason)
        self._tokenizer = Tokenizer.from_str(text)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        raw = [t["content"] for t in description["added_tokens"] if not t.get("normalized")]
        longest_first = sorted((t for t in raw if t), key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._anchors: dict[str, int] = {
            t["content"]: t["id"]
            for t in description["added_tokens"]
            if t["content"] in set(anchors_of(description))
        }
        self._before, self._after = self._around()
        self._cache: OrderedDict[tuple[str, str], list[int]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._lock = Lock()
        self.counts = CacheCounts()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``, the same as the whole text's."""
        ids: list[int] = list(self._before) if add_special_tokens else []
        for anchor, piece in self._pieces(text):
            if anchor:
                ids.append(self._anchors[anchor])
            if piece:
                ids.extend(self._piece(anchor, piece))
        if add_special_tokens:
            ids.extend(self._after)
        return ids

    def new_chars(self, text: str) -> int:
        """Characters of ``text`` that the cache does not hold: what encoding it would cost."""
        return sum(len(p) for a, p in self._pieces(text) if p and (a, p) not in self._cache)

    def stable_length(self, text: str, stop: int) -> int:
        """Length of the beginning of ``text[:stop]`` whose ids no text behind ``stop`` can change.

        That is what lies before the last cut within it.
        """
        at = 0
        last = 0
        for anchor, piece in self._pieces(text[:stop]):
            if anchor:
                last = at
            at += len(anchor) + len(piece)
        return last

    def _pieces(self, text: str) -> list[tuple[str, str]]:
        """``text`` as (token on the left, or "", piece), in order."""
        anchors = self._anchors
        parts = self._pattern.split(text)
        pieces: list[tuple[str, str]] = []
        left, piece = "", parts[0]
        for index in range(1, len(parts), 2):
            token, after = parts[index], parts[index + 1]
            if token in anchors:
                pieces.append((left, piece))
                left, piece = token, after
            else:
                piece += token + after
        pieces.append((left, piece))
        return pieces

    def _piece(self, anchor: str, piece: str) -> Sequence[int]:
        key = (anchor, piece)
        with self._lock:
            held = self._cache.get(key)
            if held is not None:
                self._cache.move_to_end(key)
                self.counts.hits += 1
                return held
        ids = self._encode(anchor + piece, False)
        if anchor:
            del ids[0]
        size = _ENTRY_BYTES + 4 * len(piece) + 8 * len(ids)
        with self._lock:
            self.counts.misses += 1
            if size <= self._cache_bytes // 8 and key not in self._cache:
                self._cache[key] = ids
                self.counts.bytes += size
                while self.counts.bytes > self._cache_bytes:
                    (_, old), dropped = self._cache.popitem(last=False)
                    self.counts.bytes -= _ENTRY_BYTES + 4 * len(old) + 8 * len(dropped)
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call gives the interpreter to other threads meanwhile, and makes no offsets.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def _around(self) -> tuple[list[int], list[int]]:
        """Ids that ``add_special_tokens`` puts before and behind a text.

        Raises:
            ValueError: it does something else.
        """
        empty = self._encode("", True)
        for count in range(len(empty), -1, -1):
            before, after = empty[:count], empty[count:]
            if all(
                self._encode(probe, True) == before + self._encode(probe, False) + after
                for probe in _PROBES
            ):
                return before, after
        raise ValueError("special tokens are not simply put around a text")
