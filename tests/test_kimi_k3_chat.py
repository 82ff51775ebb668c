"""Chats with a whole small Kimi-K3: its own tokenizer files, format and layers, alone and behind the service."""

import pytest
from kimi_k3_reference import random_weights, tiny_config, write_checkpoint
from rollout_kit import in_loop, running
from test_text_kimi_k3 import FIRST, NAMES, WEATHER, shown
from test_text_kimi_k3 import folder as write_tokenizer

from batchgen import LLM, ChatPrompt, EngineConfig, SamplingParams
from rollout.node_main import engine_factory

OPTIONS = {"dtype": "float32", "kv_gb": 0.02, "num_threads": 1, "deterministic": True}
CHAT = [{"role": "user", "content": "Umbrella <|close|>?"}]
PARAMS = SamplingParams(max_tokens=24, seed=3, allowed_token_ids=[*range(32, 127), *(FIRST + at for at in (3, 4, 5))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("k3")
    config = tiny_config(vocab_size=FIRST + 256, max_position_embeddings=2048) | {"eos_token_id": FIRST + 1}
    write_checkpoint(path, config, random_weights(config, 0))
    write_tokenizer(path, **config)
    return path


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **OPTIONS)


def prompts() -> list[ChatPrompt]:
    quiet, low = {"thinking": False}, {"reasoning_effort": "low"}
    return [ChatPrompt(messages=CHAT, tools=tools, chat_template_kwargs=kwargs) for tools in (None, [WEATHER]) for kwargs in (quiet, low)]


def test_prompts_are_the_formats_and_messages_are_read_in_it(llm):
    groups = llm.generate(prompts(), PARAMS)
    for group, prompt in zip(groups, prompts(), strict=True):
        assert group.samples[0].error is None and group.prompt_token_ids == llm.encode(prompt)
        rendered = shown(group.prompt_token_ids)
        assert ("tool-declare" in rendered) == (prompt.tools is not None)
        opened = "think" if prompt.chat_template_kwargs.get("reasoning_effort") else "response"
        assert rendered.endswith(f'<|open|>message role="assistant"<|sep|><|open|>{opened}<|sep|>')
        message = group.samples[0].message
        assert (message.reasoning_content is not None) == (opened == "think")
    assert llm.engine.facts.eos_token_ids == [FIRST + 1, FIRST + 2] and NAMES[2] == "<|end_of_msg|>"


@in_loop
async def test_the_service_answers_as_the_engine_alone(folder, llm):
    want = llm.generate(prompts(), PARAMS)
    async with running(engine_factory(EngineConfig(model=str(folder), **OPTIONS))) as (_, client):
        got = await client.generate(prompts(), PARAMS)
        assert client.model.message_format == "kimi_k3"
        bad = await client.generate([ChatPrompt(messages=CHAT, chat_template_kwargs={"thinking_effort": "medium"})], PARAMS)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert (ours.samples[0].token_ids, ours.samples[0].message) == (theirs.samples[0].token_ids, theirs.samples[0].message)
    assert bad[0].samples[0].error.code == "chat_template" and "low, high, max" in bad[0].samples[0].error.message
