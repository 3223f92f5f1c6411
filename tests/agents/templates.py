"""Chat templates with the traits of the known families, each with its special tokens.

Written for these tests: short, but with everything that makes continuing a conversation hard.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template and the tokens around it.

    `eos`: the tokenizer's own. `end`: the token behind a reply. `call_end`: the one behind a reply
    with calls. `other_end`: another that models of the family draw. `closes`, `call_closes`: whether
    that token belongs to the reply, and not to the message after it. `header`: the text that a model
    writes in front of its content.
    """

    template: str
    specials: tuple[str, ...]
    eos: str
    end: str
    call_end: str
    other_end: str
    system: bool = True
    tools: bool = True
    parallel: bool = True
    trims: bool = False
    closes: bool = True
    call_closes: bool = True
    header: str = ""


# ChatML with hermes calls: a newline behind the end of a turn, results of tools merged.
QWEN25 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'You are Qwen.' }}
    {{- '\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'You are Qwen.' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first)
        or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{ '\\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# As above; reasoning only in turns after the last question, an empty one where there was none.
QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or m.role == 'system' %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content or '' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# A date, one call a turn, tools in the first question, two tokens that end a turn, trimmed texts.
LLAMA3 = """
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- set ns = namespace(first=true) %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) }}
        {{- '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
        {{- '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
        {{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}
    {%- elif m.role != 'system' %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and ns.first and m.role == 'user' %}
            {{- 'Functions:\\n' }}
            {%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
        {%- endif %}
        {%- set ns.first = false %}
        {{- (m.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

# Two roles that alternate once neighbours of a role are merged; no system role, no tools; trims.
GEMMA = """
{{- bos_token }}
{%- set ns = namespace(open='') %}
{%- for m in messages %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {%- if role not in ['user', 'model'] %}{{ raise_exception('unknown role ' + role) }}{% endif %}
    {%- if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}
    {%- if role == ns.open %}
        {{- '\\n\\n' }}
    {%- else %}
        {%- if ns.open %}{{ '<end_of_turn>\\n' }}{% endif %}
        {{- '<start_of_turn>' + role + '\\n' }}
    {%- endif %}
    {%- set ns.open = role %}
    {{- m.content | trim }}
{%- endfor %}
{{- '<end_of_turn>\\n' }}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

# Tools in front of the newest question, the system text within it, ids of nine characters, no
# newline anywhere, results of tools as JSON.
MISTRAL = """
{%- set ns = namespace(last=-1, system='') %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
    {%- if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}
{%- endfor %}
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' }}
        {%- if ns.system and loop.index0 == ns.last %}{{ ns.system + '\\n\\n' }}{% endif %}
        {{- m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs must have length 9') }}
            {%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']</s>' }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- m.content + '</s>' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs must have length 9') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + (m.content | tojson) + ', "call_id": "' }}
        {{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# Channels: a reply begins within its header, ends otherwise when something follows, and its
# reasoning goes when a final answer came; a result needs a call before it and takes its name.
GPT_OSS = """
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\nnamespace functions {' }}
    {%- for tool in tools %}{{ 'type ' + tool.function.name + ' = () => any;' }}{% endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set ns = namespace(called=none) %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}
        {%- set ns.called = m.tool_calls[0].function.name %}
        {%- if m.content %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>commentary to=functions.' + ns.called }}
        {{- ' <|constrain|>json<|message|>' + (m.tool_calls[0].function.arguments | tojson) }}
        {{- '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- set ns.called = none %}
    {%- elif m.role == 'tool' %}
        {%- if ns.called is none %}{{ raise_exception('a result without a call') }}{% endif %}
        {{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (m.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

# No newline; arguments are texts; results in a block that ends otherwise for the last; the
# assistant's mark is missing behind results.
DEEPSEEK = """
{{- '<｜begin▁of▁sentence｜>' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for tool in tools or [] %}{{ '\\n### ' + tool.function.name }}{% endfor %}
{%- set ns = namespace(results=false) %}
{%- for m in messages %}
    {%- if m.role != 'tool' and ns.results %}
        {{- '<｜tool▁outputs▁end｜>' }}
        {%- if m.role == 'assistant' %}{{ '' }}{% endif %}
    {%- endif %}
    {%- if m.role == 'user' %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- if not ns.results %}{{ '<｜Assistant｜>' }}{% endif %}
        {%- set content = m.content or '' %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- content }}
        {%- if m.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in m.tool_calls %}
                {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
                {{- call.function.arguments + '<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}
        {%- if not ns.results %}{{ '<｜tool▁outputs▁begin｜>' }}{% endif %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
    {%- set ns.results = m.role == 'tool' %}
{%- endfor %}
{%- if ns.results %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.results %}{{ '<｜Assistant｜>' }}{% endif %}
"""

# No token ends a turn: the role of the next message does.
GLM = """
{{- '[gMASK]<sop>' }}
{%- for tool in tools or [] %}{{ '<|system|>\\n' + (tool | tojson) }}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}{{ '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""

# A result goes on within the turn that called.
GEMMA4 = """
{{- bos_token }}
{%- for tool in tools or [] %}{{ '<|tool>declaration:' + tool.function.name }}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|tool_response>response:' + m.name + '{value:<|"|>' + m.content + '<|"|>}' }}
        {{- '<tool_response|>' }}
        {%- if not loop.last and messages[loop.index0 + 1].role == 'user' %}
            {{- '<turn|>\\n' }}
        {%- endif %}
    {%- else %}
        {%- set follows = m.role == 'assistant' and messages[loop.index0 - 1].role == 'tool' %}
        {%- set role = 'model' if m.role == 'assistant' else m.role %}
        {%- if not follows %}{{ '<|turn>' + role + '\\n' }}{% endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + '{' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- key + ':<|"|>' + (value | string) + '<|"|>' }}
            {%- endfor %}
            {{- '}<tool_call|>' }}
        {%- endfor %}
        {%- if not m.tool_calls %}{{ '<turn|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\\n' }}{% endif %}
"""

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
FAMILIES = {
    "qwen2.5": Family(
        template=QWEN25,
        specials=CHATML,
        eos="<|im_end|>",
        end="<|im_end|>",
        call_end="<|im_end|>",
        other_end="<|endoftext|>",
    ),
    "qwen3": Family(
        template=QWEN3,
        specials=CHATML,
        eos="<|im_end|>",
        end="<|im_end|>",
        call_end="<|im_end|>",
        other_end="<|endoftext|>",
    ),
    "llama3": Family(
        template=LLAMA3,
        specials=(
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ),
        eos="<|eot_id|>",
        end="<|eot_id|>",
        call_end="<|eot_id|>",
        other_end="<|eom_id|>",
        parallel=False,
        trims=True,
    ),
    "gemma": Family(
        template=GEMMA,
        specials=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        end="<end_of_turn>",
        call_end="<end_of_turn>",
        other_end="<eos>",
        system=False,
        tools=False,
        trims=True,
    ),
    "mistral": Family(
        template=MISTRAL,
        specials=(
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
            *("[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<|endoftext|>"),
        ),
        eos="</s>",
        end="</s>",
        call_end="</s>",
        other_end="<|endoftext|>",
    ),
    "gpt-oss": Family(
        template=GPT_OSS,
        specials=(
            *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
            *("<|return|>", "<|call|>", "<|endoftext|>"),
        ),
        eos="<|return|>",
        end="<|end|>",
        call_end="<|call|>",
        other_end="<|return|>",
        header="<|channel|>final<|message|>",
        parallel=False,
    ),
    "deepseek": Family(
        template=DEEPSEEK,
        specials=(
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"),
            "<|endoftext|>",
        ),
        eos="<｜end▁of▁sentence｜>",
        end="<｜end▁of▁sentence｜>",
        call_end="<｜end▁of▁sentence｜>",
        other_end="<|endoftext|>",
    ),
    "glm": Family(
        template=GLM,
        specials=(
            *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
            "<|observation|>",
        ),
        eos="<|endoftext|>",
        end="<|user|>",
        call_end="<|observation|>",
        other_end="<|endoftext|>",
        closes=False,
        call_closes=False,
    ),
    "gemma4": Family(
        template=GEMMA4,
        specials=(
            *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"),
            *("<|tool_response>", "<tool_response|>", '<|"|>'),
        ),
        eos="<eos>",
        end="<turn|>",
        call_end="<|tool_response>",
        other_end="<eos>",
        call_closes=False,
    ),
}
