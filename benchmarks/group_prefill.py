"""How many prompt tokens a group costs. In: options. Out: a table and, last, one JSON line, from the engine's own counters.

python benchmarks/group_prefill.py               # n = 16 samples of a 512-token prompt: 512 tokens, not 8,192
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from workloads import MODELS, write_model

from batchgen import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=16, help="samples of the prompt (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-bench", help="where the model is kept")
    options = parser.parse_args()
    llm = LLM(str(write_model("cpu-moe", "float32", options.cache / "cpu-moe-float32")), dtype="float32", kv_gb=0.2)
    params = SamplingParams(n=options.n, max_tokens=options.max_tokens, ignore_eos=True)
    rng = random.Random(0)
    rows = []
    for case, prompt in [("new prompt", None), ("same prompt again", None), ("another prompt", None)]:
        if case != "same prompt again":
            prompt = last = [rng.randrange(MODELS["cpu-moe"]["vocab_size"]) for _ in range(options.prompt_tokens)]
        before, start = llm.engine.stats().prefill_tokens, time.perf_counter()
        group = llm.generate([prompt or last], params)[0]
        taken = time.perf_counter() - start
        rows.append(
            {"case": case, "prefilled": llm.engine.stats().prefill_tokens - before, "samples": len(group.samples), "seconds": taken}
        )
    print(f"n = {options.n}, prompt of {options.prompt_tokens} tokens; one prompt per sample would be {options.n * options.prompt_tokens}")
    print(f"{'case':20}{'prefilled tokens':>18}{'seconds':>10}")
    for row in rows:
        print(f"{row['case']:20}{row['prefilled']:18}{row['seconds']:10.3f}")
    print(json.dumps({"benchmark": "group_prefill", "n": options.n, "prompt_tokens": options.prompt_tokens, "rows": rows}))


if __name__ == "__main__":
    main()
