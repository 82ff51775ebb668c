"""What packed weights cost and save on a CPU. In: options. Out: a table and, last, one JSON line; times are medians, side by side.

python benchmarks/quant_cpu.py                   # dense products and an expert layer; ratio: time against bfloat16 weights
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from batchgen.kernels import cpu
from batchgen.moe.activation import SILU
from batchgen.quant.format import Format
from batchgen.quant.fp8 import Fp8
from batchgen.quant.int4 import Int4
from batchgen.quant.mxfp4 import Mxfp4Packed
from batchgen.quant.packed import Packed

FORMATS: dict[str, Format] = {"fp8": Fp8(), "mxfp4": Mxfp4Packed(), "int4": Int4()}


def medians(cases: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median time of each case; cases take turns, so that all see the machine's same moods."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def packed(weight: torch.Tensor) -> dict[str, Packed]:
    return {name: Packed(form, form.encode(weight)) for name, form in FORMATS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512], help="tokens of a product (default %(default)s)")
    parser.add_argument("--shape", type=int, nargs=2, default=[8192, 4096], help="outputs and inputs (default %(default)s)")
    parser.add_argument("--experts", type=int, nargs=3, default=[32, 2048, 768], help="experts, model, width (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = cpu.load()
    if kernels is None:
        raise SystemExit("the CPU's kernels need a C compiler")
    torch.manual_seed(0)
    rows = []

    def measure(what: str, num_tokens: int, cases: dict[str, Callable[[], object]], sizes: dict[str, int]) -> None:
        taken = medians(cases, options.seconds)
        for name, seconds in taken.items():
            ratio = seconds / taken["bfloat16"]
            rows.append({"what": what, "tokens": num_tokens, "weights": name, "ms": seconds * 1e3, "ratio": ratio, "bytes": sizes[name]})
            print(f"{what:14}{num_tokens:8}{name:>12}{seconds * 1e3:12.3f}{ratio:10.2f}{sizes[name] / 1e6:12.1f}", flush=True)

    print(f"{'product':14}{'tokens':>8}{'weights':>12}{'ms':>12}{'ratio':>10}{'MB':>12}")
    weight = torch.randn(*options.shape)
    plain = {"float32": weight, "bfloat16": weight.bfloat16()}
    matrices = packed(weight)
    sizes = {name: each.nbytes for name, each in (plain | matrices).items()}
    for num_tokens in options.rows:
        x = torch.randn(num_tokens, options.shape[1])
        cases: dict[str, Callable[[], object]] = {name: lambda w=each, x=x: kernels.linear(x, w) for name, each in plain.items()}
        cases |= {name: lambda w=each, x=x: kernels.packed_linear(x, w) for name, each in matrices.items()}
        measure("dense", num_tokens, cases, sizes)

    num_experts, depth, width = options.experts
    gate, up, down = torch.randn(num_experts, width, depth), torch.randn(num_experts, width, depth), torch.randn(num_experts, depth, width)
    layers = {
        dtype: (torch.cat((gate, up), 1).to(getattr(torch, dtype)), down.to(getattr(torch, dtype))) for dtype in ("float32", "bfloat16")
    }
    stacks = {name: tuple(packed(each)[name] for each in (gate, up, down)) for name in FORMATS}
    sizes = {name: sum(each.nbytes for each in layer) for name, layer in (layers | stacks).items()}
    for num_tokens in options.rows:
        x, (weights, ids) = torch.randn(num_tokens, depth), torch.rand(num_tokens, num_experts).topk(4)
        rest = (ids, weights, SILU)
        cases = {name: lambda w=layer, x=x, rest=rest: kernels.experts(x, *w, *rest) for name, layer in layers.items()}
        cases |= {name: lambda w=layer, x=x, rest=rest: kernels.packed_experts(x, *w, *rest) for name, layer in stacks.items()}
        measure("experts, top-4", num_tokens, cases, sizes)
    print(
        json.dumps({"benchmark": "quant_cpu", "threads": options.threads, "shape": options.shape, "experts": options.experts, "rows": rows})
    )


if __name__ == "__main__":
    main()
