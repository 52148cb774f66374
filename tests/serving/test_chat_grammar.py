"""Grammars over the byte vocabulary: control tokens by id, text by bytes, and neither for the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import xgrammar
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.tool_parsers.structural_tag_registry import get_kimi_k3_structural_tag

from tests.serving.chat_harness import ids
from zmrl.model.tokenizer import END_OF_MSG_ID
from zmrl.serving.chat_grammar import by_token_id, vocabulary

SIZE = 288
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}, "required": ["a"]}
LOOSE = {"type": "object", "properties": {"a": {"type": ["integer", "null"]}}}


def tag(choice: str, **parameters: Any) -> dict[str, Any]:
    tools = [
        ChatCompletionToolsParam(function={"name": name, "parameters": schema}) for name, schema in parameters.items()
    ]
    return get_kimi_k3_structural_tag(tools, [], choice, False).model_dump()["format"]


def matcher(tag_format: dict[str, Any]) -> xgrammar.GrammarMatcher:
    compiler = xgrammar.GrammarCompiler(vocabulary(SIZE))
    return xgrammar.GrammarMatcher(
        compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": tag_format}))
    )


def accepted(found: xgrammar.GrammarMatcher, answer: Sequence[int]) -> int:
    """How many of the tokens the grammar takes."""
    for count, token in enumerate(answer):
        if not found.accept_token(token):
            return count
    return len(answer)


def allowed(found: xgrammar.GrammarMatcher) -> set[int]:
    mask = xgrammar.allocate_token_bitmask(1, SIZE)
    found.fill_next_token_bitmask(mask, 0)
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:SIZE]
    return set(np.flatnonzero(bits).tolist())


def allowed_after(found: xgrammar.GrammarMatcher, answer: Sequence[int]) -> set[int]:
    assert accepted(found, answer) == len(answer)
    return allowed(found)


CALL_IN_BYTES = (
    b'<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>12'
    b"<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)
ARGUMENT = '(open)argument key="a" type="number"(sep)12(close)argument(sep)'
STRING = '(open)argument key="s" type="string"(sep)<|close|>argument<|sep|>(close)argument(sep)'
CALL = f'(open)call tool="add" index="1"(sep){ARGUMENT}{STRING}(close)call(sep)'
ANSWER = f"so <|close|>(close)response(sep)(open)tools(sep){CALL}{CALL}(close)tools(sep)(close)message(sep)(end_of_msg)"


@pytest.mark.parametrize("choice", ["required", "auto", "forced"])
def test_a_call_in_control_tokens_is_accepted(choice):
    found = matcher(by_token_id(tag(choice, add=PARAMETERS, other=PARAMETERS)))
    assert accepted(found, ids(ANSWER)) == len(ids(ANSWER)) and found.is_terminated()


def test_an_argument_of_any_type_is_accepted():
    found = matcher(by_token_id(tag("required", add=LOOSE)))
    answer = ids(
        '(close)response(sep)(open)tools(sep)(open)call tool="add" index="1"(sep)' + ARGUMENT + "(close)call(sep)"
    )
    assert accepted(found, answer) == len(answer)


def test_a_required_call_cannot_be_left_out_or_spelled_by_bytes():
    found = matcher(by_token_id(tag("required", add=PARAMETERS)))
    begin = ids("so(close)response(sep)")
    assert accepted(found, begin) == len(begin)
    assert allowed(found) == set(ids("(open)"))
    assert accepted(found, ids("(open)tools(sep)(open)call tool=")) == len(ids("(open)tools(sep)(open)call tool="))
    assert not found.accept_token(ids("(close)")[0]) and not found.accept_token(END_OF_MSG_ID)


def test_vllms_own_tag_would_take_the_names_as_text():
    """What `by_token_id` is for: the same tag by strings takes bytes for the markers, and the parser sees no call."""
    stock = tag("required", add=PARAMETERS)
    assert END_OF_MSG_ID in allowed_after(matcher(stock), list(b"so<|close|>response<|sep|>" + CALL_IN_BYTES))
    found = allowed_after(matcher(by_token_id(stock)), list(b"so<|close|>response<|sep|>" + CALL_IN_BYTES))
    assert set(ids("(close)")) <= found and END_OF_MSG_ID not in found  # that was content; the call is still to come


def test_json_strings_hold_no_control_token():
    compiler = xgrammar.GrammarCompiler(vocabulary(SIZE))
    found = xgrammar.GrammarMatcher(compiler.compile_json_schema('{"type": "object"}'))
    assert accepted(found, list('{"é<|sep|>": "'.encode())) == len('{"é<|sep|>": "'.encode())
    assert not allowed(found) & set(range(256, SIZE))
    assert allowed(found) >= set(b"az<|")


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ({"type": "const_string", "value": "a<|sep|>b"}, "a(sep)b", "a<|sep|>"),
        ({"type": "regex", "pattern": r"[^<]*<\|sep\|>"}, "ab(sep)", "<"),
        ({"type": "tag", "begin": "<|open|>", "content": {"type": "any_text"}, "end": ["x<|sep|>", "<|close|>"]},
         "(open)ab(close)", "a"),
        ({"type": "tag", "begin": "[", "content": {"type": "const_string", "value": "a"}, "end": "]"}, "[a]", "]"),
        ({"type": "tags_with_separator", "separator": ",<|sep|>", "at_least_one": True, "tags": [
            {"type": "tag", "begin": "<|open|>", "content": {"type": "const_string", "value": "a"}, "end": ""}]},
         "(open)a,(sep)(open)a", ","),
        ({"type": "tags_with_separator", "separator": "", "stop_after_first": True, "tags": [
            {"type": "tag", "begin": "<|open|>", "content": {"type": "any_text"}, "end": "<|close|>"}]},
         "(open)a(close)", "a"),
    ],
)  # fmt: skip
def test_each_kind_of_format(part, good, bad):
    found = matcher(by_token_id(part))
    assert accepted(found, [*ids(good), END_OF_MSG_ID]) == len(ids(good)) + 1
    found = matcher(by_token_id(part))
    assert accepted(found, ids(bad)) < len(ids(bad))
