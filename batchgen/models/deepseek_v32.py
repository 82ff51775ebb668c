"""DeepSeek-V3.2: DeepSeek-V3 with an indexer that chooses each token's keys. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.config import ModelConfig
from batchgen.models.deepseek_v3 import read_deepseek
from batchgen.models.indexer import read_indexer
from batchgen.models.latent import read_latent
from batchgen.models.reader import ConfigReader
from batchgen.models.rotary import read_rope

ARCHITECTURE = "DeepseekV32ForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a DeepSeek-V3.2 config.json and generation_config.json."""
    reader = ConfigReader(values)
    rope = read_rope(reader, default_theta=10000.0)
    mixer = read_latent(reader, rope=rope, indexer=read_indexer(reader, rope, interleaved=False))
    return read_deepseek(reader, generation, [mixer] * reader.num_layers, architecture=ARCHITECTURE)
