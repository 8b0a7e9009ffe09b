"""A checkpoint's own chat template.  Expected texts are those of `transformers` 5.24 with the templates below."""

import pytest

from jaxforge.config.errors import ConfigError
from jaxforge.data.conversation import Conversation, Media, Message, SampleError
from jaxforge.data.jinja_template import JinjaTemplate
from jaxforge.data.templates import Piece

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "</s>"]
# ChatML with a system message of its own, with content parts, as vision checkpoints have it
VISION = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if 'image' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'video' in part %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- else %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}"""
# the end token after a space, contents trimmed, as older checkpoints have it
TRIMMING = """{% for m in messages %}
{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]
{%- else %} {{ m.content | trim }} {{ eos_token }}
{%- endif %}
{% endfor %}"""
# answers marked by the template
MARKED = """{%- for m in messages %}{%- if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}

{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{%- endfor %}"""
# the last answer gets an empty thought, and loses its own, as in Qwen3
THINKING = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- m.content.split('</think>')[-1].lstrip('\\n') }}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}"""


def jinja(text, system=None):
    return JinjaTemplate(text, {"eos_token": "</s>"}, SPECIAL, system)


def say(role, *parts, loss=None):
    return Message(role, parts, role == "assistant" if loss is None else loss)


def chat(*messages):
    return Conversation(messages)


def texts(pieces):
    return "".join(piece.text for piece in pieces if isinstance(piece, Piece))


def targets(pieces):
    return "|".join(piece.text for piece in pieces if isinstance(piece, Piece) and piece.is_target)


TWO_TURNS = chat(say("user", " What is 2+2?\n"), say("assistant", "4"), say("user", "x"), say("assistant", "hi"))


def test_an_answer_up_to_its_end_token_is_the_target():
    # F44
    pieces = jinja(VISION).render(TWO_TURNS)
    assert texts(pieces) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n What is 2+2?\n<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    )
    assert targets(pieces) == "4<|im_end|>|hi<|im_end|>"


def test_an_answer_that_stands_elsewhere_too_is_still_found():
    conversation = chat(say("user", "say assistant"), say("assistant", "assistant"))
    assert targets(jinja(VISION).render(conversation)) == "assistant<|im_end|>"


def test_trimmed_answers_are_learnt_trimmed():
    pieces = jinja(TRIMMING).render(chat(say("user", " a "), say("assistant", "\n b "), say("user", "c")))
    assert texts(pieces) == "[INST] a [/INST] b </s>[INST] c [/INST]"
    assert targets(pieces) == "b </s>"


def test_an_answer_without_loss_is_no_target():
    conversation = chat(say("user", "a"), say("assistant", "b", loss=False), say("user", "c"), say("assistant", "d"))
    assert targets(jinja(VISION).render(conversation)) == "d<|im_end|>"
    assert targets(jinja(MARKED).render(conversation)) == "d<|im_end|>"


def test_a_template_may_mark_its_answers():
    pieces = jinja(MARKED).render(TWO_TURNS)
    assert texts(pieces) == (
        "<|im_start|>user\n What is 2+2?\n<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    )
    assert targets(pieces) == "4<|im_end|>|hi<|im_end|>"


def test_a_template_must_mark_every_answer():
    with pytest.raises(ConfigError, match="marks 1 blocks as generation where there are 2 answers"):
        jinja("{% for m in messages %}{% endfor %}{% generation %}a{% endgeneration %}").render(TWO_TURNS)


def test_what_a_template_writes_before_an_answer_is_prompt():
    pieces = jinja(THINKING).render(TWO_TURNS)
    assert texts(pieces).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nhi<|im_end|>\n")
    assert targets(pieces) == "4<|im_end|>|hi<|im_end|>"


def test_a_template_that_rewrites_an_answer_is_refused():
    conversation = chat(say("user", "a"), say("assistant", "<think>\nhm\n</think>\n\nb"))
    with pytest.raises(ConfigError, match=r"changes the answer '<think>.*use data.chat_template=chatml"):
        jinja(THINKING).render(conversation)


@pytest.mark.parametrize(
    "template,message",
    [
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "leaves out"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}</s>{% endfor %}", "leaves out, repeats or reorders"),
        ("{% for m in messages | reverse %}{{ m.content }}</s>{% endfor %}", "leaves out, repeats or reorders"),
        ("{% for m in messages %}{{ m.content | length }}{{ m.content }}</s>{% endfor %}", "changes with"),
        ("{% for m in messages %}{{ m.content }}</s>{% endfor %}{{ 1 if messages[3].content=='hi' }}", "changes w"),
        ("{% for m in messages %}{{ m.content | upper }}</s>{% endfor %}", "changes the answer 'hi'"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "writes no special token after an answer"),
        ("{% for m in messages %}{{ m.content }} over {{ eos_token }}{% endfor %}", "no special token after an answer"),
        ("{% for m in messages %}{{ m.content }}</s>{% endfor %}{{ messages[3].content | length }}", "changes the ans"),
        ("{{ messages.nothing.at_all }}", "fails: UndefinedError"),
        ("{{ messages + 1 }}", "fails: TypeError"),
    ],
)
def test_a_template_that_can_not_be_followed_is_refused(template, message):
    with pytest.raises(ConfigError, match=message) as caught:
        jinja(template).render(TWO_TURNS)
    assert str(caught.value).startswith("data.chat_template=checkpoint: the template ")


