"""vLLM's worker with torch's products, for `benchmarks.step`."""

from __future__ import annotations

from typing import Any

from benchmarks.torch_products import use_torch_products
from zmrl.rollout.runner import ZmrlWorker


class PlainWorker(ZmrlWorker):
    """The rollout's."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        use_torch_products(self.model_runner.model.model)
