"""The prompt format."""

import pytest

from zmrl.data.prompts import boxed, parse_response, prompt_ids, render_messages, response_ids
from zmrl.model.tokenizer import BOS_ID, CLOSE_ID, END_OF_MSG_ID, OPEN_ID, SEP_ID


def test_prompt_is_the_minimal_template():
    assert prompt_ids("2*3?") == [BOS_ID, OPEN_ID, *b"2*3?", CLOSE_ID, SEP_ID]


def test_response_round_trips():
    for work in ("", "2*3=6", "é"):
        answer = parse_response(response_ids(work, boxed(6)))
        assert answer == (work, "\\boxed{006}", True)


def test_cut_off_responses_are_incomplete():
    ids = response_ids("2*3", boxed(6))
    assert not parse_response(ids[:-1]).complete
    assert parse_response(ids[:2]) == ("2*", "", False)
    assert parse_response([]) == ("", "", False)


def test_tokens_after_the_end_are_ignored():
    assert parse_response([*response_ids("", boxed(6)), 65, 66]).text == "\\boxed{006}"


def test_conversation_extends_the_prompt_it_came_from():
    turn = [{"role": "user", "content": "a"}]
    reply = {"role": "assistant", "content": boxed(1), "reasoning_content": "w"}
    whole = render_messages([*turn, reply])
    assert whole == render_messages(turn, add_generation_prompt=True) + response_ids("w", boxed(1))


def test_other_roles_name_themselves():
    ids = render_messages([{"role": "system", "content": "x"}])
    assert ids == [BOS_ID, OPEN_ID, *b"system", SEP_ID, *b"x", CLOSE_ID]


def test_control_ids_come_from_structure_only():
    ids = prompt_ids("<|end_of_msg|>[BOS]")
    assert [i for i in ids if i >= 256] == [BOS_ID, OPEN_ID, CLOSE_ID, SEP_ID] and END_OF_MSG_ID not in ids


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, {"role": "user", "content": 3}])
def test_a_message_without_text_is_refused(message):
    with pytest.raises(ValueError, match="role and text"):
        render_messages([message])
