"""Makes tests/goldens/chat_templates.json: the texts that transformers writes with chat templates in the style of published ones.

python tests/train/data/make_templates.py     # needs the extra `reference`
"""

import json
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

GOLDENS = Path(__file__).parents[2] / "goldens"
TEMPLATES = {
    "headers": """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if not date is defined and strftime_now is not defined %}
    {{- raise_exception('There is no date.') }}
{%- endif %}
{{- 'Cutting knowledge: 2023\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "thoughts": """{% set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" and message.content is string %}
        {%- set ns.found = true %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') if loop.index0 < ns.last else message.content %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' }}{% generation %}{{ content }}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    "instructions": """{{ bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ ' ' + message['content'] | trim + eos_token }}
    {% else %}
        {{ raise_exception('Only the roles user and assistant are known.') }}
    {% endif %}
{% endfor %}
""",
    "turns": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
  {% if not message['content'] %}{% continue %}{% endif %}
  {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}""",
}
CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Ünïcode <b> & 'quotes' \n"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2 "},
        {"role": "user", "content": "And {{ 2 + 2 }}?"},
    ],
    [
        {"role": "user", "content": "Weather"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "Zürich <ZH>"}}}]},
    ],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
]


def text_of(tokenizer, template, chat, prompts):
    try:
        return tokenizer.apply_chat_template(chat, chat_template=template, add_generation_prompt=prompts, tokenize=False)
    except TemplateError:
        return None


def main():
    file = GOLDENS / "tokenizers" / "byte_level" / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>", eos_token="</s>")
    rows = [
        {"template": name, "chat": number, "prompts": prompts, "text": text_of(tokenizer, template, chat, prompts)}
        for name, template in TEMPLATES.items()
        for number, chat in enumerate(CHATS)
        for prompts in (True, False)
    ]
    made = {"templates": TEMPLATES, "chats": CHATS, "rows": rows}
    (GOLDENS / "chat_templates.json").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
