"""/metrics: vLLM's own, and which state the cache is used for."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, Gauge, generate_latest

from zmrl.serving.engine import ServingEngine
from zmrl.serving.limits import Gate

SECONDS = 2.0
"""How long a scrape waits for the engine, which answers between two steps."""

_CACHE = Gauge(
    "zmrl_cache_bytes",
    "Bytes of cache blocks that running requests hold, by kind: latent and index pages, KDA states",
    ["kind"],
)
_REQUESTS = Gauge("zmrl_requests_running", "HTTP requests that are being answered")
_ADAPTERS = Gauge("zmrl_adapters_loaded", "Adapters in the engine, replaced ones with running requests included")


def metrics_route(engine: ServingEngine, gate: Gate) -> APIRouter:
    """The route, in place of vLLM's."""
    router = APIRouter()

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        _CACHE.clear()  # no figure is better than an old one
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                for kind, size in (await engine.worker("zmrl_cache_use")).items():
                    _CACHE.labels(kind).set(size)
        _REQUESTS.set(gate.running)
        _ADAPTERS.set(len(engine.loaded))
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    return router
