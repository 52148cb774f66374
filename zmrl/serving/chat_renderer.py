"""OpenAI messages to token ids, behind vLLM's `/v1/chat/completions`.

vLLM has a renderer for Kimi K3 that takes ids from the tokenizer (renderers/kimi_k3.py). This one differs from it in
what it refuses: all that a text-only model has no form for is a 400 that names it, before vLLM would fetch an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.kimi_k3 import KimiK3Renderer
from vllm.renderers.params import ChatParams

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
SWITCHES = ("thinking", "enable_thinking")
OPTIONS = {
    *SWITCHES,
    "thinking_effort",
    "reasoning_effort",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
}
"""Keywords of a template that the format has a meaning for."""
FRONT_ENDS = {"tokenize", "cohere_format"}
"""Those that vLLM's front end adds to every request (renderers/online_renderer.py:784, launchers/cli_args.py:417)."""


class ChatRenderer(KimiK3Renderer):
    """K3's format, or the one named by `--default-chat-template-kwargs '{"chat_template": "training"}'`.

    vLLM joins the text parts of a message by newlines before they get here.
    """

    def render_messages(self, messages: Sequence[Any], params: ChatParams) -> Any:
        """Conversation and prompt. VLLMValidationError: an answer 400 with the reason."""
        with _client_errors():
            return super().render_messages(_text_only(messages), _checked(params))

    async def render_messages_async(self, messages: Sequence[Any], params: ChatParams) -> Any:
        """As `render_messages`."""
        with _client_errors():
            return await super().render_messages_async(_text_only(messages), _checked(params))


def _checked(params: ChatParams) -> ChatParams:
    """With the format named. Refuses keywords that would change nothing, or the form of the result."""
    options = params.chat_template_kwargs or {}
    given = {name: value for name, value in options.items() if value is not None and name not in FRONT_ENDS}
    if unknown := sorted(set(given) - OPTIONS):
        raise ValueError(f"chat_template_kwargs: this format has no {', '.join(unknown)}")
    for name in SWITCHES:
        if not isinstance(given.get(name, True), bool):
            raise ValueError(f"chat_template_kwargs: {name} has to be true or false, not {given[name]!r}")
    if given.get("reasoning_effort") == "none" and given.get("thinking", given.get("enable_thinking", True)):
        # The parser of the answer reads the switches only, and would wait for the end of reasoning.
        raise ValueError("reasoning_effort 'none' contradicts thinking; say enable_thinking false")
    name = params.chat_template or given.get("chat_template") or "kimi_k3"
    return replace(params, chat_template=name, chat_template_kwargs=given)


def _text_only(messages: Sequence[Any]) -> list[Any]:
    """The messages with their parts as lists: pydantic hands out iterators that can be read once."""
    found = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            content = list(content)
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else "text"
                if kind not in TEXT_PARTS:
                    raise ValueError(f"message {number} has a content part of type {kind!r}; the model reads text only")
            message = {**message, "content": content}
        found.append(message)
    return found


@contextmanager
def _client_errors() -> Iterator[None]:
    try:
        yield
    except VLLMValidationError:
        raise
    except RecursionError as error:
        raise VLLMValidationError("the messages or tools are nested too deeply", parameter="messages") from error
    except (ValueError, TypeError) as error:
        raise VLLMValidationError(str(error), parameter="messages") from error
