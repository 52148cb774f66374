"""The parity command: the same samples through vLLM under many settings, and through Megatron; equal bit for bit?

`python -m zmrl.parity --model nano` runs two processes of its own: the rollout side (vLLM, engines in process) samples
under each setting, the trainer side (Megatron) scores every sample once. A setting is EQUAL when every log-prob and
every logits row agrees; it is VOID when its condition (cached tokens, preemptions, chunks, ...) did not occur.
"""
