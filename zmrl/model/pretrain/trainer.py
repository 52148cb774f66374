"""One update: rounded weights in the forward, FP32 masters behind them, a balanced router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zmrl.model.mxfp4 import round_to_mxfp4
from zmrl.model.names import is_indexer_tensor
from zmrl.model.pretrain.batches import IGNORE
from zmrl.model.reference import ForwardContext, KimiK31ForCausalLM
from zmrl.model.reference.moe import MixtureOfExperts

BIAS_RATE = 2e-3
F32_PARAMETERS = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


class Trainer:
    """FP32 masters, AdamW and the model whose weights are the rounded masters."""

    def __init__(self, model: KimiK31ForCausalLM, lr: float) -> None:
        self.model = model
        self.lr = lr
        self.parameters = model.trainable()
        self.masters = {n: p.detach().clone() for n, p in self.parameters.items()}
        decay = [m for n, m in self.masters.items() if m.dim() > 1 and m.shape[0] > 1 and "conv1d" not in n]
        rest = [m for m in self.masters.values() if not any(m is d for d in decay)]
        groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)
        blocks = {i: getattr(layer, "block_sparse_moe", None) for i, layer in enumerate(model.model.layers)}
        self.biases: dict[int, Tensor] = {
            i: moe.gate.e_score_correction_bias for i, moe in blocks.items() if isinstance(moe, MixtureOfExperts)
        }
        self.round_weights()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Set the model's weights to what a checkpoint of the masters would hold."""
        for name, master in self.masters.items():
            if ".experts." in name:  # in pieces that stay in the processor's cache
                for source, target in zip(master.split(32), self.parameters[name].split(32), strict=True):
                    target.copy_(round_to_mxfp4(source))
                continue
            self.parameters[name].copy_(master if name.endswith(F32_PARAMETERS) else master.to(torch.bfloat16))

    def step(self, inputs: Tensor, targets: Tensor, factor: float, sparse: bool) -> tuple[float, float, float]:
        """One update. Returns (cross-entropy, mean index KL, largest expert load over the mean)."""
        ctx = ForwardContext(sparse=sparse, want_index_loss=True)
        logits = self.model(inputs, ctx)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        index_loss = torch.stack(ctx.index_losses).sum()
        for parameter in self.parameters.values():
            parameter.grad = None
        (loss + index_loss).backward()
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad
        indexer = {n for n in self.masters if is_indexer_tensor(n)}
        torch.nn.utils.clip_grad_norm_([m for n, m in self.masters.items() if n not in indexer], 1.0)
        torch.nn.utils.clip_grad_norm_([m for n, m in self.masters.items() if n in indexer], 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * factor
        self.optimizer.step()
        self.round_weights()
        imbalance = 0.0
        for layer, bias in self.biases.items():
            load = ctx.router_loads[layer].float()
            imbalance = max(imbalance, (load.max() / load.mean()).item())
            bias += BIAS_RATE * factor * torch.sign(load.mean() - load)
            bias -= bias.mean()
        return loss.item(), index_loss.item() / len(ctx.index_losses), imbalance

    def unrounded_tensors(self) -> dict[str, Tensor]:
        """Masters under the names of the model's parameters (experts one by one), and what does not train."""
        out = {n: p.detach() for n, p in self.model.named_parameters()}
        for name, master in self.masters.items():
            owner, _, kind = name.rpartition(".")
            if kind == "w13":
                width = master.shape[1] // 2
                for i, matrix in enumerate(master):
                    out[f"{owner}.{i}.w1.weight"], out[f"{owner}.{i}.w3.weight"] = matrix[:width], matrix[width:]
            elif kind == "w2":
                out |= {f"{owner}.{i}.w2.weight": matrix for i, matrix in enumerate(master)}
            else:
                out[name] = master
        return out

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
            "biases": {i: b.detach() for i, b in self.biases.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        for i, bias in self.biases.items():
            bias.copy_(state["biases"][i])
        self.round_weights()
