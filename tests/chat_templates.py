"""Short chat templates in the styles of several families, and a tokenizer for them. In: nothing. Out: Jinja sources, a Tokenizer."""

import json

from text_samples import byte_level

from batchgen.text.tokenizer import Tokenizer

QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content is string %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
DEEPSEEK_V31 = """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif -%}
{%- if not thinking is defined %}{% set thinking = false %}{% endif -%}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
        {{- '<|Assistant|></think>' }}
        {%- if message['content'] is not none %}{{- message['content'] }}{%- endif %}
        {%- for tool in message['tool_calls'] %}
            {{- '<|call|>' + tool['function']['name'] + '<|sep|>' + tool['function']['arguments'] + '<|end|>' }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{- '<|Assistant|></think>' + message['content'] }}
    {%- elif message['role'] == 'tool' %}{{- '<|output|>' + message['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' + ('<think>' if thinking else '</think>') }}{%- endif %}
"""
GLM45 = """
{%- macro visible(content) -%}{%- if content is string %}{{- content }}{%- else %}{{- content }}{%- endif %}{%- endmacro -%}
[gMASK]<sop>
{%- if tools %}{{- '<|system|>\\n' }}{%- for tool in tools %}{{- tool | tojson(ensure_ascii=False) }}\\n{%- endfor %}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{- '<|observation|>\\n<tool_response>' + m.content + '</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>' }}
        {%- set content = visible(m.content) %}
        {%- if content.strip() %}{{- '\\n' + content }}{%- endif %}
        {%- for tc in m.tool_calls or [] %}
            {%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
            {{- '<tool_call>' + tc.name }}
            {%- for k, v in tc.arguments.items() %}
                {{- '<arg_key>' + k + '</arg_key><arg_value>' }}{{- v | tojson if v is not string else v }}{{- '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
    {{- '<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}{%- endif %}
"""
MINIMAX_M2 = """
{%- if model_identity is not defined %}{%- set model_identity = 'You are a helpful assistant.' %}{%- endif %}
{{- ']~b]system\\n' + model_identity }}
{%- for tool in tools or [] %}{{- '<tool>' + (tool.function | tojson) + '</tool>' }}{%- endfor %}
{%- for message in messages %}
    {{- ']~b]' + message.role + '\\n' }}
    {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<invoke name="' + call.function.name + '">' }}
        {%- for k, v in call.function.arguments.items() %}
            {{- '<parameter name="' + k + '">' + (v if v is string else v | tojson) + '</parameter>' }}
        {%- endfor %}
        {{- '</invoke>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}
"""
GPT_OSS = """
{%- if builtin_tools %}{%- set names = builtin_tools | join(',') %}{%- endif %}
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}
{%- if builtin_tools %}{{- ' Tools: ' + names }}{%- endif %}{{- '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- for tool in tools %}{{- 'type ' + tool.function.name + ' = () => any;' }}{%- endfor %}{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.content and message.thinking and message.tool_calls %}{{- raise_exception('both') }}{%- endif %}
        {%- if "thinking" in message %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|start|>assistant to=functions.' + call.function.name + '<|message|>' + (call.function.arguments | tojson) + '<|call|>' }}
        {%- endfor %}
        {%- if message.content %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
KIMI_K2 = """
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
    <|im_{{ message.role }}|>{{ message.get('name') or message.role }}<|im_middle|>
    {%- if message.role == 'tool' -%}## Return of {{ message.tool_call_id }}{{ '\\n' }}{%- endif -%}
    {{- message.content }}
    {%- for call in message.get('tool_calls') or [] -%}
        <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
        {%- set given = call['function']['arguments'] -%}
        {%- if given is string %}{{ given }}{%- else %}{{ given | tojson }}{%- endif -%}
        <|tool_call_end|>
    {%- endfor -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + '</s>' }}
    {%- else %}{{- '[TOOL_RESULTS] {"content": ' + message.content ~ ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
FAMILIES = {"qwen3": QWEN3, "deepseek_v31": DEEPSEEK_V31, "glm45": GLM45, "minimax_m2": MINIMAX_M2, "gpt_oss": GPT_OSS, "kimi_k2": KIMI_K2}


HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


def tokenizer(template: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """Bytes and a few merges; `special` are further control tokens."""
    spec = json.loads(json.dumps(byte_level()))
    first = 1 + max(entry["id"] for entry in spec["added_tokens"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] += [{"id": first + at, "content": name, "special": True, **flags} for at, name in enumerate(special)]
    return Tokenizer(spec, {"bos_token": "<s>"}, chat_templates={"default": template.lstrip("\n")})
