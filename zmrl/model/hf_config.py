"""The configuration as a transformers `PretrainedConfig`, for AutoConfig and vLLM. Holds no logic of its own."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from zmrl.model.config import ARCHITECTURE, MODEL_TYPE, PRESETS, K3Config


class KimiK31Config(PretrainedConfig):
    """`K3Config`'s fields as attributes, plus those that vLLM looks for (`head_dim`, `layer_types`)."""

    model_type = MODEL_TYPE

    def __init__(self, **kwargs: Any) -> None:
        if "linear_attn_config" not in kwargs:  # transformers constructs a default instance to find differences
            kwargs = PRESETS["nano"].to_dict() | kwargs
        config = K3Config.from_dict(kwargs)
        kwargs.pop("model_type", None)
        fields = config.to_dict()
        fields.pop("model_type")
        fields["head_dim"] = config.qk_head_dim
        fields["architectures"] = [ARCHITECTURE]
        super().__init__(**(kwargs | fields))

    def to_k3_config(self) -> K3Config:
        """The typed configuration."""
        fields = {name: getattr(self, name) for name in self._field_names()}
        fields["dtype"] = str(fields["dtype"]).removeprefix("torch.")
        return K3Config.from_dict(fields)

    @staticmethod
    def _field_names() -> list[str]:
        return [n for n in PRESETS["nano"].to_dict() if n not in ("architectures", "model_type")]


class KimiLinearConfig(KimiK31Config):
    """Reads a Kimi-Linear config.json, released or written by transformers; what comes of it is a `KimiK31Config`.

    vLLM then knows the model by our type and architecture, not as the MLA model that its own `kimi_linear` is.
    """

    model_type = "kimi_linear"

    def __new__(cls, **kwargs: Any) -> Any:
        if not kwargs:
            return KimiK31Config()
        kept = {name: kwargs[name] for name in ("name_or_path", "transformers_version") if name in kwargs}
        return KimiK31Config(**(K3Config.from_dict(kwargs).to_dict() | kept))
