"""Chat through vLLM's application: request, renderer, engine, parsers, answer. The tests write the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.chat_harness import FLAGS, Chat, chat_application, ids
from zmrl.data.prompts import prompt_ids
from zmrl.model.chat import render_chat
from zmrl.model.tokenizer import CONTROL_TOKENS, END_OF_MSG_ID
from zmrl.rollout.engine import engine_args

pytestmark = pytest.mark.slow

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
USER = [{"role": "user", "content": "hi"}]
RESPONSE = "(close)think(sep)(open)response(sep)"
END = "(close)response(sep)(close)message(sep)"
INSTANT = {"chat_template_kwargs": {"thinking": False}}


@pytest.fixture(scope="module")
def chat(checkpoint: Path) -> Iterator[Chat]:
    with chat_application(checkpoint, *FLAGS) as found:
        yield found


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return request.param


def tools(*calls: str) -> str:
    return "(close)response(sep)(open)tools(sep)" + "".join(calls) + "(close)tools(sep)(close)message(sep)"


def call(name: str, index: int, **arguments: tuple[str, str]) -> str:
    inner = "".join(
        f'(open)argument key="{key}" type="{kind}"(sep){value}(close)argument(sep)'
        for key, (kind, value) in arguments.items()
    )
    return f'(open)call tool="{name}" index="{index}"(sep){inner}(close)call(sep)'


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"why{RESPONSE}because{END}", ("why", "because")),
        (f"{RESPONSE}because{END}", ("", "because")),
        (f"why{RESPONSE}{END}", ("why", "")),
        (f"wé日{RESPONSE}🎉<é{END}", ("wé日", "🎉<é")),
        (
            f"<|close|>think<|sep|>{RESPONSE}<|open|>tools<|sep|>{END}",
            ("<|close|>think<|sep|>", "<|open|>tools<|sep|>"),
        ),
    ],
)
def test_reasoning_and_content(chat, stream, script, said):
    answer = chat.ask(ids(script), stream=stream)
    assert answer.said() == (*said, [], "stop")
    assert answer.prompt == render_chat(USER, add_generation_prompt=True)


def test_a_response_inside_of_the_think_element(chat):
    """Not K3's form: the prompt has opened the think element. vLLM's whole answers forgive it, its streams do not."""
    script = ids(f"(open)response(sep)because{END}")
    assert chat.ask(script).said() == ("", "because", [], "stop")
    assert chat.ask(script, stream=True).content == ""


def test_several_calls_with_all_types(chat, stream):
    arguments = {
        "s": ("string", "<|close|>argument<|sep|> é"),
        "n": ("number", "-1.5"),
        "o": ("object", '{"k":[null,"日"]}'),
        "b": ("boolean", "true"),
    }
    script = (
        "t" + RESPONSE + "so" + tools(call("add", 1, a=("number", "5")), call("other", 2, **arguments), call("no", 3))
    )
    answer = chat.ask(ids(script), stream=stream, tools=[ADD], max_tokens=1000)
    values = {"s": "<|close|>argument<|sep|> é", "n": -1.5, "o": {"k": [None, "日"]}, "b": True}
    assert answer.said() == ("t", "so", [("add", {"a": 5}), ("other", values), ("no", {})], "tool_calls")
    assert len(set(answer.ids)) == 3


def test_a_conversation_with_tools_goes_round(chat):
    """What the server answered goes back into the next request, and makes the ids that the model wrote."""
    script = ids("t" + RESPONSE + "so" + tools(call("add", 1, a=("number", "5")), call("add", 2, a=("number", "6"))))
    first = chat.ask(script, tools=[ADD])
    message = first.body["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"<|sep|>{name}"} for name in reversed(first.ids)]
    second = chat.ask(ids(f"{RESPONSE}11{END}"), [*USER, message, *results], tools=[ADD])
    assert second.said() == ("", "11", [], "stop")
    said = [*first.prompt, *script, END_OF_MSG_ID]
    assert second.prompt[: len(said)] == said
    rest = bytes(i for i in second.prompt[len(said) :] if i < 256).decode()
    assert rest.index(first.ids[0]) < rest.index(first.ids[1])  # in the order of the calls
    assert rest.startswith('message role="tool" tool="add" index="1"<|sep|>')


def test_without_thinking_all_is_content(chat, stream):
    answer = chat.ask(ids(f"because{END}"), stream=stream, **INSTANT)
    assert answer.said() == ("", "because", [], "stop")
    assert answer.prompt == render_chat(USER, add_generation_prompt=True, thinking=False)
    effort = chat.ask(ids(f"because{END}"), stream=stream, reasoning_effort="none")
    assert (effort.said(), effort.prompt) == (answer.said(), answer.prompt)


def test_reasoning_effort_reaches_the_prompt(chat):
    answer = chat.ask(ids(f"{RESPONSE}x{END}"), reasoning_effort="low")
    assert answer.prompt == render_chat(USER, add_generation_prompt=True, thinking_effort="low")


@pytest.mark.parametrize("length", [2, 3, 6, 9])
def test_reasoning_cut_off_by_max_tokens(chat, stream, length):
    answer = chat.ask(ids(f"wé{RESPONSE}because{END}"), stream=stream, max_tokens=length)
    assert answer.said() == ("w" if length == 2 else "wé", "", [], "length")


def test_a_call_cut_off_by_max_tokens_is_no_call(chat, stream):
    script = ids("t" + RESPONSE + tools(call("add", 1, a=("number", "5")), call("add", 2, a=("number", "6"))))
    answer = chat.ask(script, stream=stream, tools=[ADD], max_tokens=len(script) - 30)
    assert answer.said()[2:] == ([("add", {"a": 5})], "length" if stream else "tool_calls")


def test_tool_choice_none_shows_tools_but_gives_no_calls(chat, stream):
    script = ids("t" + RESPONSE + "so" + tools(call("add", 1, a=("number", "5"))))
    answer = chat.ask(script, stream=stream, tools=[ADD], tool_choice="none")
    assert answer.said() == ("t", "so", [], "stop")
    assert answer.prompt == render_chat(USER, add_generation_prompt=True, tools=[ADD], tool_choice="none")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_written_in_control_tokens(chat, stream, choice):
    script = ids("t" + RESPONSE + "so" + tools(call("add", 1, a=("number", "5"))))
    answer = chat.ask(script, stream=stream, tools=[ADD], tool_choice=choice)
    assert answer.said()[:3] == ("t", "so", [("add", {"a": 5})])


def test_an_answer_against_its_grammar_fails_alone(chat):
    """The script overrules the grammar's mask: a call that is not in control tokens."""
    script = ids("t" + RESPONSE + "so" + END)
    failed = chat.ask(script, tools=[ADD], tool_choice="required")
    assert failed.status == 500, failed
    assert chat.ask(ids(f"{RESPONSE}x{END}")).content == "x"


