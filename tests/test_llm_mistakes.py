"""What users get wrong when they call LLM: the message names the mistake and what to do, and nothing is generated."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from batchgen import LLM, ChatPrompt, EngineConfig, SamplingParams
from batchgen.errors import ModelError, WeightUpdateError
from batchgen.text.prompts import as_list, params_of_each

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
OPTIONS = {"dtype": "float32", "kv_gb": 0.01, "max_model_len": 64, "num_threads": 1}
TURN = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("deepseek_v3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **OPTIONS)


def test_an_unknown_option_is_refused_with_those_there_are(folder):
    with pytest.raises(TypeError, match="no option 'tensor_parallel_size'; its options are dtype, device"):
        LLM(folder, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device is cpu, cuda or cuda:N, got 'gpu'"),
        ({"device": "cuda:x"}, "device is cpu, cuda or cuda:N"),
        ({"device": None}, "device is cpu, cuda or cuda:N, got None"),
        ({"num_threads": "2"}, "num_threads is an integer, got '2'"),
        ({"max_num_seqs": None}, "max_num_seqs is an integer, got None"),
        ({"seed": 0.5}, "seed is an integer, got 0.5"),
        ({"kv_gb": "1"}, "kv_gb is a number or None, got '1'"),
        ({"kv_gb": float("inf")}, "kv_gb is positive or None, got inf"),
        ({"max_num_seqs": 10**9}, "max_num_seqs is at most 65536, got 1000000000"),
        ({"num_threads": 10**6}, "num_threads is at most 1024, got 1000000"),
        ({"deterministic": "no"}, "deterministic is true or false, got 'no'"),
        ({"kv_gb": float("nan")}, "kv_gb is positive or None, got nan"),
    ],
)
def test_options_of_a_wrong_type_are_refused_with_their_value(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", **options)


def test_a_cuda_device_that_is_not_there_is_told(folder):
    with pytest.raises(ModelError, match=r"device cuda:99 is not there: torch .* sees [0-9]+ CUDA devices") as error:
        LLM(folder, **OPTIONS, device="cuda:99")
    assert error.value.code == "no_device"


def test_an_option_without_effect_says_so(folder, caplog):
    LLM(folder, **OPTIONS, host_memory_gb=8)
    assert "host_memory_gb has no effect" in caplog.text


@pytest.mark.parametrize("single", ["hi", [1, 2, 3], [TURN], ChatPrompt(messages=[TURN])])
def test_a_single_prompt_outside_a_list_is_refused(llm, single):
    with pytest.raises(ValueError, match="got a single one; wrap it in a list"):
        llm.generate(single)
    assert as_list([single]) == [single]


@pytest.mark.parametrize("params", [{"max_tokens": 4}, (GREEDY,), [GREEDY.__class__, GREEDY]])
def test_what_are_no_sampling_params_is_refused(llm, params):
    with pytest.raises(TypeError, match="params is a SamplingParams, or a list"):
        llm.generate([[1], [2]], params)


def test_params_come_one_for_all_or_one_for_each():
    other = SamplingParams(n=2)
    assert params_of_each([[1], [2]], other) == [other, other]
    assert params_of_each([[1], [2]], [GREEDY, other]) == [GREEDY, other]
    assert params_of_each([[1]], None) == [SamplingParams()]
    with pytest.raises(ValueError, match="2 prompts but 1 sampling params"):
        params_of_each([[1], [2]], [other])


def test_ids_may_be_a_tuple_an_array_or_a_tensor(llm):
    groups = llm.generate([[5, 6, 7], (5, 6, 7), np.array([5, 6, 7], dtype=np.int32), torch.tensor([5, 6, 7])], GREEDY)
    assert [group.prompt_token_ids for group in groups] == [[5, 6, 7]] * 4
    assert len({tuple(group.samples[0].token_ids) for group in groups}) == 1


@pytest.mark.parametrize("prompt", [torch.tensor([[5, 6]]), np.array([0.5]), np.array(5), [True], [5, "a"], None])
def test_what_is_no_prompt_fails_alone(llm, prompt):
    bad, good = llm.generate([prompt, [5]], GREEDY)
    assert bad.samples[0].error is not None and bad.samples[0].error.code == "invalid_prompt"
    assert good.samples[0].finish_reason == "length"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_call_that_is_broken_off_leaves_no_work_behind(llm, error):
    def break_off(index, sample):
        raise error

    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with pytest.raises(error):
        llm.generate([[5], [6], [7]], [GREEDY, long, long], on_sample=break_off)
    before = llm.engine.stats().output_tokens
    assert llm.generate([[5, 6]], GREEDY)[0].samples[0].finish_reason == "length"
    assert llm.engine.stats().output_tokens - before == 4 and not llm.engine.has_work


def test_updates_take_a_module_with_its_buffers_and_tell_where_they_are(folder):
    from transformers import AutoModelForCausalLM

    llm, trainer = LLM(folder, **OPTIONS), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(WeightUpdateError, match=r"e_score_correction_bias.*named_parameters\(\) leaves out its buffers"):
        llm.update_weights(trainer.named_parameters(), version=1)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(0.8)
    llm.update_weights(trainer, version=1)
    ids = torch.tensor([[5, 6, 7]])
    expected = trainer.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4, eos_token_id=None, pad_token_id=0
    )
    sample = llm.generate([[5, 6, 7]], GREEDY)[0].samples[0]
    assert sample.token_ids == expected[0, 3:].tolist()
    assert sample.weights_versions == [(1, 0, 4)]
