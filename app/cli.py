"""The command `arena`: reads the command line and calls what does the work. `--json` prints one document, no more."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from app import ratings_cli
from app.blindcheck import cli as blindcheck_cli
from app.config import AppConfig, engine_environment
from app.engine_client import EngineModel
from app.errors import ArenaError, BadInput, ConfigError
from app.leaderboard import cli as leaderboard_cli
from app.model_rules import (
    ABOUT,
    ADAPTER_SOURCES,
    PRECISIONS,
    SAMPLING,
    SOURCES,
    check_context_length,
    check_path,
)
from app.registry import (
    ModelView,
    insert_model,
    longest_context,
    resting_status,
    retire_model,
    seed_default_models,
    update_model,
    view_of,
)
from app.service_file import running_arena
from app.votes import cli as votes_cli
from db import queries
from db.connect import Database
from db.errors import DatabaseError

FOLLOWED_SECONDS = 3.0  # for which a change is watched in the running arena
NOT_RUNNING = "no arena runs on this data folder"
WIDEST_STATE, CUT = 60, "…"  # characters of it in a listing


def main(arguments: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    try:
        return args.run(args)
    except (ArenaError, DatabaseError) as error:
        print(f"arena: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="arena", description="A blind chatbot arena on one engine of its own.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML: tables [web] and [engine]")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_serve(commands)
    add_models(commands)
    leaderboard_cli.add_parser(commands)
    ratings_cli.add_parser(commands)
    votes_cli.add_parser(commands)
    votes_cli.add_visitors_parser(commands)
    blindcheck_cli.add_parser(commands)
    add_engine(commands)
    return parser


def load_config(args: argparse.Namespace, *names: str) -> AppConfig:
    flags = {name: value for name in names if (value := getattr(args, name)) is not None}
    return AppConfig.load(flags, file=args.config)


# arena serve


def add_serve(commands) -> None:
    parser = commands.add_parser("serve", help="start the website, and an engine unless one is given")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes a free one (default: 7860)")
    parser.add_argument("--database-url", help="sqlite:/// or postgresql:// (default: a file in the data folder)")
    parser.add_argument(
        "--engine-url",
        help="a running engine; what others put on it is left alone (default: one of our own is started)",
    )
    parser.add_argument("--data-folder", type=Path, help="where database, secrets and logs are kept (default: data)")
    parser.set_defaults(run=serve)


def serve(args: argparse.Namespace) -> int:
    config = load_config(args, "host", "port", "database_url", "engine_url", "data_folder")
    from app.serving import run  # imports Gradio, which the other commands need not wait for

    return run(config, args.config)


# arena models


def add_models(commands) -> None:
    parser = commands.add_parser("models", help="list the models of the arena, add one, take one away")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(verb: str, help_text: str, run, *, takes_name: bool = True) -> argparse.ArgumentParser:
        sub = verbs.add_parser(verb, help=help_text, description=help_text)
        if takes_name:
            sub.add_argument("name", help="the model's name")
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        sub.add_argument("--database-url", help="database of the arena (default: its file in the data folder)")
        sub.add_argument("--data-folder", type=Path, help="the arena's data folder (default: data)")
        sub.set_defaults(run=run)
        return sub

    listing = add("list", "list the models and how they stand", list_models, takes_name=False)
    listing.add_argument("--retired", action="store_true", help="with those that were retired")
    adding = add("add", "add a model; a running arena loads it within seconds", add_model)
    adding.add_argument("source", help=f"where its checkpoint is: {SOURCES}")
    adding.add_argument("--system-prompt", default="", help="text, or @FILE")
    adding.add_argument("--sampling", default="{}", metavar="JSON", help=f"defaults, of {', '.join(SAMPLING)}")
    adding.add_argument("--chat-template", help="a named chat format, for a checkpoint without a template")
    adding.add_argument("--context-length", type=int, help="fewer tokens than the checkpoint allows")
    adding.add_argument("--endpoint-key-env", metavar="NAME", help="environment variable with a remote endpoint's key")
    adding.add_argument(
        "--sampling-weight", type=float, default=1.0, help="how often it is drawn (default: %(default)s)"
    )
    adding.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="of the weights: int8 takes half the memory, compact three quarters, to the bit (default: the engine's)",
    )
    adapters = ", ".join(ADAPTER_SOURCES.values())
    adding.add_argument("--adapter", metavar="SOURCE", help=f"a LoRA adapter over the checkpoint: {adapters}")
    adding.add_argument(
        "--kv-share", type=float, default=0.0, metavar="0..1", help="of the pool, that it may count on (default: 0)"
    )
    adding.add_argument("--organisation", help="who made it")
    adding.add_argument("--licence", help="under which it may be used")
    adding.add_argument("--parameters", help="how many it has, as people write it: 135M")
    add("remove", "retire a model for good; its votes and its name stay", remove_model)
    add("enable", "let a model take part in battles", enable_model)
    add("disable", "keep a model out of battles until it is enabled again", disable_model)


@contextlib.contextmanager
def open_database(args: argparse.Namespace, config: AppConfig):
    """The arena's database, made with the shipped models if there is none. A running arena follows its changes."""
    if args.data_folder and not config.data_folder.is_dir():
        raise BadInput(f"there is no folder {config.data_folder}")
    config.data_folder.mkdir(parents=True, exist_ok=True)
    database = Database(config.database)
    try:
        database.upgrade_to_head()
        seed_default_models(database)
        yield database
    finally:
        database.close()


