"""vLLM's OpenAI application with our engine, our limits, and the routes that we answer for."""

from __future__ import annotations

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.middleware import Middleware
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from zmrl.rollout.plugin import register
from zmrl.serving.adapters import Adapters, adapter_routes
from zmrl.serving.engine import ServingEngine
from zmrl.serving.limits import Gate, LimitsMiddleware
from zmrl.serving.metrics import metrics_route
from zmrl.serving.options import OptionError, Options
from zmrl.serving.transcript import Transcript

ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/version", "/openapi.json"}
"""What is kept of vLLM's routes. Others (/invocations, /pause, ...) are outside of its key check or stop the engine."""
PARSER = "kimi_k3"
EXIT_SECONDS = 30.0
"""How long the engine's processes may take to end before they are killed."""


def vllm_arguments(options: Options) -> Namespace:
    """The arguments of `vllm serve` that say the same."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([str(options.model)])
    settings = options.engine_args() | {
        "served_model_name": [options.name],
        "host": options.host,
        "port": options.port,
        "api_key": None if options.api_key is None else [options.api_key],
    }
    settings["reasoning_parser"] = PARSER  # else a chat answer would show the format's markers
    if options.tools:
        settings |= {"enable_auto_tool_choice": True, "tool_call_parser": PARSER}
    for name, value in settings.items():
        if not hasattr(args, name):
            raise RuntimeError(f"vLLM has no argument {name} any more; adapt zmrl/serving")
        setattr(args, name, value)
    validate_parsed_serve_args(args)
    return args


@contextlib.asynccontextmanager
async def serving_app(options: Options) -> AsyncIterator[FastAPI]:
    """The application with a running engine; `app.state` holds `engine_client`, `adapters` and `gate`.

    OptionError, AdapterError or OSError says what of `options` cannot be used.
    """
    register()
    args = vllm_arguments(options)
    try:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        validate_api_server_args(args)
        engine = ServingEngine.from_vllm_config(config, usage_context=UsageContext.OPENAI_API_SERVER)
    except (ValueError, RuntimeError) as error:  # RuntimeError: its process has ended and said why in the log
        raise OptionError(f"the engine does not start with these options: {error}") from error
    assert isinstance(engine, ServingEngine)
    try:
        if options.transcript is not None:
            identity = await engine.worker("zmrl_identity")

            async def take(tags: list[str]) -> dict[str, list[int]]:
                return await engine.worker("zmrl_take_digests", tags)

            engine.transcript = Transcript(options.transcript, options.model, identity, take)
        yield await _build(engine, args, options)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.settled(), EXIT_SECONDS)
    finally:
        engine.shutdown(timeout=EXIT_SECONDS)
        if engine.transcript is not None:
            engine.transcript.close()


async def _build(engine: ServingEngine, args: Namespace, options: Options) -> FastAPI:
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    await init_app_state(engine, app.state, args, tasks)
    gate = Gate()
    models = app.state.openai_serving_models
    adapters = Adapters(engine, models, options.lora_root, options.max_loras, options.lora_rank, options.lora_alpha)
    for name, path in options.loras.items():
        await adapters.load(name, path)
    app.include_router(metrics_route(engine, gate))
    if options.lora_rank is not None:
        app.include_router(adapter_routes(adapters))
    # Innermost: behind vLLM's key check, so that bodies of strangers are not read.
    app.user_middleware.append(Middleware(LimitsMiddleware, limits=options.limits, gate=gate))
    app.middleware_stack = None  # build_app has built it; it is built again at the first request
    app.state.adapters, app.state.gate = adapters, gate
    return app
