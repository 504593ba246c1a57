# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of the designs that models use, and chat templates of theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The tide came in and the boats went out, 12 of them; nobody said a word.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # three",
    "Größe, naïve, 你好世界, привет мир, 👋🏽 emoji, <b>html</b> <|im_start|>user",
    '{"name": "look_up", "arguments": {"word": "tide"}}\r\n\t tabs   and   spaces',
] * 3
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _special(*texts: str, **options: Any) -> list[AddedToken]:
    return [AddedToken(t, special=True, normalized=False, **options) for t in texts]


def _bpe(vocab: int = 600, alphabet: list[str] | None = None, **model: Any) -> Any:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=alphabet or [], show_progress=False
    )
    return Tokenizer(models.BPE(**model)), trainer


def qwen() -> Tokenizer:
    """Byte-level BPE behind a splitting pattern; NFC; added tokens that are no special tokens."""
    tokenizer, trainer = _bpe(alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(_special(*CHATML))
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


def llama3() -> Tokenizer:
    """Byte-level BPE with a prefix space, and a token put in front of each text."""
    tokenizer, trainer = _bpe(alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(_special("<s>", *CHATML))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            ),
        ]
    )
    return tokenizer


def gemma() -> Tokenizer:
    """BPE over "▁" for spaces with byte fallback; runs of newlines as added tokens."""
    tokenizer, trainer = _bpe(800, byte_fallback=True, unk_token=None)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(_special("<bos>", *CHATML))
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("\n\n", "\n\n\n", "▁▁")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <|endoftext|>",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("<bos>", "<|endoftext|>")],
    )
    return tokenizer


def metaspace(scheme: str) -> Callable[[], Tokenizer]:
    """Unigram behind a Metaspace that marks first words as ``scheme`` says."""

    def make() -> Tokenizer:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(
            vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        tokenizer.add_special_tokens(_special("<s>", *CHATML))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
        return tokenizer

    return make


def llama2() -> Tokenizer:
    """The older SentencePiece form: "▁" is prepended by the normaliser."""
    tokenizer, trainer = _bpe(800, byte_fallback=True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(_special("<s>", *CHATML))
    return tokenizer


def bert() -> Tokenizer:
    """WordPiece in lower case, added tokens matched before and after that."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(_special("[CLS]", "[SEP]", *CHATML))
    tokenizer.add_tokens([AddedToken("Tide", normalized=True)])
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", tokenizer.token_to_id("[SEP]")), ("[CLS]", tokenizer.token_to_id("[CLS]"))
    )
    return tokenizer


def greedy() -> Tokenizer:
    """Added tokens that take white space on their left or right, and one made of white space."""
    tokenizer = llama3()
    tokenizer.add_special_tokens(_special("<mask>", lstrip=True))
    tokenizer.add_special_tokens(_special("<sep>", rstrip=True))
    tokenizer.add_special_tokens(_special("<both>", lstrip=True, rstrip=True))
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("\n\n", " <x>")])
    return tokenizer


def overlapping() -> Tokenizer:
    """Added tokens that begin, end and contain each other."""
    tokenizer = qwen()
    names = ("<a>", "<a><b>", "b><", "><|im_start|>", "<|im_", "im_start")
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in names])
    return tokenizer


DESIGNS: dict[str, Callable[[], Tokenizer]] = {
    "qwen": qwen,
    "llama3": llama3,
    "gemma": gemma,
    "metaspace_first": metaspace("first"),
    "metaspace_always": metaspace("always"),
    "metaspace_never": metaspace("never"),
    "llama2": llama2,
    "bert": bert,
    "greedy": greedy,
    "overlapping": overlapping,
}

#: ChatML in the manner of Qwen: thinking, tools as JSON, only text.
QWEN_TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content is string and loop.last %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{- call | tojson }}{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

#: One that loops over content parts, knows developers, efforts and documents, and prints a token.
PARTS_TEMPLATE = """
{%- set chat = messages %}
{%- macro show(content) %}
{%- if content is string %}{{ content }}{%- else %}
{%- for part in content %}
{%- if part.type == 'text' %}{{ part.text }}
{%- if part.cache_control %}[{{ part.cache_control | tojson }}]{%- endif %}
{%- elif part.type == 'image' %}<|image|>{%- endif %}
{%- endfor %}{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if reasoning_effort %}effort={{ reasoning_effort }}{%- endif %}
{%- for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{%- endfor %}
{%- for message in chat %}
{{- '<|im_start|>' + (message.name or message.role) + '\\n' }}{{- show(message.content) }}
{%- if message.role == 'developer' %}!{%- endif %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{%- endfor %}
{%- if message.reasoning %}({{ message.reasoning }}){%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- for tool in tools or [] %}{{ tool.function.name }}{{ tool | tojson(indent=1) }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{{ mood or '' }}{%- endif %}
"""


def write_model(
    out: Path, tokenizer: Tokenizer, chat_template: str | None, bos_token: str | None = None
) -> Path:
    """A model's directory as far as tokenizer and renderer read it, with a tiny MiMo's sizes."""
    from tools.tiny_mimo import TinyMiMo, write_configs, write_json

    out.mkdir(parents=True, exist_ok=True)
    write_configs(TinyMiMo(vocab_size=2048), out)
    tokenizer.save(str(out / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
    }
    if bos_token is not None:
        config["bos_token"] = bos_token
    if chat_template is not None:
        config["chat_template"] = chat_template
    write_json(out / "tokenizer_config.json", config)
    return out
