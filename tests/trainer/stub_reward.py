"""Rewards for runs of the small model, whose responses are random bytes."""

import time
from zlib import crc32


def varied(response: str, answer: str) -> float:
    """0 or 1, by the response alone."""
    return float(crc32(response.encode()) % 2)


def not_a_number(response: str, answer: str) -> float:
    return float("nan")


def raising(response: str, answer: str) -> float:
    raise KeyError("no such grade")


def _is_trial(response: str) -> bool:
    """The two responses that a reward is tried on before a run starts."""
    return not response or response.startswith(r"\boxed{")


def not_a_number_later(response: str, answer: str) -> float:
    return 0.0 if _is_trial(response) else float("nan")


def hanging_later(response: str, answer: str) -> float:
    if not _is_trial(response):
        time.sleep(3600)
    return 0.0


def raising_later(response: str, answer: str) -> float:
    return 0.0 if _is_trial(response) else raising(response, answer)
