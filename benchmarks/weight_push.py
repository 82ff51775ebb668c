"""Time of a weight push, end to end. In: a model folder or a wanted size. Out: a table, and one JSON line last.

Everything is real: `rollout serve` (service process, node process, engine), loopback TCP, and a trainer in this process whose tensors
lie in ordinary memory. Each push is timed from the call to the report; the node has then swapped and dropped its KV.

    python benchmarks/weight_push.py                      # the bundled model: the target is 50 ms
    python benchmarks/weight_push.py --size-mb 500        # a random Qwen3-MoE checkpoint: the target is 1 GB/s
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rollout import RolloutClient
from weights_sync import WeightPublisher

BUNDLED = Path(__file__).parent.parent / "batchgen" / "assets" / "tiny-moe"
START_S = 120


def main():
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or (random_model(Path(scratch), args.size_mb) if args.size_mb else BUNDLED)
        tensors = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        extra = ["--num-threads", str(args.num_threads)] if args.num_threads else []
        with service(folder, args.dtype, args.nodes, extra) as (url, admin_url), RolloutClient(url, admin_url=admin_url) as client:
            reports = [WeightPublisher(client).push(tensors, client.health().weights_version + 1) for _ in range(args.pushes)]
    show(args, folder, reports)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder; default: the bundled model")
    parser.add_argument("--size-mb", type=int, help="push a random Qwen3-MoE checkpoint of about this many MB instead")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="the engine's")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--pushes", type=int, default=8)
    parser.add_argument("--num-threads", type=int, help="torch threads of each node")
    return parser.parse_args()


def random_model(folder, size_mb):
    """A bf16 checkpoint with as many layers as it takes; its shapes are those of a small real model."""
    width, ffn, experts, heads, kv_heads, head_dim, vocab = 1024, 512, 16, 16, 4, 64, 16000
    layer = 3 * experts * width * ffn + width * head_dim * (2 * heads + 2 * kv_heads) + experts * width
    layers = max(1, round((size_mb * 1e6 / 2 - vocab * width) / layer))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "moe_intermediate_size": ffn,
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.input_layernorm.weight": (width,), f"{at}.post_attention_layernorm.weight": (width,)}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (h * head_dim, width) for n, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
        shapes |= {f"{at}.self_attn.o_proj.weight": (width, heads * head_dim), f"{at}.mlp.gate.weight": (experts, width)}
        for e in range(experts):
            shapes |= {f"{at}.mlp.experts.{e}.{name}_proj.weight": (ffn, width) for name in ("gate", "up")}
            shapes[f"{at}.mlp.experts.{e}.down_proj.weight"] = (width, ffn)
    save_file({name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


@contextmanager
def service(folder, dtype, nodes, extra):
    """`rollout serve` in processes of its own; yields its two addresses."""
    command = [sys.executable, "-m", "rollout.cli", "serve", "--model", str(folder), "--port", "0", "--admin-port", "0"]
    command += ["--dtype", dtype, "--nodes", str(nodes), "--kv-gb", "0.05", *extra]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            urls, deadline = [], time.monotonic() + START_S
            for line in process.stdout:
                urls += re.findall(r"listening on (\S+)", line)
                if line.startswith("ready") or time.monotonic() > deadline:
                    break
            if len(urls) != 2:
                raise SystemExit(f"the service did not start; try: {' '.join(command)}")
            yield urls
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()


def show(args, folder, reports):
    print(f"{reports[0].num_tensors} tensors, {reports[0].num_bytes / 1e6:.1f} MB as sent, {args.nodes} node(s), engine in {args.dtype}")
    print(f"{'push':>4} {'total ms':>9} {'check ms':>9} {'transfer':>9} {'commit':>9} {'stage':>9} {'pause':>9} {'GB/s':>6}")
    for number, r in enumerate(reports, 1):
        stage, pause = max(n.stage_s for n in r.nodes), max(n.paused_s for n in r.nodes)
        times = "".join(f"{1e3 * s:10.1f}" for s in (r.total_s, r.check_s, r.transfer_s, r.commit_s, stage, pause))
        print(f"{number:4d}{times} {r.gb_per_s:6.2f}")
    best, median = min(reports, key=lambda r: r.total_s), sorted(reports, key=lambda r: r.total_s)[len(reports) // 2]
    result = {
        "benchmark": "weight_push",
        "model": folder.name if args.size_mb is None else f"random-{args.size_mb}MB",
        "dtype": args.dtype,
        "nodes": args.nodes,
        "tensors": best.num_tensors,
        "bytes": best.num_bytes,
        "pushes": len(reports),
        "best_ms": round(1e3 * best.total_s, 2),
        "median_ms": round(1e3 * median.total_s, 2),
        "best_gb_per_s": round(best.gb_per_s, 3),
        "median_gb_per_s": round(median.gb_per_s, 3),
        "pause_ms": round(1e3 * max(n.paused_s for n in median.nodes), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
