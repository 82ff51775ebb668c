"""vLLM's CPU build as a benchmark worker. In: a JSON job as argument, a JSON batch a line. Out: a JSON line per batch. Runs in vLLM's venv.

Started by cpu_vs_vllm.py; imports nothing of this repository.
"""

import json
import os
import sys
import time

job = json.loads(sys.argv[1])
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever the engine prints goes to stderr

from vllm import LLM, SamplingParams  # noqa: E402

llm = LLM(
    model=job["model"],
    dtype=job["dtype"],
    skip_tokenizer_init=True,
    max_model_len=job["max_model_len"],
    max_num_seqs=256,
    enable_prefix_caching=False,
    seed=0,
)
print(json.dumps({"ready": True}), file=replies, flush=True)
for line in sys.stdin:
    batch = json.loads(line)
    params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False) for n in batch["lengths"]]
    prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
    start, cpu_start = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    samples = [output.outputs[0] for output in outputs]
    reply = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "num_tokens": [len(sample.token_ids) for sample in samples],
        "num_logprobs": [len(sample.logprobs) for sample in samples],
    }
    print(json.dumps(reply), file=replies, flush=True)
