"""The rollout server without a trainer: vLLM's OpenAI front end with our plugin, and evidence of what it served.

`python -m zmrl.serving MODEL` starts it, `python -m zmrl.serving.verify FILE` scores its transcript again with the
trainer's forward pass. Importing this package imports neither vLLM nor torch.
"""
