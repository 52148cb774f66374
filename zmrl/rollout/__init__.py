"""Rollout host: the model inside vLLM 0.32 on a CPU. Importing this package imports neither vLLM nor torch."""