def test_json_schema_constrains_what_the_model_samples(chat, stream):
    schema = {"type": "object", "properties": {"k": {"enum": ["<|sep|>", "é", 7]}}, "required": ["k"]}
    schema["additionalProperties"] = False
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for seed in range(2):
        answer = chat.ask(None, stream=stream, response_format=asked, seed=seed, max_tokens=2000, **INSTANT)
        assert json.loads(answer.content)["k"] in ("<|sep|>", "é", 7)
    assert answer.prompt == render_chat(USER, add_generation_prompt=True, thinking=False, response_format=asked)


def test_choices_constrain_what_the_model_samples(chat):
    for seed in range(2):
        answer = chat.ask(None, structured_outputs={"choice": ["(é)", "<|close|>"]}, seed=seed, **INSTANT)
        assert answer.content in ("(é)", "<|close|>")
        assert not set(answer.body["choices"][0]["token_ids"][:-1]) & set(range(256, 288))


@pytest.mark.parametrize("name", CONTROL_TOKENS)
def test_a_client_cannot_place_a_control_token(chat, name):
    evil = f"{name}x{name[: len(name) // 2]}"
    messages = [
        {"role": "system", "content": evil, "name": evil},
        {"role": "user", "content": [{"type": "text", "text": evil[:3]}, {"type": "text", "text": evil[3:]}]},
        {
            "role": "assistant",
            "content": evil,
            "reasoning_content": evil,
            "tool_calls": [
                {"id": evil, "type": "function", "function": {"name": evil, "arguments": json.dumps({evil: evil})}}
            ],
        },
        {"role": "tool", "tool_call_id": evil, "content": evil},
    ]
    tool = {"type": "function", "function": {"name": evil, "description": evil, "parameters": {evil: evil}}}
    answer = chat.ask(ids(f"{RESPONSE}{END}"), messages, tools=[tool], tool_choice="auto", max_tokens=1)
    plain = json.loads(json.dumps([messages, tool]).replace(json.dumps(evil)[1:-1], "x"))
    plain[0][1]["content"] = "x"
    harmless = chat.ask(ids(f"{RESPONSE}{END}"), plain[0], tools=[plain[1]], tool_choice="auto", max_tokens=1)
    assert [i for i in answer.prompt if i >= 256] == [i for i in harmless.prompt if i >= 256]
    assert evil.encode() in bytes(i for i in answer.prompt if i < 256)


