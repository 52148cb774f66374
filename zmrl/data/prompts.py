"""The prompt format: the one place that turns problems and messages into token ids.

Kimi K3 writes a message as `<|open|>message role="user"<|sep|>text<|close|>message<|sep|><|end_of_msg|>` and an
assistant's turn as a think element and a response element (specification 6). At one byte a token that costs some 60
tokens a turn, more than a problem. The byte-level models use the same control tokens and the same order, without the
names that can be left out:

    prompt     [BOS] <|open|> question <|close|> <|sep|>
    response   work <|sep|> \\boxed{042} <|end_of_msg|>

The work is the thinking part; a terse answer has an empty one (`<|sep|> \\boxed{042} <|end_of_msg|>`). A message whose
role is neither user nor assistant names it: `<|open|> role <|sep|> text <|close|>`. Control tokens are single ids and
come from this module only: text is encoded as bytes, so a question cannot forge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zmrl.model.tokenizer import BOS_ID, CLOSE_ID, END_OF_MSG_ID, OPEN_ID, SEP_ID


class Answer(NamedTuple):
    """The parts of a response."""

    work: str
    """The thinking part; empty if terse."""
    text: str
    """The response part, e.g. `\\boxed{042}`."""
    complete: bool
    """Whether it ended with <|end_of_msg|>."""


def prompt_ids(question: str) -> list[int]:
    """Ids of a prompt that asks `question`, up to and including the assistant's prefix."""
    return render_messages([{"role": "user", "content": question}], add_generation_prompt=True)


def response_ids(work: str, text: str) -> list[int]:
    """Ids of a complete response: thinking part, <|sep|>, response part, <|end_of_msg|>."""
    return [*_text(work), SEP_ID, *_text(text), END_OF_MSG_ID]


def render_messages(messages: Sequence[dict[str, str]], add_generation_prompt: bool = False) -> list[int]:
    """Ids of a conversation. Messages have `role`, `content`, and for the assistant optionally `reasoning_content`.

    Raises ValueError for a message without text content.
    """
    ids = [BOS_ID]
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):  # OpenAI's content parts
            content = "".join(part.get("text", "") for part in content if part.get("type") == "text")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"a message needs a role and text content, not {message!r}")
        if role == "assistant":
            ids += [SEP_ID, *response_ids(message.get("reasoning_content") or "", content)]
        elif role == "user":
            ids += [OPEN_ID, *_text(content), CLOSE_ID]
        else:
            ids += [OPEN_ID, *_text(role), SEP_ID, *_text(content), CLOSE_ID]
    return [*ids, SEP_ID] if add_generation_prompt else ids


def parse_response(ids: Sequence[int]) -> Answer:
    """Split the ids that a model generated. Without <|sep|> everything is work and the response part is empty."""
    ids = list(ids)
    complete = END_OF_MSG_ID in ids
    if complete:
        ids = ids[: ids.index(END_OF_MSG_ID)]
    cut = len(ids) - 1 - ids[::-1].index(SEP_ID) if SEP_ID in ids else len(ids)
    return Answer(_decode(ids[:cut]), _decode(ids[cut + 1 :]), complete)


def boxed(answer: int) -> str:
    """The response part for an answer 0..999: three digits, as AIME writes them."""
    return f"\\boxed{{{answer:03d}}}"


def _text(text: str) -> list[int]:
    return list(text.encode("utf-8", errors="replace"))


def _decode(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
