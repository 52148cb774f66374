"""The trainer's host with torch's products, for `benchmarks.step`."""

from __future__ import annotations

from typing import Any

from benchmarks.torch_products import use_torch_products
from zmrl.trainer.megatron.host import MegatronHost
from zmrl.trainer.megatron.optimizer import OptimizerSettings as OptimizerSettings  # verl's engine takes it from here


class PlainHost(MegatronHost):
    """`MegatronHost`, and nothing of it but the products is changed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_torch_products(self.model)