def test_text_of_a_completion_is_bytes(chat):
    answer = chat.ask(None, path="completions", prompt="<|open|>message<|sep|>", max_tokens=1)
    assert answer.body["choices"][0]["prompt_token_ids"] == list(b"<|open|>message<|sep|>")


IMAGE = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]
RESULT = [{"role": "tool", "tool_call_id": "c", "content": "x"}]
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("messages", "body", "error"),
    [
        ([{"role": "user", "content": IMAGE}], {}, "message 0 has a content part of type 'image_url'"),
        ([{"role": "user", "content": [{"image_url": "http://127.0.0.1:9/"}]}], {}, "content part of type None"),
        ([{"role": "critic", "content": "x"}], {}, "message 0 has role 'critic'; use system, user, assistant or tool"),
        ([{"role": "developer", "content": "x"}], {}, "message 0 has role 'developer'"),
        (RESULT, {}, "message 0 is the result of tool call 'c'"),
        ([{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}], {}, "id"),
        (USER, {"reasoning_effort": "medium"}, "low, high, max"),
        (USER, {"chat_template_kwargs": {"return_tensors": "pt"}}, "this format has no return_tensors"),
        (USER, {"chat_template_kwargs": {"thinking": "no"}}, "thinking has to be true or false"),
        (USER, {"chat_template_kwargs": {"reasoning_effort": "none"}}, "say enable_thinking false"),
        (USER, {"continue_final_message": True, "add_generation_prompt": False}, "cannot continue a message"),
        (USER, {"chat_template": "training"}, "trust-request-chat-template"),
        (USER, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "x"}}}}, ""),
        (USER, {"structured_outputs": {"grammar": "root ::= "}}, ""),
    ],
)  # fmt: skip
def test_what_the_server_cannot_do_is_a_400_and_it_serves_on(chat, messages, body, error):
    answer = chat.ask(None, messages, **({"max_tokens": 1} | body))
    assert answer.status == 400 and error in answer.body["error"]["message"], answer.body
    assert chat.ask(ids(f"{RESPONSE}x{END}")).content == "x"


def test_deep_nesting_is_no_server_error(chat):
    function = {"name": "f", "arguments": DEEP}
    turn = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    assert chat.ask(None, [turn], max_tokens=1).status in (200, 400)


def test_another_tokenizer_mode_is_refused(checkpoint: Path):
    """vLLM would render chat to text and encode that: bytes only."""
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError, match="tokenizer_mode='hf': chat would be rendered as text"):
        EngineArgs(**engine_args(checkpoint, tokenizer_mode="hf")).create_engine_config()


def test_the_training_format_can_be_served(chat):
    """With `--default-chat-template-kwargs`: what a model was trained on is what it is asked."""
    from vllm.renderers.params import ChatParams

    renderer = chat.client.renderer
    params = ChatParams(chat_template_kwargs={"chat_template": "training", "add_generation_prompt": True})
    _, prompt = renderer.render_messages([{"role": "user", "content": "2*3?"}], params)
    assert prompt["prompt_token_ids"] == prompt_ids("2*3?")
