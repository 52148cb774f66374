"""verl's load balancer, asked in the agent loop's own process."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace

import pytest

from tests.trainer import engines


@pytest.fixture
def client(monkeypatch):
    engines.verl_environment()
    from verl.workers.rollout import router
    from verl.workers.rollout.llm_server import LLMServerClient

    from zmrl.trainer import patches_verl

    monkeypatch.setattr(router, "_create_global_sticky_inflight", router._create_global_sticky_inflight)
    patches_verl.local_load_balancer()
    balancer = router.get_router_handle({"a": "server a", "b": "server b"})
    assert isinstance(balancer, patches_verl.LocalActor)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace()))
    return pickle.loads(pickle.dumps(LLMServerClient(config, balancer)))  # as it comes to the agent loop


def test_requests_go_to_the_server_with_the_fewest_and_stay_with_it(client):
    async def requests() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        first = [await client._acquire_server(str(i)) for i in range(6)]
        again = [await client._acquire_server(str(i)) for i in range(6)]
        return first, again

    first, again = asyncio.run(requests())
    assert sorted(first) == [("a", "server a")] * 3 + [("b", "server b")] * 3
    assert again == first
    count = client._load_balancer.get_inflight_count
    assert count.remote("a").value == 6
    for _ in range(4):
        client._release_server("a")
    assert count.remote("a").value == 2
    assert asyncio.run(client._acquire_server("new")) == ("a", "server a")


def test_an_error_of_the_balancer_arrives(client):
    client._load_balancer.remove_servers.remote(["a", "b"])
    with pytest.raises(RuntimeError, match="No available servers"):
        asyncio.run(client._acquire_server("1"))


def test_another_balancer_than_verls_default_gets_a_process(client, monkeypatch):
    import ray
    from verl.workers.rollout import router

    class Other(router.GlobalRequestLoadBalancer):
        pass

    monkeypatch.setattr(ray, "remote", lambda plain: SimpleNamespace(remote=lambda **given: (plain, given)))
    plain, given = router.get_router_handle({"a": "server a"}, load_balancer_cls=Other)
    assert plain is Other and given["servers"] == {"a": "server a"}
