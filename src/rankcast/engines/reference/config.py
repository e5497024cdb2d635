"""What the embedded engine reads from a checkpoint's ``config.json``.

This module knows the Hugging Face keys of the ``qwen3_moe`` architecture and what the embedded decoder supports of
them. It must not know layouts, parameters or torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from rankcast.errors import UnsupportedError
from rankcast.manifest import canonical_dtype

ARCHITECTURE = "qwen3_moe"

#: dtypes in which the decoder computes.
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ``qwen3_moe`` decoder's sizes and choices; the fields have their Hugging Face names.

    ``dtype`` is a canonical dtype name. Build one with ``parse_config`` or ``read_config``; constructing it directly
    runs the same range checks and raises ``UnsupportedError``.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        least = {"num_experts": 0, "num_experts_per_tok": 0}
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < least.get(field.name, 1):
                raise UnsupportedError(f"config.json has {field.name} = {value}: it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UnsupportedError(
                f"config.json has num_attention_heads = {self.num_attention_heads}, which is no multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedError(f"config.json has head_dim = {self.head_dim}: rotary embeddings need an even one")
        if self.sparse_layers and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise UnsupportedError(
                f"config.json has num_experts_per_tok = {self.num_experts_per_tok}: it must lie between 1 and "
                f"num_experts = {self.num_experts}"
            )
        if self.dtype not in COMPUTE_DTYPES:
            raise UnsupportedError(
                f"config.json has dtype {self.dtype!r}: the embedded engine computes in {', '.join(COMPUTE_DTYPES)}"
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether ``layer`` has experts; otherwise it has one dense MLP of ``intermediate_size``."""
        return (
            layer not in self.mlp_only_layers and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_sparse(layer))


def read_config(directory: str | os.PathLike[str]) -> DecoderConfig:
    """The config of a checkpoint directory.

    Raises ``UnsupportedError`` when there is no readable ``config.json`` or it describes something else than this
    engine runs.
    """
    path = Path(directory) / "config.json"
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise UnsupportedError(
            f"{path} cannot be read ({error}): name a Hugging Face checkpoint directory with a config.json"
        ) from error
    if not isinstance(raw, dict):
        raise UnsupportedError(f"{path} holds a {type(raw).__name__}, not an object of settings")
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config in a decoded ``config.json``; keys that do not change the mathematics are ignored.

    Raises ``UnsupportedError`` for another architecture, for a setting the decoder does not compute, and for a missing
    or ill-typed key.
    """
    _refuse_unsupported(raw)
    # Both spellings of some keys are in circulation: transformers 5 renamed them.
    values = {name: raw[name] for name in DecoderConfig.__struct_fields__ if raw.get(name) is not None}
    if "num_experts" not in values and raw.get("num_local_experts") is not None:
        values["num_experts"] = raw["num_local_experts"]
    if "dtype" not in values and raw.get("torch_dtype") is not None:
        values["dtype"] = raw["torch_dtype"]
    if isinstance(values.get("dtype"), str):
        values["dtype"] = canonical_dtype(values["dtype"])
    theta = _rope(raw).get("rope_theta")
    if theta is not None:
        values["rope_theta"] = theta
    # Absent in older configs, where these follow from others.
    if "num_attention_heads" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        if isinstance(values.get("hidden_size"), int) and values["num_attention_heads"]:
            values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    values.setdefault("max_position_embeddings", 32768)
    try:
        return msgspec.convert(values, DecoderConfig)
    except msgspec.ValidationError as error:
        raise UnsupportedError(f"config.json is not a complete {ARCHITECTURE} config: {error}") from error


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """``rope_parameters`` (transformers 5) or ``rope_scaling`` (before), or nothing."""
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if isinstance(value, Mapping):
            return cast("Mapping[str, Any]", value)
    return {}


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    found = raw.get("model_type")
    if found != ARCHITECTURE:
        raise UnsupportedError(
            f"the embedded engine runs model_type {ARCHITECTURE!r}, config.json says {found!r}: use a "
            f"{ARCHITECTURE} checkpoint, or push into an engine that runs this architecture"
        )
    if raw.get("quantization_config"):
        raise UnsupportedError("config.json has a quantization_config: the embedded engine runs unquantised weights")
    if raw.get("use_sliding_window"):
        raise UnsupportedError("config.json has use_sliding_window: the embedded engine attends to all earlier tokens")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"config.json has hidden_act {raw['hidden_act']!r}: the embedded engine computes silu")
    rope = _rope(raw)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedError(f"config.json has rotary embeddings of type {kind!r}: the embedded engine has 'default'")