def test_a_template_that_is_no_jinja_is_refused():
    with pytest.raises(ConfigError, match="the template isn't valid: .*endfor"):
        jinja("{% for m in messages %}")


def test_a_conversation_that_the_template_refuses_is_a_bad_sample():
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message is needed') }}{% endif %}"
    with pytest.raises(SampleError, match="refuses the conversation: a system message is needed") as caught:
        jinja(template).render(TWO_TURNS)
    assert caught.value.kind == "bad format"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ strftime_now.__self__.year }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(_private=1) }}",
        "{% set n = namespace(a=1) %}{% set n._private = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% include 'a' %}",
        "{{ lipsum() }}",
        "{{ dict() }}",
    ],
)
def test_a_template_reaches_nothing_but_the_messages(template):
    with pytest.raises(ConfigError, match=r"fails: (SecurityError|UndefinedError|TypeError)"):
        jinja(template).render(TWO_TURNS)


def test_json_is_written_without_html_escapes():
    template = (
        "{% for m in messages %}{{ m | tojson }}{{ '\\n' }}{% endfor %}"
        "{{ {'b': 1, 'a': '<é>'} | tojson(indent=1, sort_keys=true) }}"
    )
    pieces = jinja(template).render(chat(say("user", "<b> & 'é'")))
    assert texts(pieces) == '{"role": "user", "content": "<b> & \'é\'"}\n{\n "a": "<é>",\n "b": 1\n}'


def test_the_day_is_always_the_same():
    assert texts(jinja("{{ strftime_now('%d %b %Y') }}").render(chat(say("user", "a")))) == "26 Jul 2024"


def test_loops_may_break_and_namespaces_change():
    template = (
        "{% set n = namespace(count=0) %}{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
        "{% set n.count = n.count + 1 %}{{ m.content }}</s>{% endfor %}{{ n.count }}"
    )
    assert texts(jinja(template).render(chat(say("user", "a"), say("user", "b"), say("user", "c")))) == "a</s>b</s>2"


def test_nothing_asks_for_an_answer():
    template = "{{ add_generation_prompt }} {{ tools }} {{ documents }} {{ eos_token }}"
    assert texts(jinja(template).render(chat(say("user", "a")))) == "False None None </s>"


def test_a_default_system_message_replaces_that_of_the_template():
    pieces = jinja(VISION, system="Be brief.").render(TWO_TURNS)
    assert texts(pieces).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


def test_media_come_back_where_the_template_puts_them():
    picture, film = Media("image", "a.png"), Media("video", "v.mp4")
    conversation = chat(say("user", picture, "Left of ", film, "?"), say("assistant", "a cat"))
    assert jinja(VISION).render(conversation) == [
        Piece("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n", False),
        picture,
        Piece("Left of ", False),
        film,
        Piece("?<|im_end|>\n<|im_start|>assistant\n", False),
        Piece("a cat<|im_end|>", True),
        Piece("\n", False),
    ]


def test_an_image_in_an_answer_is_no_target_and_parts_it():
    picture = Media("image", "a.png")
    conversation = chat(say("user", "draw"), say("assistant", "here ", picture, " it is"))
    pieces = jinja(VISION).render(conversation)
    assert targets(pieces) == "here | it is<|im_end|>" and pieces[2] == picture


def test_a_template_without_a_place_for_images_is_refused():
    conversation = chat(say("user", Media("image", "a.png"), "?"), say("assistant", "a cat"))
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}</s>{% endfor %}"
    with pytest.raises(ConfigError, match="writes places for no media where the sample has image"):
        jinja(template).render(conversation)


def test_the_system_message_of_a_chatml_template_is_found():
    assert jinja(VISION).chatml_system() == "You are a helpful assistant."
    assert jinja(THINKING).chatml_system() is None
    assert jinja(TRIMMING).chatml_system() is None
    assert jinja("{{ raise_exception('no') }}").chatml_system() is None


def test_tokens_that_the_template_writes_are_control_tokens():
    assert set(jinja(MARKED).control_tokens) == {"<|im_start|>", "<|im_end|>", "</s>"}


def test_settings_change_with_the_template_and_its_tokens():
    other = JinjaTemplate(VISION, {"eos_token": "<|im_end|>"}, SPECIAL)
    assert len({jinja(VISION).settings, jinja(MARKED).settings, jinja(VISION, "a").settings, other.settings}) == 4
