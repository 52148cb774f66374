"""A plain differentiable torch version of the whole model, in any float dtype.

The oracle (float64), the pre-trainer (float32, `zmrl.model.pretrain`) and the base into which `peft` loads adapters:
one `nn.Linear` per projection and per expert projection, modules named as in the checkpoint. It is not a host: rollout
and training run the kernels of `zmrl.batch_invariant`. It follows `kimi-k31-architecture.md`, sections 2 and 3, without
rounding between operations; only the indexer's FP8 codes and BF16 scores are rounded, as they define a set.
"""

from zmrl.model.reference.common import ForwardContext
from zmrl.model.reference.model import KimiK31ForCausalLM

__all__ = ["ForwardContext", "KimiK31ForCausalLM"]
