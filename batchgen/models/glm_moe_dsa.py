"""GLM-5 to GLM-5.3: DeepSeek-V3.2's layers, some of which see the keys that an earlier one chose. In: config.json. Out: ModelConfig."""

from dataclasses import replace
from typing import Any

from batchgen.errors import ModelError
from batchgen.models.config import MixerSpec, ModelConfig
from batchgen.models.deepseek_v3 import read_deepseek
from batchgen.models.indexer import read_indexer
from batchgen.models.latent import read_latent
from batchgen.models.reader import ConfigReader
from batchgen.models.rotary import read_rope

ARCHITECTURE = "GlmMoeDsaForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a GLM-5 config.json and generation_config.json."""
    reader = ConfigReader(values)
    rope = read_rope(reader, default_theta=10000.0)
    full = read_latent(reader, rope=rope, indexer=read_indexer(reader, rope, interleaved=True))
    shared = replace(full, indexer=None, shares_choice=True)
    types = read_indexer_types(reader)
    if types[0] != "full":
        raise ModelError("config.json: indexer_types begins with 'shared'; the first layer has no earlier choice of keys to share")
    mixers: list[MixerSpec] = [full if kind == "full" else shared for kind in types]
    return read_deepseek(reader, generation, mixers, architecture=ARCHITECTURE)


def read_indexer_types(reader: ConfigReader) -> list[str]:
    """`full` or `shared` for each layer: a list of words, a pattern of F and S, or a rhythm."""
    if (words := reader.per_layer("indexer_types", ("full", "shared"))) is not None:
        return words
    if (pattern := reader.values.get("index_topk_pattern")) is not None:
        letters = {"F": "full", "S": "shared"}
        reader = ConfigReader(reader.values | {"index_topk_pattern": [letters.get(each, each) for each in map(str, pattern)]})
        return reader.per_layer("index_topk_pattern", ("full", "shared")) or []
    period, offset = max(reader.count("index_topk_freq", default=1, least=0), 1), reader.count("index_skip_topk_offset", default=2, least=0)
    return ["shared" if max(i - offset + 1, 0) % period else "full" for i in range(reader.num_layers)]
