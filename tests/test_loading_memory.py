"""Loading streams: a process holds the model and one shard, and takes not much longer than reading the files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from batchgen.quant.fp8 import Fp8

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
NUM_SHARDS, HIDDEN, WIDTH, NUM_LAYERS, VOCAB = 12, 1024, 4096, 6, 4096
MARGIN_BYTES = 16_000_000
"""Of the interpreter, and of pages that the kernel reads ahead."""
QUANTISED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MEASURE = """
import json, re, sys, time
from pathlib import Path
import torch
from batchgen.kernels import cpu
from batchgen.models.registry import load_model

def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def read():
    start = time.perf_counter()
    held = [shard.read_bytes() for shard in Path(sys.argv[1]).glob("*.safetensors")]
    return time.perf_counter() - start

def load():
    start = time.perf_counter()
    loaded = load_model(sys.argv[1], "bfloat16", "cpu", False)
    return time.perf_counter() - start, loaded

torch.set_num_threads(1)
cpu.load()
read()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
_, loaded = load()
result = {"peak": resident("VmHWM") - before, "held": sum(storage.nbytes for storage in loaded.store.table.storages())}
del loaded
times = [(read(), load()[0]) for _ in range(5)]
print(json.dumps(result | {"read_s": min(t for t, _ in times), "load_s": min(t for _, t in times)}))
"""


def make_checkpoint(folder: Path, quantised: bool) -> int:
    """A Llama of zeros in many shards; the largest one's bytes."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    matrices = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    matrices |= {"mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in matrices.items()}
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(NUM_SHARDS)]
    for name, shape in shapes.items():
        parts = {name: torch.zeros(shape, dtype=torch.bfloat16)}
        if quantised and name.endswith("_proj.weight"):
            specs = Fp8().storage(shape)
            parts = {part: torch.zeros(specs[suffix].shape, dtype=specs[suffix].dtype) for suffix, part in Fp8().names(name).items()}
        min(shards, key=lambda shard: sum(tensor.nbytes for tensor in shard.values())).update(parts)
    weight_map = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": QUANTISED} if quantised else {})))
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("quantised", [False, True], ids=["bfloat16", "fp8"])
def test_loading_holds_one_shard_beside_the_model_and_takes_no_longer_than_reading_twice_and_50_ms(tmp_path, quantised):
    largest = make_checkpoint(tmp_path, quantised)
    output = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=100).stdout
    measured = json.loads(output)
    assert measured["peak"] <= measured["held"] + largest + MARGIN_BYTES
    assert measured["load_s"] <= 2 * measured["read_s"] + 0.05
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert measured["held"] <= stored < measured["held"] * 1.01
