"""Rewards for runs of the small model, whose responses are random bytes."""

from zlib import crc32


def varied(response: str, answer: str) -> float:
    """0 or 1, by the response alone."""
    return float(crc32(response.encode()) % 2)


def not_a_number(response: str, answer: str) -> float:
    return float("nan")


def raising(response: str, answer: str) -> float:
    raise KeyError("no such grade")
