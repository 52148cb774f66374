"""Kimi K3's chat format as token ids (specification 6): what `/v1/chat/completions` feeds the model.

    element    <|open|> name attribute="value" ... <|sep|> body <|close|> name <|sep|>
    message    the element `message role="..."`, then <|end_of_msg|>
    assistant  message of the elements think (in thinking mode, also when empty), response, and tools if there are calls
    tools      call tool="NAME" index="1": argument key="KEY" type="TYPE": the value; strings raw, all else JSON

Control tokens are placed by id, for structure only. Everything that a client or a model wrote (content, names, tool
arguments, results, schemas) is encoded as bytes, and attributes are escaped, so no text can forge an element, an
attribute or the end of a message.

Structure, attributes and order are K3's. The words of the four notices that a request's options turn into are ours;
a checkpoint that was trained on other words needs those in their place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from zmrl.model.tokenizer import CLOSE_ID, END_OF_MSG_ID, OPEN_ID, SEP_ID

THINKING_EFFORTS = ("low", "high", "max")
JSON_TYPES = {bool: "boolean", type(None): "null", int: "number", float: "number", dict: "object", list: "array"}

TOOLS_NOTICE = "# Tools\nFunctions that may be called, as JSON schemas:\n\n```json\n{json}\n```"
EFFORT_NOTICE = "Thinking effort for the think element of each answer (low, high or max): {effort}."
TOOL_CHOICE_NOTICES = {
    "required": "Tool choice: required. The next message has to call at least one function.",
    "none": "Tool choice: none. The next message must not call a function.",
}
RESPONSE_FORMAT_NOTICE = "Response format: {type}. The response element has to be plain JSON, without a code fence."
SCHEMA_NOTICE = "\nIt has to match this schema:\n```json\n{json}\n```"

Messages = Sequence[Mapping[str, Any]]


def render_chat(
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    thinking: bool = True,
    thinking_effort: str = "max",
    tool_choice: Any = None,
    response_format: Any = None,
) -> list[int]:
    """Ids of a conversation in OpenAI's message form.

    `role` is system, user, assistant or tool; `content` a string or a list of text parts. An assistant message may have
    `reasoning` (or `reasoning_content`) and `tool_calls`; the results of its calls follow it directly, each with the
    `tool_call_id` of its call, in any order. `tool_choice` and `response_format` are OpenAI's values; what says nothing
    to the model (auto, a named function, text) adds nothing. Without `thinking` there are no think elements, and
    the model is asked to answer at once.

    Raises ValueError that names the message and what is wrong with it.
    """
    if thinking_effort not in THINKING_EFFORTS:
        raise ValueError(f"thinking_effort {thinking_effort!r}: use one of {', '.join(THINKING_EFFORTS)}")
    ids: list[int] = []
    if tools:
        ids += _notice("tool-declare", TOOLS_NOTICE.format(json=_json("tools", [_declared(tool) for tool in tools])))
    if thinking:
        ids += _notice("thinking-effort", EFFORT_NOTICE.format(effort=thinking_effort))
    calls: Sequence[Mapping[str, Any]] = ()
    results: dict[int, list[int]] = {}
    for number, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            position, result = _tool_result(message, number, calls)
            if position in results:
                raise ValueError(f"message {number} is a second result of tool call {message['tool_call_id']!r}")
            results[position] = result
            continue
        ids += _in_order(results)
        calls, results = (), {}
        if role == "assistant":
            calls = message.get("tool_calls") or ()
            ids += _assistant(message, number, thinking)
        elif role in ("system", "user"):
            ids += _message(_bytes(_content(message, number)), role=role, name=message.get("name"))
        else:
            raise ValueError(f"message {number} has role {role!r}; use system, user, assistant or tool")
    ids += _in_order(results)
    ids += _tail(tool_choice, response_format)
    if add_generation_prompt:
        ids += [*_open("message", role="assistant"), *_open("think" if thinking else "response")]
    return ids


def _assistant(message: Mapping[str, Any], number: int, thinking: bool) -> list[int]:
    body: list[int] = []
    if thinking:
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        if not isinstance(reasoning, str):
            raise ValueError(f"message {number} has reasoning that is not a string")
        body += _element("think", _bytes(reasoning))
    body += _element("response", _bytes(_content(message, number)))
    calls = message.get("tool_calls") or ()
    if calls:
        where = f"message {number}, tool call"
        body += _element("tools", [i for n, call in enumerate(calls) for i in _call(call, f"{where} {n}", n)])
    return _message(body, role="assistant", name=message.get("name"))


def _call(call: Mapping[str, Any], where: str, index: int) -> list[int]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise ValueError(f"{where}: it needs a function with a name")
    return _element("call", _arguments(function.get("arguments"), where), tool=name, index=str(index + 1))


def _arguments(arguments: Any, where: str) -> list[int]:
    """Arguments are an object or its JSON. A string that is no JSON object goes in whole, as K3's input form has it."""
    parsed = arguments or {}
    if isinstance(parsed, str):
        try:
            parsed = json.loads(parsed)
        except (ValueError, RecursionError):
            parsed = None
    if isinstance(parsed, Mapping):
        return [i for key, value in parsed.items() for i in _argument(str(key), value, where)]
    if not isinstance(arguments, str):
        raise ValueError(f"{where}: arguments have to be an object or a string, not {type(arguments).__name__}")
    return _element("json", _bytes(arguments), type="object")


