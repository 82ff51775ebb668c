"""Which checkpoints load and what their sequences take, as tables. In: the registry, configurations. Out: Markdown for the README."""

from collections.abc import Mapping

import torch

from batchgen.models.config import ModelConfig
from batchgen.models.registry import FAMILIES

TOLERANCE = 1e-4
"""Largest difference of a logit from the reference's, both in float32."""
WIDER_TOLERANCES = {
    "DeepseekV32ForCausalLM": 1e-3,
    "GlmMoeDsaForCausalLM": 1e-3,
    "Glm5NextForConditionalGeneration": 1e-3,
    "KimiLinearForCausalLM": 1e-3,
    "KimiK3ForConditionalGeneration": 1e-3,
}
"""A choice of keys turns on their scores' last bits; a state carries each rounding on."""
OWN_REFERENCES = {"KimiK3ForConditionalGeneration": "plain torch, in the tests"}
"""Of architectures that transformers does not have."""
SHOWN_TOKENS = 32_768


def tolerance_of(architecture: str) -> float:
    """What the parity tests of a family allow."""
    return WIDER_TOLERANCES.get(architecture, TOLERANCE)


def support_matrix() -> str:
    """One row per architecture: the family module's first line, and what the parity tests compare it with."""
    rows = ["| architecture in config.json | family | reference | logits, float32 |", "|---|---|---|---|"]
    for architecture, family in FAMILIES.items():
        title = (family.__doc__ or "").split(". In:")[0]
        reference = OWN_REFERENCES.get(architecture, "transformers")
        rows.append(f"| `{architecture}` | {title} | {reference} | {tolerance_of(architecture):.0e} |")
    return "\n".join(rows)


def cache_table(configs: Mapping[str, ModelConfig]) -> str:
    """One row per model: what a sequence takes on the device, with bfloat16 KV; the numbers that `plan_memory` plans with."""
    rows = [
        f"| model | KV per token, bytes | state per sequence, MB | a sequence of {SHOWN_TOKENS:,} tokens, MB |",
        "|---|---|---|---|",
    ]
    for name, config in configs.items():
        layout = config.cache_layout
        per_token, per_state = layout.bytes_per_token(torch.bfloat16), layout.bytes_per_state
        rows.append(f"| {name} | {per_token:,} | {per_state / 1e6:.1f} | {(per_token * SHOWN_TOKENS + per_state) / 1e6:,.0f} |")
    return "\n".join(rows)
