"""What holds for every family, whatever it is compared with."""

import random
from pathlib import Path
from typing import Any

from batchgen import LLM, SamplingParams

PROMPTS = [random.Random(n).choices(range(256), k=n) for n in (7, 1, 41, 18, 90)]
CUTS: dict[str, dict[str, int]] = {
    "chunked": {"max_num_batched_tokens": 16},
    "single": {"max_num_seqs": 1},
    "preempted": {"page_size": 4, "pages": 46},
}


def make(folder: Path, **options: Any) -> LLM:
    """A float32 engine."""
    return LLM(folder, **{"dtype": "float32", "kv_gb": 0.01, "num_threads": 1, **options})


def assert_results_do_not_depend_on(options: dict[str, int], folder: Path, device: str = "cpu") -> None:
    """Samples of an engine with these options are bit for bit those of one that has room for all at once."""
    params = SamplingParams(n=2, max_tokens=40, seed=5, ignore_eos=True)
    llm = make(folder, device=device, deterministic=True)
    whole = llm.generate(PROMPTS, params)
    settings: dict[str, Any] = dict(options)
    if num_pages := settings.pop("pages", None):
        page_bytes = llm.engine.memory.kv_bytes // llm.engine.memory.num_pages * settings["page_size"] // llm.engine.memory.page_size
        settings["kv_gb"] = num_pages * page_bytes / 1e9
    llm = make(folder, device=device, deterministic=True, **settings)
    cut = llm.generate(PROMPTS[::-1], params)[::-1]
    if num_pages:
        assert llm.engine.stats().preemptions > 0
    assert [[s.token_ids for s in g.samples] for g in cut] == [[s.token_ids for s in g.samples] for g in whole]
    assert [[s.logprobs for s in g.samples] for g in cut] == [[s.logprobs for s in g.samples] for g in whole]