def change_and_show(args: argparse.Namespace, function: Callable[..., Any], *positional: Any, **named: Any) -> int:
    config = load_config(args, "database_url", "data_folder")
    with open_database(args, config) as database:
        with database.session() as session:
            name = function(session, *positional, **named).name
        ends = time.monotonic() + FOLLOWED_SECONDS
        while True:
            view = next(view for view in observed(config, database) if view.name == name)
            if view.status != "waiting" or view.reason == NOT_RUNNING or time.monotonic() > ends:
                return show(args, view)
            time.sleep(0.1)


def observed(config: AppConfig, database: Database) -> list[ModelView]:
    """The models, as a running arena tells of them; as the table has them where none runs."""
    told, untold = told_by_arena(config)
    if told:
        return told
    with database.session(read_only=True) as session:
        rows = queries.models(session, retired=True)
    return [view_of(row, resting_status(row) or EngineModel(row.name, "waiting", untold)) for row in rows]


def told_by_arena(config: AppConfig) -> tuple[list[ModelView], str]:
    """The models as the arena that runs on this data folder has them; none where none runs or answers, and why."""
    arena = running_arena(config)
    if arena is None:
        return [], NOT_RUNNING
    try:
        answer = httpx.get(f"{arena.url}/api/admin/models", headers={"Authorization": f"Bearer {arena.key}"})
        return [ModelView(**each) for each in answer.raise_for_status().json()["models"]], ""
    except httpx.HTTPStatusError as error:
        return [], f"the arena that runs here does not tell: HTTP {answer.status_code} {answer.text or error}"
    except httpx.HTTPError as error:
        return [], f"the arena that runs here does not answer: {error}"


def show(args: argparse.Namespace, models: ModelView | list[ModelView]) -> int:
    many = isinstance(models, list)
    if args.json:
        document = {"models": [asdict(model) for model in models]} if many else asdict(models)
        print(json.dumps(document, ensure_ascii=False, indent=2))
        return 0
    rows = [(model.name, state_words(model), checkpoint_words(model)) for model in (models if many else [models])]
    if many:
        rows = [(name, in_short(state), source) for name, state, source in rows]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for name, state, source in rows:
        print(f"{name:<{widths[0]}}  {state:<{widths[1]}}  {source}")
    if not rows:
        print("No models yet: arena models add NAME SOURCE")
    if any(state.endswith(CUT) for _, state, _ in rows):
        print("--json has the reasons whole.", file=sys.stderr)
    return 0


def in_short(state: str) -> str:
    return state if len(state) <= WIDEST_STATE else state[: WIDEST_STATE - len(CUT)] + CUT


def checkpoint_words(model: ModelView) -> str:
    return f"{model.source} + {model.adapter}" if model.adapter else model.source


def state_words(model: ModelView) -> str:
    if model.status == "loading" and model.total:
        return f"loading {model.done:,} of {model.total:,} {model.unit}"
    return f"{model.status}: {model.reason}" if model.reason else model.status


def list_models(args: argparse.Namespace) -> int:
    config = load_config(args, "database_url", "data_folder")
    config.require_database()
    database = Database(config.database)
    try:
        database.upgrade_to_head()
        return show(args, [view for view in observed(config, database) if args.retired or not view.retired])
    finally:
        database.close()


def add_model(args: argparse.Namespace) -> int:
    config = load_config(args, "database_url", "data_folder")
    if not config.engine_url:
        check_path(args.source)
        check_path(args.adapter, "adapter")
    if args.context_length:
        check_context_length(args.source, args.context_length, longest_context(args.source, told_by_arena(config)[0]))
    return change_and_show(
        args,
        insert_model,
        args.name,
        source=args.source,
        system_prompt=text_or_file(args.system_prompt),
        sampling=json_table(args.sampling),
        chat_template=args.chat_template,
        context_length=args.context_length,
        endpoint_key_env=args.endpoint_key_env,
        sampling_weight=args.sampling_weight,
        precision=args.precision,
        adapter=args.adapter,
        kv_share=args.kv_share,
        **{field: getattr(args, field) for field in ABOUT},
    )


def text_or_file(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--system-prompt: {error}") from error


def json_table(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"--sampling is not JSON: {error}") from error


def remove_model(args: argparse.Namespace) -> int:
    return change_and_show(args, retire_model, args.name)


def enable_model(args: argparse.Namespace) -> int:
    return change_and_show(args, update_model, args.name, enabled=True)


def disable_model(args: argparse.Namespace) -> int:
    return change_and_show(args, update_model, args.name, enabled=False)


# arena engine


def add_engine(commands) -> None:
    parser = commands.add_parser(
        "engine", help="the engine by itself: serve, bench, simulate, pull", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=engine)


def engine(args: argparse.Namespace) -> int:
    """`python -m engine` with the same arguments: the engine is a process and a package of its own."""
    try:
        return subprocess.run(
            [sys.executable, "-m", "engine", *args.arguments], env=engine_environment(None, args.config)
        ).returncode
    except KeyboardInterrupt:
        return 130
