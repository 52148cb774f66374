"""OpenAI-style error answers."""

from __future__ import annotations

from http import HTTPStatus

from fastapi.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response


def error_answer(
    status: HTTPStatus, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """`{"error": {"message", "type", "param", "code"}}`, without paths and addresses of this machine."""
    body = create_error_response(message, status.phrase.replace(" ", "") + "Error", status, param)
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)
