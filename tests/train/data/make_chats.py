"""Makes tests/goldens/chats.json: the tokens and masks that transformers gives with chat templates in the style of published ones.

python tests/train/data/make_chats.py     # needs the extra `reference`

Each template is written with the marks of answers. Without them, it is the template as it was published.
"""

import json
import re
import tempfile
from datetime import datetime
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors

GOLDENS = Path(__file__).parents[2] / "goldens"
CHATML = {"base": "byte_level", "bos": None, "eos": "<|im_end|>", "special": ["<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|endoftext|>"]}
LLAMA = {
    "base": "byte_level",
    "bos": "<|begin_of_text|>",
    "eos": "<|eot_id|>",
    "special": ["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
    "begins": True,
}
PIECES = {"base": "metaspace", "bos": "<s>", "eos": "</s>", "special": []}
STYLES = {
    "chatml": (
        CHATML,
        """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}\
{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    ),
    "llama3": (
        LLAMA,
        """{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}\
{% set content = message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set head = bos_token + head %}{% endif %}{{ head }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ content }}{% endgeneration %}{% else %}{{ content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    ),
    "llama3.1": (
        LLAMA,
        """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "Given the following functions, please respond with a JSON for a function call.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {% generation %}{{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}{% endgeneration %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    ),
    "qwen2.5": (
        CHATML,
        """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    ),
    "qwen3": (
        CHATML,
        """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' ~ (tool_call.function | tojson) ~ '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    ),
    "gemma": (
        {"base": "metaspace", "bos": "<bos>", "eos": "<eos>", "special": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]},
        """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{{ '<start_of_turn>model\\n' }}\
{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}\
{% else %}{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    ),
    "mistral": (
        PIECES,
        """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    ),
    "mistral-tools": (
        {
            **PIECES,
            "special": [
                "[INST]",
                "[/INST]",
                "[AVAILABLE_TOOLS]",
                "[/AVAILABLE_TOOLS]",
                "[TOOL_CALLS]",
                "[TOOL_RESULTS]",
                "[/TOOL_RESULTS]",
            ],
        },
        """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.first %}
            {{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "tool" %}
        {{- "[TOOL_RESULTS]" + message["content"] + "[/TOOL_RESULTS]" }}
    {%- elif message.tool_calls is defined %}
        {%- generation %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.function | tojson }}{{ ", " if not loop.last }}
        {%- endfor %}
        {{- "]" + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {%- generation %}{{- message["content"] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
""",
    ),
    "phi3": (
        {
            "base": "metaspace",
            "bos": "<s>",
            "eos": "<|endoftext|>",
            "special": ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
        },
        """{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}\
{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}\
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    ),
    "phi4": (
        CHATML,
        """{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant<|im_sep|>' }}\
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}\
{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    ),
    "zephyr": (
        PIECES,
        """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '
' }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    ),
    "deepseek": (
        {
            "base": "byte_level",
            "bos": "<｜begin▁of▁sentence｜>",
            "eos": "<｜end▁of▁sentence｜>",
            "special": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
            "begins": True,
        },
        """{%- set ns = namespace(system='') -%}{%- for message in messages %}{%- if message['role'] == 'system' %}\
{% set ns.system = message['content'] %}{%- endif %}{%- endfor -%}{{ bos_token }}{{ ns.system }}\
{%- for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}\
{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' }}\
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}\
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}""",
    ),
    "command": (
        {
            "base": "byte_level",
            "bos": "<BOS_TOKEN>",
            "eos": "<|END_OF_TURN_TOKEN|>",
            "special": [
                "<BOS_TOKEN>",
                "<|START_OF_TURN_TOKEN|>",
                "<|END_OF_TURN_TOKEN|>",
                "<|USER_TOKEN|>",
                "<|CHATBOT_TOKEN|>",
                "<|SYSTEM_TOKEN|>",
            ],
            "begins": True,
        },
        """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}\
{% if system_message != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}\
{% for message in loop_messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}\
{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}\
{% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}\
{% generation %}{{ content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endgeneration %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}""",
    ),
    "tulu": (
        PIECES,
        """{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}\
{{ '<|assistant|>\\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% if not loop.last %}{{ '\\n' }}{% endif %}\
{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}""",
    ),
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now>",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich <ZH>"}}}
CHATS = [
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there"}]},
    {
        "messages": [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "And {{ 2 + 2 }} <b>?"},
            {"role": "assistant", "content": "4.\n\nReally."},
        ]
    },
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Ünïcode 你好?"},
            {"role": "assistant", "content": "你好 🙂 é\u0301 👩‍👩‍👧"},
            {"role": "user", "content": "def f(x):\n    return x\n"},
            {"role": "assistant", "content": "def f(x):\n\treturn x"},
            {"role": "user", "content": "Thanks"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Weather in Zürich?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"sky": "grey"}'},
            {"role": "assistant", "content": "It is grey."},
        ],
        "tools": [WEATHER],
    },
    {
        "messages": [
            {"role": "user", "content": "Think"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nDone"},
            {"role": "user", "content": "More"},
            {"role": "assistant", "content": "<think>\nno\n</think>\n\nNo"},
        ]
    },
]


def folder_of(style, folder, template):
    """Writes the folder of a tokenizer with these special tokens and this template, and returns its tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer.from_file(str(GOLDENS / "tokenizers" / style["base"] / "tokenizer.json"))
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in style["special"]])
    if style.get("begins"):
        # As Llama 3's, whose texts begin with a token, and whose tokens are said to begin behind their blanks.
        begin = processors.TemplateProcessing(single=f"{style['bos']} $A", special_tokens=[(style["bos"], made.token_to_id(style["bos"]))])
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": style["bos"], "eos_token": style["eos"]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    (folder / "chat_template.jinja").write_text(template)
    return folder / "tokenizer.json"


def without_marks(template):
    """The template as it was published."""
    plain = re.sub(r"\n *\{%- (end)?generation %\}", "", template)
    return re.sub(r"\{%-? (end)?generation %\}", "", plain)


def row_of(tokenizer, chat):
    """The tokens and the mask of a chat; None if the template refuses it."""
    from jinja2 import TemplateError

    options = {"tools": chat.get("tools"), "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        made = tokenizer.apply_chat_template(chat["messages"], **options)
    except (TemplateError, TypeError):
        return None
    return {"ids": made["input_ids"], "mask": made["assistant_masks"]}


class Day(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def main():
    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = Day
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (style, template) in STYLES.items():
            folder_of(style, Path(folder) / name, template)
            tokenizer = AutoTokenizer.from_pretrained(Path(folder) / name)
            rows[name] = [row_of(tokenizer, chat) for chat in CHATS]
            tokenizer.chat_template = without_marks(template)
            for chat, row in zip(CHATS, rows[name], strict=True):
                # The marks change no text.
                if row is not None:
                    assert (
                        tokenizer.apply_chat_template(chat["messages"], tools=chat.get("tools"), return_dict=True)["input_ids"]
                        == row["ids"]
                    ), name
    print({name: [None if row is None else f"{sum(row['mask'])}/{len(row['ids'])}" for row in some] for name, some in rows.items()})
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(some)}" for name, some in rows.items())
    (GOLDENS / "chats.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
