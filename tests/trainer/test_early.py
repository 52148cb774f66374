"""Actors that are started before verl creates them."""

import pytest
import ray

from zmrl.trainer import early


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value

    def double(self) -> int:
        return 2 * self.value


class FakeActors:
    """Ray's `remote`, in this process."""

    def __init__(self) -> None:
        self.created: list[dict] = []

    def remote(self, actor_class):
        created = self.created

        class Remote:
            def options(self, **options):
                created.append(options)
                return self

            def remote(self, *args):
                return Handle(actor_class(*args))

        return Remote()


class Handle:
    def __init__(self, actor) -> None:
        self.actor = actor

    def __getattr__(self, name):
        method = getattr(self.actor, name)
        return type("Method", (), {"remote": staticmethod(method)})


@pytest.fixture
def actors(monkeypatch) -> FakeActors:
    fake = FakeActors()
    monkeypatch.setattr(ray, "remote", fake.remote)
    monkeypatch.setattr(ray, "get", lambda result: result)
    return fake


def test_the_actor_that_was_started_gets_the_arguments(actors):
    early.start(Plain, name="one", max_concurrency=3)
    assert actors.created == [{"name": "one", "max_concurrency": 3}]
    handle = early.actor_class(Plain).options(name="one", max_concurrency=3, scheduling_strategy="here").remote(21)
    assert handle.double.remote() == 42 and len(actors.created) == 1


def test_what_its_arguments_need_is_imported_at_the_start(actors):
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_an_argument"):
        early.start(Plain, "no_such_module_of_an_argument")


def test_there_is_one_of_it(actors):
    early.start(Plain)
    assert isinstance(early.actor_class(Plain), early.Early)
    assert not isinstance(early.actor_class(Plain), early.Early)


def test_another_name_than_the_one_started_is_an_error(actors):
    early.start(Plain, name="one")
    with pytest.raises(RuntimeError, match=r"name 'two', which was started early with 'one'"):
        early.actor_class(Plain).options(name="two")
