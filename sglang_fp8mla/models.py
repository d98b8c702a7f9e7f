"""MLA dimensions of the models we name, and how to read them from any Hugging Face config.

Plain data from each model's published config.json (`source`); nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InvalidArgument


@dataclass(frozen=True)
class MlaModel:
    """What the KV pool and the attention of an MLA model depend on."""

    name: str
    layers: int
    heads: int  # query heads of the whole model
    ckv_dim: int = 512
    kpe_dim: int = 64
    index_topk: int = 0  # > 0: a sparse-attention (DSA) model
    source: str = ""

    @property
    def dim(self) -> int:
        """Values of one token's row in one layer."""
        return self.ckv_dim + self.kpe_dim

    @property
    def sparse(self) -> bool:
        return self.index_topk > 0


def _hf(repository: str) -> str:
    return f"https://huggingface.co/{repository}/blob/main/config.json"


BUILT_IN = {
    model.name: model
    for model in (
        MlaModel("deepseek-v3", 61, 128, source=_hf("deepseek-ai/DeepSeek-V3")),
        MlaModel("deepseek-r1", 61, 128, source=_hf("deepseek-ai/DeepSeek-R1")),
        MlaModel(
            "deepseek-v3.2", 61, 128, index_topk=2048, source=_hf("deepseek-ai/DeepSeek-V3.2")
        ),
        MlaModel("deepseek-v2-lite", 27, 16, source=_hf("deepseek-ai/DeepSeek-V2-Lite")),
        MlaModel("kimi-k2", 61, 64, source=_hf("moonshotai/Kimi-K2-Instruct")),
        MlaModel("glm-5", 78, 64, index_topk=2048, source=_hf("zai-org/GLM-5")),
        MlaModel("glm-4.7-flash", 47, 20, source=_hf("zai-org/GLM-4.7-Flash")),
    )
}


def load_model(text: str) -> MlaModel:
    """The model that `text` names: a built-in name, a config.json, or a folder that holds one.

    Raises:
        InvalidArgument: no such model, an unreadable file, or a config without MLA dimensions.
    """
    if text.lower() in BUILT_IN:
        return BUILT_IN[text.lower()]
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise InvalidArgument(
            f"model must be a config.json, a folder with one, or one of {', '.join(BUILT_IN)}, "
            f"got {text!r}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"model: {path} must be a JSON config, got: {error}") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"model: {path} must hold a JSON object, got a {_kind(config)}")
    return from_config(config, str(path))


def _kind(value: object) -> str:
    return {list: "list", str: "string", int: "number", float: "number"}.get(type(value), "value")


def from_config(config: Mapping[str, Any], source: str) -> MlaModel:
    """The MLA dimensions of a Hugging Face config, multimodal wrappers included.

    Raises:
        InvalidArgument: a key is missing or not a positive integer; the model is not MLA then.
    """
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    # some checkpoints keep the layer count of NextN drafts apart; the pool holds the target's
    values: dict[str, int] = {}
    for key, least in (
        ("num_hidden_layers", 1),
        ("num_attention_heads", 1),
        ("kv_lora_rank", 1),
        ("qk_rope_head_dim", 0),
    ):
        value = inner.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidArgument(
                f"model: {source} must have an integer {key} >= {least}, got {value!r}; "
                "without it this is not an MLA model"
            )
        values[key] = value
    topk = inner.get("index_topk")
    return MlaModel(
        name=str(inner.get("model_type") or config.get("model_type") or "model"),
        layers=values["num_hidden_layers"],
        heads=values["num_attention_heads"],
        ckv_dim=values["kv_lora_rank"],
        kpe_dim=values["qk_rope_head_dim"],
        index_topk=topk if isinstance(topk, int) and not isinstance(topk, bool) else 0,
        source=source,
    )


def heads_per_gpu(model: MlaModel, tp: int) -> int:
    """Query heads of one of `tp` GPUs.

    Raises:
        InvalidArgument: `tp` does not divide the heads.
    """
    if tp < 1 or model.heads % tp:
        raise InvalidArgument(f"--tp must divide the {model.heads} heads of {model.name}, got {tp}")
    return model.heads // tp
