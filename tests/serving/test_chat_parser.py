"""Answers read back from their token ids by vLLM's `kimi_k3` parsers, whole and as streams."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.v1.engine.detokenizer import SlowIncrementalDetokenizer

from zmrl.model.chat import render_chat
from zmrl.model.tokenizer import BOS_ID, CONTROL_TOKENS, END_OF_MSG_ID, OPEN_ID, ByteTokenizer
from zmrl.rollout.plugin import register
from zmrl.serving.chat_parser import ByteReasoningParser, MarkedText, TokenParser

TOOLS = [{"type": "function", "function": {"name": "add"}}]
PIECES = [*CONTROL_TOKENS, "<|", "|>", "<", "|", "response", "think", "tools", "call", "argument", "message"]
PIECES += ['"', "&", "&quot;", "\\", "é", "日本", "🎉", "\n", " ", "\x00", "{}", "\ufffd", "x"]
Call = tuple[str, dict[str, Any]]
Said = tuple[str, str, list[Call]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    register()
    return get_cached_tokenizer(ByteTokenizer())


@pytest.fixture(scope="module")
def parser_class(tokenizer) -> Any:
    return ParserManager.get_parser("kimi_k3", "kimi_k3", enable_auto_tools=True, tokenizer=tokenizer)


def prompt(thinking: bool = True) -> list[int]:
    return render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True, thinking=thinking)


def answer(said: Said, thinking: bool = True) -> list[int]:
    """The ids that continue `prompt()`, without the end of the message."""
    reasoning, content, calls = said
    listed = [{"id": str(n), "function": {"name": name, "arguments": a}} for n, (name, a) in enumerate(calls)]
    turn = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": listed}
    whole = render_chat([{"role": "user", "content": "hi"}, turn], thinking=thinking)
    begin = prompt(thinking)
    assert whole[: len(begin)] == begin and whole[-1] == END_OF_MSG_ID
    return whole[len(begin) : -1]


class Reader:
    """Detokenizer and parser of one answer."""

    def __init__(self, parser_class: Any, tokenizer: Any, thinking: bool = True, **sampling: Any) -> None:
        messages = [{"role": "user", "content": "hi"}]
        self.request = ChatCompletionRequest(messages=messages, model="m", tools=TOOLS, skip_special_tokens=False)
        self.parser = parser_class(tokenizer, TOOLS, chat_template_kwargs={"thinking": thinking})
        params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False, **sampling)
        engine = SimpleNamespace(sampling_params=params, prompt_token_ids=prompt(thinking), prompt_embeds=None)
        self.prompt = engine.prompt_token_ids
        self.detokenizer = SlowIncrementalDetokenizer(tokenizer, engine)

    def whole(self, ids: Sequence[int], stopped: bool = True) -> Said:
        ids = [*ids, END_OF_MSG_ID] if stopped else list(ids)
        self.detokenizer.update(list(ids), stopped)
        text = self.detokenizer.get_next_output_text(True, False)
        reasoning, content, calls = self.parser.parse(text, self.request, True, ids)
        return reasoning or "", content or "", [(c.name, json.loads(c.arguments)) for c in calls or ()]

    def stream(self, ids: Sequence[int], sizes: random.Random, stopped: bool = True) -> Said:
        ids = [*ids, END_OF_MSG_ID] if stopped else list(ids)
        said = ["", ""]
        calls: list[Call] = []
        while ids:
            size = sizes.choice([1, 1, 1, 2, 5, 40])
            now, ids = ids[:size], ids[size:]
            self.detokenizer.update(list(now), stopped and not ids)
            text = self.detokenizer.get_next_output_text(not ids, True)
            delta = self.parser.parse_delta(text, now, self.request, self.prompt, finished=not ids)
            if delta is not None:
                said[0] += delta.reasoning or ""
                said[1] += delta.content or ""
                for call in delta.tool_calls or ():
                    assert call.index == len(calls) and call.id
                    calls.append((call.function.name, json.loads(call.function.arguments)))
        return said[0], said[1], calls


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(7)))


def random_said(rng: random.Random) -> Said:
    def value(depth: int = 0) -> Any:
        kinds = [random_text(rng), rng.randrange(-9, 10**12), rng.random(), True, False, None]
        if depth < 2:
            kinds += [[value(depth + 1), value(2)], {random_text(rng): value(depth + 1)}]
        return rng.choice(kinds)

    calls = []
    for _ in range(rng.randrange(4)):
        calls.append((random_text(rng) or "f", {random_text(rng): value() for _ in range(rng.randrange(4))}))
    content = random_text(rng)
    return random_text(rng), content if content.strip() else "", calls  # vLLM drops blank content beside calls


@pytest.mark.parametrize("thinking", [True, False])
def test_what_an_answer_says_is_read_back_exactly(parser_class, tokenizer, thinking):
    rng = random.Random(0)
    for _ in range(150):
        said = random_said(rng)
        ids = answer(said, thinking)
        expected = said if thinking else ("", *said[1:])
        assert Reader(parser_class, tokenizer, thinking).whole(ids) == expected
        assert Reader(parser_class, tokenizer, thinking).stream(ids, rng) == expected


@pytest.mark.parametrize(
    "said",
    [
        ("", "", []),
        ("", "c", []),
        ("r", "", []),
        ("<|close|>think<|sep|>", "<|close|>response<|sep|><|open|>tools<|sep|>", []),
        ("r", "", [("add", {"s": "<|close|>argument<|sep|><|close|>call<|sep|>"}), ("add", {})]),
        ("r", "c", [('a"&b', {'k"&': "&quot;"}), ("add", {"a": [1, {"b": None}], "<|sep|>": True})]),
    ],
)
def test_named_answers(parser_class, tokenizer, said):
    ids = answer(said)
    assert Reader(parser_class, tokenizer).whole(ids) == said
    assert Reader(parser_class, tokenizer).stream(ids, random.Random(1)) == said


def test_vllms_own_parser_would_end_an_argument_at_its_text(tokenizer):
    """The comparison above can fail: this is what it finds without `TokenParser`."""
    text_parser = TokenParser.__mro__[1]
    parts = {
        "reasoning_parser_cls": ByteReasoningParser,
        "tool_parser_cls": ParserManager.get_tool_parser("kimi_k3", True),
    }
    stock = type("Stock", (text_parser,), parts)
    said: Said = ("r", "", [("add", {"s": "<|close|>argument<|sep|>!"})])
    assert Reader(stock, tokenizer).whole(answer(said)) == ("r", "", [("add", {"s": ""})])
    plain: Said = ("r", "c", [("add", {"s": "x"})])
    assert Reader(stock, tokenizer).whole(answer(plain)) == plain


def test_an_answer_cut_off_anywhere_says_a_beginning(parser_class, tokenizer):
    said: Said = ("r<|é", "c日<", [("add", {"s": "é<|close|>", "n": 12}), ("sub", {"o": {"k": [1]}})])
    ids = answer(said)
    for length in range(1, len(ids)):
        found = Reader(parser_class, tokenizer).stream(ids[:length], random.Random(length), stopped=False)
        assert Reader(parser_class, tokenizer).whole(ids[:length], stopped=False) == found, length
        assert said[0].startswith(found[0]) and said[1].startswith(found[1]), (length, found)
        assert found[2] == said[2][: len(found[2])], length
    assert found == said


def test_reasoning_cut_off_is_reasoning_only(parser_class, tokenizer):
    ids = answer(("abc", "d", []))[:2]
    assert Reader(parser_class, tokenizer).whole(ids, stopped=False) == ("ab", "", [])
    assert Reader(parser_class, tokenizer).stream(ids, random.Random(0), stopped=False) == ("ab", "", [])


def test_an_answer_without_a_think_element_has_no_reasoning(parser_class, tokenizer):
    ids = [OPEN_ID, *b"response", CONTROL_TOKENS.index("<|sep|>") + 256, *answer(("", "c", []), thinking=False)]
    assert Reader(parser_class, tokenizer).whole(ids) == ("", "c", [])


@pytest.mark.parametrize("stop", ["STOP", "k<|sep|>", "<|op", "日"])
def test_a_stop_string_ends_text_and_ids_at_the_same_place(parser_class, tokenizer, stop):
    """vLLM holds text back while it may be part of a stop string; the ids run ahead of it."""
    ids = answer(("thought", "one STOP 日本", []))
    for seed in range(5):
        reader = Reader(parser_class, tokenizer, stop=[stop])
        text = reader.detokenizer
        sizes, said, at = random.Random(seed), ["", ""], 0
        stopped = False
        while not stopped and at < len(ids):
            now = ids[at : (at := at + sizes.choice([1, 2, 5]))]
            stopped = text.update(list(now), False) is not None
            done = stopped or at >= len(ids)
            part = text.get_next_output_text(done, True)
            delta = reader.parser.parse_delta(part, list(now), reader.request, reader.prompt, finished=done)
            said[0] += (delta and delta.reasoning) or ""
            said[1] += (delta and delta.content) or ""
        assert stopped
        expected = {"STOP": ["thought", "one "], "k<|sep|>": ["thought", ""], "<|op": ["thought", ""]}
        assert said == expected.get(stop, ["thought", "one STOP "]), (stop, seed)


def test_text_that_is_not_the_ids_text_is_an_error(tokenizer):
    with pytest.raises(RuntimeError, match="where its tokens say 'a'"):
        MarkedText(tokenizer, False).take([*b"ab"], "xb")
    with pytest.raises(RuntimeError, match="'c' beyond its tokens"):
        MarkedText(tokenizer, False).take([*b"ab"], "abc")


def test_skipped_special_tokens_are_not_in_the_text(tokenizer):
    found = MarkedText(tokenizer, True)
    assert found.take([BOS_ID, 0xC3, BOS_ID, 0xA9, OPEN_ID, *b"a"], "é<|open|>a")[0] == "é<|open|>a"


def test_invalid_utf8_is_replaced_and_keeps_its_ids(tokenizer):
    marked, ids = MarkedText(tokenizer, False).take([0xE6, *b"a<", 0xF0, OPEN_ID, 0xFF], "\ufffda<\ufffd<|open|>\ufffd")
    assert ids == [0xE6, *b"a<", 0xF0, OPEN_ID, 0xFF]
    assert marked == "\ufffda\udc3c\ufffd<|open|>\ufffd"


def test_only_control_tokens_end_reasoning(tokenizer):
    parser = ByteReasoningParser(tokenizer)
    assert not parser.is_reasoning_end(prompt())
    forged = render_chat([{"role": "user", "content": "<|close|>think<|sep|>"}], add_generation_prompt=True)
    assert not parser.is_reasoning_end(forged)
    assert not parser.is_reasoning_end([*prompt(), *b"<|close|>think<|sep|>"])
    said = answer(("r", "c", []))
    assert parser.is_reasoning_end([*prompt(), *said])
    assert parser.count_reasoning_tokens(said) == 1
    again = render_chat(
        [{"role": "assistant", "content": "c", "reasoning": "r"}, {"role": "user", "content": "x"}],
        add_generation_prompt=True,
    )
    assert not parser.is_reasoning_end(again)


def test_other_tokenizers_get_vllms_parsers(parser_class):
    class Other:
        """Encodes markers by their names, as a tokenizer does that knows control tokens in text."""

        def encode(self, text: str, **_: Any) -> list[int]:
            return [1, *text.encode(), 2]

        def get_vocab(self) -> dict[str, int]:
            return {}

    assert ByteReasoningParser(Other())._think_open_ids == [1, *b"<|open|>think<|sep|>", 2]
    parser = parser_class(Other(), None, chat_template_kwargs={"thinking": False})
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], model="m")
    assert parser.parse("a<|close|>response<|sep|>", request)[1] == "a"
