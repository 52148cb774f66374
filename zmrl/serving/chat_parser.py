"""What a K3 answer says (reasoning, content, tool calls), read from its token ids.

vLLM's `kimi_k3` parsers read the answer's text, in which a control token looks like the same characters written by
bytes: a string argument that holds `<|close|>argument<|sep|>` would end there. Here they get a text in which the bytes'
"<" is another character, so that only control tokens make markers, and what they found is put back. Their own
understanding of the format stays as it is. Other models' tokenizers get vLLM's parsers unchanged.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.parser.kimi_k3 import KimiK3Parser
from vllm.reasoning.kimi_k3_reasoning_parser import KimiK3ReasoningParser

from zmrl.model.tokenizer import CLOSE_ID, OPEN_ID, SEP_ID, ByteTokenizer

LESS_THAN = "\udc3c"
"""In place of a "<" from bytes. A lone surrogate: no bytes decode to it."""
MARKERS = [f"<|{end}|>{tag}<|sep|>" for end in ("open", "close") for tag in ("think", "response", "tools", "message")]
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class ByteReasoningParser(KimiK3ReasoningParser):
    """vLLM's, with the markers' ids from the tokenizer's ids: its text never encodes to a control token.

    The engine core asks it, too, whether reasoning is over: grammars hold from there on.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        if isinstance(tokenizer, ByteTokenizer):
            self._think_open_ids = [OPEN_ID, *b"think", SEP_ID]
            self._think_close_ids = [CLOSE_ID, *b"think", SEP_ID]
            self._response_open_ids = [OPEN_ID, *b"response", SEP_ID]


class TokenParser(KimiK3Parser):
    """vLLM's, fed with text that is unambiguous. One a request."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._stream: MarkedText | None = None

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> Any:
        """(reasoning, content, tool calls) of a whole answer."""
        if isinstance(self.model_tokenizer, ByteTokenizer):
            model_output, _ = self._marked(request).take(model_output_token_ids, model_output)
            model_output = _without_unfinished_marker(model_output)
        reasoning, content, calls = super().parse(model_output, request, enable_auto_tools, model_output_token_ids)
        for call in calls or ():
            call.name, call.arguments = _plain(call.name), _plain(call.arguments)
        return _plain(reasoning), _plain(content), calls

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """The next part of a stream. Its ids may be ahead of its text, which vLLM holds back for stop strings."""
        if isinstance(self.model_tokenizer, ByteTokenizer):
            self._stream = self._stream or self._marked(request)
            delta_text, delta_token_ids = self._stream.take(delta_token_ids, delta_text)
        found = super().parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished=finished)
        if found is not None:
            found.reasoning, found.content = _plain(found.reasoning), _plain(found.content)
            for call in found.tool_calls or ():
                if call.function is not None:
                    call.function.name = _plain(call.function.name)
                    call.function.arguments = _plain(call.function.arguments)
        return found

    def _marked(self, request: Any) -> MarkedText:
        return MarkedText(self.model_tokenizer, bool(getattr(request, "skip_special_tokens", True)))


class _Piece(NamedTuple):
    text: str
    marked: str
    ids: tuple[int, ...]


class MarkedText:
    """Pairs an answer's text with its ids, piece by piece: a character or a control token's name."""

    def __init__(self, tokenizer: ByteTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = set(tokenizer.all_special_ids) if skip_special_tokens else set()
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        """Ids whose characters are not complete."""
        self._pieces: deque[_Piece] = deque()
        self._text = ""
        """Text whose pieces are not complete."""

    def take(self, ids: Sequence[int], text: str) -> tuple[str, list[int]]:
        """The marked form of `text`, and the ids that it comes from. `ids` and `text` continue the former calls'.

        The text decides how far: it lacks the stop token, an incomplete last character and what a stop string cut off.
        RuntimeError if it is not what the ids say.
        """
        for i in ids:
            self._add(i)
        self._text += text
        at = 0
        marked: list[str] = []
        taken: list[int] = []
        while self._pieces and at + len(self._pieces[0].text) <= len(self._text):
            piece = self._pieces.popleft()
            if not self._text.startswith(piece.text, at):
                raise RuntimeError(
                    f"the answer's text has {self._text[at : at + 20]!r} where its tokens say {piece.text!r}"
                )
            at += len(piece.text)
            marked.append(piece.marked)
            taken += piece.ids
        self._text = self._text[at:]
        if self._text and not self._pieces:
            raise RuntimeError(f"the answer's text has {self._text[:20]!r} beyond its tokens")
        return "".join(marked), taken

    def _add(self, i: int) -> None:
        self._ids.append(i)
        if i in self._skipped:
            return
        self._characters(self._bytes.decode(bytes([i]) if i < 256 else b"", final=i >= 256))
        if i >= 256:
            self._bytes.reset()
            name = self._tokenizer.convert_ids_to_tokens(i)
            self._pieces.append(_Piece(name, name, tuple(self._ids)))
            self._ids = []

    def _characters(self, text: str) -> None:
        for character in text:
            self._pieces.append(_Piece(character, LESS_THAN if character == "<" else character, ()))
        if text:
            self._pieces[-1] = self._pieces[-1]._replace(ids=tuple(self._ids))
            self._ids = []


def _without_unfinished_marker(marked: str) -> str:
    """An answer cut off inside a marker ends before it; vLLM does so in streams only."""
    at = marked.rfind("<|")  # of a finished marker this is its <|sep|>
    return marked[:at] if at >= 0 and any(marker.startswith(marked[at:]) for marker in MARKERS) else marked


def _plain(text: Any) -> Any:
    """The text (or None) as the model wrote it. A lone surrogate that JSON escapes spelled cannot be sent: U+FFFD."""
    return text and LONE_SURROGATE.sub("\ufffd", text.replace(LESS_THAN, "<"))
