"""Which Ray actors a run watches."""

import pytest

from zmrl.trainer import alive


def actors(**states: str) -> dict[str, dict]:
    return {key: {"State": state, "ActorClassName": key, "Pid": 1} for key, state in states.items()}


def test_a_process_that_was_starting_is_watched_and_one_that_was_gone_is_not(monkeypatch):
    now = actors(server="ALIVE", loop="PENDING_CREATION", former="DEAD")

    def listed(actor_state_name: str | None = None) -> dict[str, dict]:
        return {key: actor for key, actor in now.items() if actor_state_name in (None, actor["State"])}

    monkeypatch.setattr(alive.state, "actors", listed)
    watch = alive.Watch()
    watch.require()
    now |= actors(loop="DEAD")
    with pytest.raises(alive.ProcessDiedError, match="loop"):
        watch.require()
