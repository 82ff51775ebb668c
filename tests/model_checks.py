"""What holds for every family, whatever it is compared with."""

import random
from pathlib import Path
from typing import Any

from batchgen import LLM, SamplingParams
from batchgen.events import SampleFinished
from batchgen.request import Request

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


def assert_samples_of_a_group_are_those_of_lone_requests(folder: Path) -> None:
    """Samples that share a prompt's pages and state are bit for bit those of engines that computed the prompt for each of them."""
    params = SamplingParams(n=3, max_tokens=20, seed=5, ignore_eos=True)
    prompts = [PROMPTS[0], PROMPTS[4]]
    groups = make(folder, deterministic=True, page_size=4).generate(prompts, params)
    for index in range(params.n):
        engine = make(folder, deterministic=True, page_size=4).engine
        for number, ids in enumerate(prompts):
            engine.submit(Request(request_id=str(number), prompt_token_ids=ids, params=params, sample_indices=[index], seed_base=5))
        alone = {}
        while engine.has_work:
            alone |= {event.request_id: event.sample for event in engine.step() if isinstance(event, SampleFinished)}
        for number, group in enumerate(groups):
            assert alone[str(number)].token_ids == group.samples[index].token_ids
            assert alone[str(number)].logprobs == group.samples[index].logprobs
