"""The HTTP server around the application: sockets, slow clients, and the graceful stop."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from vllm.entrypoints.launchers.launcher import NoSignalServer, create_server_socket, watchdog_loop

from zmrl.serving.app import serving_app
from zmrl.serving.options import OptionError, Options

HEAD_SECONDS = 15.0
"""How long the head of a request may take to arrive."""
MAX_CONNECTIONS = 1024


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's, which would wait for ever for the rest of a request's head: each such client would keep a socket."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._forget_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._forget_head()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def listen(options: Options) -> socket.socket:
    """A bound socket. OptionError if the address cannot be used."""
    try:
        sock = create_server_socket((options.host, options.port), reuse_port=False)
    except OSError as error:
        raise OptionError(f"--host {options.host} --port {options.port}: {error.strerror or error}") from None
    # Accepted sockets inherit it. asyncio sets it only on sockets that name their protocol, which vLLM's does not;
    # without it a reused connection gets the first bytes of an answer 40 ms late (Nagle and delayed acknowledgements).
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def http_server(app: FastAPI, options: Options) -> NoSignalServer:
    """An HTTP server that leaves signals alone."""
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=PatientProtocol,
        ws="none",
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=5,
    )
    server = NoSignalServer(config)
    app.state.server = server
    return server


async def serve(options: Options) -> int:
    """Serves until SIGTERM or SIGINT, then lets running requests end: the exit code."""
    sock = listen(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        async with serving_app(options) as app:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            return await _run(app, options, sock, stop)
    finally:
        sock.close()


async def _run(app: FastAPI, options: Options, sock: socket.socket, stop: asyncio.Event) -> int:
    server, gate, engine = http_server(app, options), app.state.gate, app.state.engine_client
    running = asyncio.create_task(server.serve(sockets=[sock]))
    watching = asyncio.create_task(watchdog_loop(server, engine))
    stopping = asyncio.create_task(stop.wait())
    while not (server.started or running.done()):
        await asyncio.sleep(0.02)
    host, port = sock.getsockname()[:2]
    print(f"zmrl: serving {options.name} on http://{_bracketed(host)}:{port}", file=sys.stderr, flush=True)
    await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        print(f"zmrl: stopping; {gate.running} requests may still end", file=sys.stderr, flush=True)
        if not await gate.drained(options.drain_seconds):
            print(f"zmrl: {gate.running} requests are cut off", file=sys.stderr, flush=True)
        server.should_exit = True
    await running
    for task in (watching, stopping):
        task.cancel()
    if engine.errored:
        print("zmrl: the engine has died; see the log above", file=sys.stderr, flush=True)
        return 1
    return 0


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
