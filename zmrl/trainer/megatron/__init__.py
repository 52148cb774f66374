"""The Megatron-Core host: trains the adapters through the forward pass that the rollout runs. See `host.MegatronHost`.

Megatron does what it does in any job: process groups, gradient buffers (DDP), the schedule, the optimizer, the
learning rate, checkpoints. What decides a bit is ours and explicit: the model's kernels, the order in which gradients
are summed, over ranks too (`gradients`), and the gradient norm.
"""
