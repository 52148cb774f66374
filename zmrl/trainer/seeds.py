"""The seed of a sample: a pure function of what the sample is, not of when, where or beside what it is drawn."""

import hashlib


def sample_seed(run_seed: int, source: str, step: int, index: int, sample: int) -> int:
    """63-bit seed of sample number `sample` of problem `index` of data set `source` in training step `step`."""
    key = f"{run_seed}\0{source}\0{step}\0{index}\0{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") & (2**63 - 1)


def sample_name(source: str, index: int, sample: int) -> str:
    """A sample in words, for messages and reports."""
    return f"{source} problem {index} sample {sample}"