def _argument(key: str, value: Any, where: str) -> list[int]:
    if isinstance(value, str):
        return _element("argument", _bytes(value), key=key, type="string")
    if type(value) not in JSON_TYPES:
        raise ValueError(f"{where}, argument {key!r}: {type(value).__name__} is no JSON value")
    text = _json(f"{where}, argument {key!r}", value, separators=None, sort_keys=False)
    return _element("argument", _bytes(text), key=key, type=JSON_TYPES[type(value)])


def _tool_result(message: Mapping[str, Any], number: int, calls: Sequence[Mapping[str, Any]]) -> tuple[int, list[int]]:
    """The position of the call that this message answers, and the message's ids."""
    name = message.get("tool_call_id")
    positions = [p for p, call in enumerate(calls) if name is not None and call.get("id") == name]
    if len(positions) != 1:
        raise ValueError(
            f"message {number} is the result of tool call {name!r}: the assistant message before the results has "
            f"{len(positions)} calls with that id, and there must be one"
        )
    tool = calls[positions[0]]["function"]["name"]
    body = _bytes(_content(message, number))
    return positions[0], _message(body, role="tool", tool=tool, index=str(positions[0] + 1))


def _in_order(results: dict[int, list[int]]) -> list[int]:
    return [i for position in sorted(results) for i in results[position]]


def _tail(tool_choice: Any, response_format: Any) -> list[int]:
    """Notices that hold for the next answer only; last, so that they leave the conversation's prefix as it was."""
    ids: list[int] = []
    if isinstance(tool_choice, str) and tool_choice in TOOL_CHOICE_NOTICES:
        ids += _notice("tool-choice", TOOL_CHOICE_NOTICES[tool_choice])
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind in ("json_object", "json_schema"):
        text = RESPONSE_FORMAT_NOTICE.format(type=kind)
        if kind == "json_schema":
            described = response_format.get("json_schema")
            if not isinstance(described, Mapping):
                raise ValueError("response_format of type json_schema needs a json_schema")
            schema = described.get("schema", described.get("json_schema"))  # the field's name here and in vLLM
            text += SCHEMA_NOTICE.format(json=_json("response_format", schema))
        ids += _notice("response-format", text)
    return ids


def _content(message: Mapping[str, Any], number: int) -> str:
    """The text of a message; parts are joined without anything between them."""
    content = message.get("content")
    if content is None and message.get("role") == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"message {number} needs content: a string or a list of text parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"message {number} has a content part of type {kind!r}; only text parts are supported")
    return "".join(part["text"] for part in content)


def _declared(tool: Any) -> dict[str, Any]:
    """A tool as the client declared it: without the fields that a parser of requests filled up with None."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"a tool needs the form {{'type': 'function', 'function': {{...}}}}, not {tool!r}")
    given = {key: value for key, value in tool.items() if value is not None}
    return given | {"function": {key: value for key, value in function.items() if value is not None}}


def _json(where: str, value: Any, separators: tuple[str, str] | None = (",", ":"), sort_keys: bool = True) -> str:
    """JSON text; by default compact and with sorted keys at every depth."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators, sort_keys=sort_keys)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where}: cannot be written as JSON ({error})") from error


def _notice(kind: str, text: str) -> list[int]:
    return _message(_bytes(text), role="system", type=kind)


def _message(body: list[int], **attributes: Any) -> list[int]:
    return [*_element("message", body, **attributes), END_OF_MSG_ID]


def _element(tag: str, body: list[int], **attributes: Any) -> list[int]:
    return [*_open(tag, **attributes), *body, CLOSE_ID, *_bytes(tag), SEP_ID]


def _open(tag: str, **attributes: Any) -> list[int]:
    for key, value in attributes.items():
        if value:
            escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
            tag += f' {key}="{escaped}"'
    return [OPEN_ID, *_bytes(tag), SEP_ID]


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", errors="replace"))
