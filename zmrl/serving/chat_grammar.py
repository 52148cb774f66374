"""Grammars (response_format, structured outputs, forced tool calls) over our vocabulary.

xgrammar derives a vocabulary from tokenizers of three kinds and refuses others, ours among them
(xgrammar/tokenizer_info.py:427), so vLLM fails every request with a grammar. Ours is simple: id i < 256 is byte i. A
control token matches no text at all, so a JSON string cannot hold one; where K3's tool-call grammar means a control
token it says so by its id, not by its name.
"""

from __future__ import annotations

import json
import re
from typing import Any

import vllm.envs
import xgrammar
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from zmrl.model.tokenizer import CONTROL_TOKENS, END_OF_MSG_ID, ByteTokenizer

COMPILER_THREADS = 2
MARKERS = {name: 256 + i for i, name in enumerate(CONTROL_TOKENS)}
NAMES = re.compile("(" + "|".join(re.escape(name) for name in MARKERS) + ")")
NAMES_IN_REGEX = re.compile(r"(<\\\|\w+\\\|>)")
"""A name as a pattern spells it, e.g. <\\|sep\\|>."""
NO_TEXT = b"\xff"
"""What a control token is to the grammar: no UTF-8 text has this byte. Free text with exclusions takes any byte; K3's
tags have no exclusions left when `by_token_id` is done."""

Format = dict[str, Any]


class ByteGrammarBackend(XgrammarBackend):
    """vLLM's xgrammar backend with the vocabulary of `ByteTokenizer`; for other tokenizers it is vLLM's."""

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, ByteTokenizer):
            super().__post_init__()
            return
        self.disable_any_whitespace = self.vllm_config.structured_outputs_config.disable_any_whitespace
        self.num_speculative_tokens = 0
        self.compiler = xgrammar.GrammarCompiler(
            vocabulary(self.vocab_size),
            max_threads=COMPILER_THREADS,
            cache_enabled=True,
            cache_limit_bytes=vllm.envs.VLLM_XGRAMMAR_CACHE_MB << 20,
        )

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        if request_type == StructuredOutputOptions.STRUCTURAL_TAG and isinstance(self.tokenizer, ByteTokenizer):
            tag = json.loads(grammar_spec)
            if "format" in tag:
                grammar_spec = json.dumps(tag | {"format": by_token_id(tag["format"])})
        return super().compile_grammar(request_type, grammar_spec, stop_token_ids)


def vocabulary(vocab_size: int) -> xgrammar.TokenizerInfo:
    """xgrammar's description of `vocab_size` ids."""
    tokens = [bytes([i]) if i < 256 else NO_TEXT for i in range(vocab_size)]
    return xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[END_OF_MSG_ID], add_prefix_space=False
    )


def by_token_id(part: Format) -> Format:
    """A structural tag's format (xgrammar/structural_tag.py) with ids in place of control tokens' names.

    Triggered tags, which K3's tool calls do not use, keep their strings: those match text.
    """
    kind = part["type"]
    if kind == "const_string":
        return _sequence(_literal(part["value"]))
    if kind == "any_text":
        return part | {"excludes": [text for text in part.get("excludes", ()) if text not in MARKERS]}
    if kind == "regex":
        return _sequence(_pattern(part))
    if kind == "tag":
        return _tag(part)
    if kind == "tags_with_separator":
        return _tags(part)
    if kind in ("sequence", "or"):
        return part | {"elements": [by_token_id(element) for element in part["elements"]]}
    if kind in ("optional", "plus", "star", "repeat"):
        return part | {"content": by_token_id(part["content"])}
    return part


def _tag(part: Format) -> Format:
    content = by_token_id(part["content"])
    begin, ends = _literal(part["begin"]), part["end"] if isinstance(part["end"], list) else [part["end"]]
    endings = [_literal(end) for end in ends]
    if not any(element["type"] == "token" for elements in (begin, *endings) for element in elements):
        return part | {"content": content}
    end = endings[0] if len(endings) == 1 else [{"type": "or", "elements": [_sequence(e) for e in endings]}]
    return _sequence([*begin, content, *end])


def _tags(part: Format) -> Format:
    """Any of the tags, one after the other."""
    tags = [by_token_id(tag) for tag in part["tags"]]
    one = tags[0] if len(tags) == 1 else {"type": "or", "elements": tags}
    if part.get("stop_after_first"):
        found = one
    elif part["separator"]:
        rest = {"type": "star", "content": _sequence([*_literal(part["separator"]), one])}
        found = _sequence([one, rest])
    else:
        found = {"type": "plus", "content": one}
    return found if part.get("at_least_one") else {"type": "optional", "content": found}


def _literal(text: str | Format) -> list[Format]:
    """The elements that match the text; a token stays what it is."""
    if isinstance(text, dict):
        return [text]
    return [
        {"type": "token", "token": MARKERS[piece]} if piece in MARKERS else {"type": "const_string", "value": piece}
        for piece in NAMES.split(text)
        if piece
    ]


def _pattern(part: Format) -> list[Format]:
    pieces = NAMES_IN_REGEX.split(part["pattern"])
    if len(pieces) == 1:
        return [part]
    return [
        {"type": "token", "token": MARKERS[piece.replace("\\", "")]} if n % 2 else part | {"pattern": piece}
        for n, piece in enumerate(pieces)
        if piece
    ]


def _sequence(elements: list[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
