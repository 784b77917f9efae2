"""`arena votes`: the vote log out to files, in from them, verified, and what counts of it."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from app.config import AppConfig
from app.errors import BadInput
from app.formats import FORMATS, format_named, ours
from app.formats.rows import VotesSource
from app.security import log_signer
from app.vote_files import SHOWN, Exported, export_lines, guess_format, import_file
from db import queries, vote_log
from db.connect import Database

PROGRAM = f"paged-arena {version('paged-arena')}"


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("votes", help="the vote log: export, import, verify")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    exporting = add_verb(verbs, "export", "write the votes to a file", export_votes)
    exporting.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: standard output)")
    exporting.add_argument("--format", choices=list(FORMATS), default="arena", help="default: %(default)s")
    importing = add_verb(verbs, "import", "add the votes of a file to the log", import_votes)
    importing.add_argument("file", type=Path, metavar="FILE")
    importing.add_argument("--format", choices=list(FORMATS), help="default: told by the file's columns")
    importing.add_argument("--columns", metavar="LEFT,RIGHT,WINNER", help="of a CSV file with other names")
    importing.add_argument("--skip-bad", action="store_true", help="leave out rows that cannot be read, listing them")
    importing.add_argument(
        "--same-models", action="store_true", help="models of the arena that the file names are those of the file"
    )
    verifying = add_verb(verbs, "verify", "check that no vote was edited, removed or re-ordered", verify_votes)
    verifying.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="a file that was exported (default: the arena's database)"
    )
    verifying.add_argument("--head", metavar="HASH", help="chain hash, published earlier, that a vote must still have")


def add_verb(verbs, verb: str, help_text: str, run) -> argparse.ArgumentParser:
    sub = verbs.add_parser(verb, help=help_text, description=help_text)
    sub.add_argument("--json", action="store_true", help="print one JSON document")
    sub.add_argument("--database-url", help="database of the arena (default: its file in the data folder)")
    sub.add_argument("--data-folder", type=Path, help="the arena's data folder (default: data)")
    sub.set_defaults(run=run)
    return sub


def config_of(args: argparse.Namespace) -> AppConfig:
    flags = {name: value for name in ("database_url", "data_folder") if (value := getattr(args, name)) is not None}
    return AppConfig.load(flags, file=args.config)


@contextlib.contextmanager
def opened(config: AppConfig) -> Iterator[Database]:
    config.data_folder.mkdir(parents=True, exist_ok=True)
    database = Database(config.database)
    try:
        database.upgrade_to_head()
        yield database
    finally:
        database.close()


def say(args: argparse.Namespace, document: dict[str, Any], *sentences: str) -> None:
    if args.json:
        print(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        for sentence in sentences:
            print(sentence)


def export_votes(args: argparse.Namespace) -> int:
    if args.json and args.output is None:
        raise BadInput("--json prints what was done, so that the votes need a file: give --output")
    done = Exported()
    with opened(config_of(args)) as database, database.session(read_only=True) as session:
        lines = export_lines(session, format_named(args.format), PROGRAM, done)
        try:
            with args.output.open("w", encoding="utf-8") if args.output else contextlib.nullcontext(sys.stdout) as file:
                file.writelines(lines)
        except OSError as error:
            raise BadInput(f"cannot write {args.output}: {error.strerror}") from error
    for sentence in [*done.lost[:SHOWN], *([f"and {len(done.lost) - SHOWN:,} more"] if len(done.lost) > SHOWN else [])]:
        print(sentence, file=sys.stderr)
    if args.output:
        say(args, {"votes": done.votes, "lost": done.lost}, f"{done.votes:,} votes written to {args.output}")
    return 0


def import_votes(args: argparse.Namespace) -> int:
    columns = next(csv.reader([args.columns])) if args.columns else None
    if columns and (len(columns) != 3 or args.format not in (None, "csv")):
        raise BadInput("--columns takes three names, LEFT,RIGHT,WINNER, of a CSV file")
    found = format_named(args.format) if args.format and not columns else guess_format(args.file, columns)
    config = config_of(args)
    with opened(config) as database:
        done = import_file(
            database, args.file, found, log_signer(config), skip_bad=args.skip_bad, same_models=args.same_models
        )
    for row in done.bad:
        print(f"line {row.line}: left out: {row.reason}", file=sys.stderr)
    sentences = [f"{done.votes:,} votes of {found.title} added to the log"]
    if done.already_here:
        sentences.append(f"{done.already_here:,} votes were here already")
    if done.no_votes:
        sentences.append(f"{done.no_votes:,} rows are no votes")
    if done.new_models:
        sentences.append(f"new, as retired models: {', '.join(done.new_models)}")
    say(args, asdict(done) | {"format": found.name}, *sentences)
    return 0


def verify_votes(args: argparse.Namespace) -> int:
    """Exit status 1 where something is wrong."""
    config = config_of(args)
    if args.file:
        try:
            has_key = config.vote_log_key or (config.data_folder / "secret.key").exists()
            report = ours.verify(VotesSource(args.file), log_signer(config) if has_key else None)
        except ValueError as error:
            raise BadInput(f"{args.file}: {error}") from error
    else:
        has_key = True
        with opened(config) as database, database.session(read_only=True) as session:
            report = queries.verify_log(session, log_signer(config))
    faults = list(report.faults)
    if args.head and args.head not in report.hashes:
        faults.append(f"no vote has the hash {args.head}: the log is not the one that was published")
    head = report.heads[vote_log.VOTES]
    document = {
        "whole": not faults,
        "faults": faults,
        "votes": report.votes,
        "counted": report.counted,
        "forgotten": report.forgotten,
        "decisions": report.decisions,
        "head": head.chain_hash,
        "signature": "not looked at"
        if not has_key
        else "valid"
        if not head.entries or head.is_signed(log_signer(config))
        else "not valid",
        "signed_from": head.signed_from,
    }
    sentences = [
        *(f"FAULT  {fault}" for fault in faults),
        f"{report.votes:,} votes ({report.counted:,} counted), {report.decisions:,} decisions; head {head.chain_hash}",
    ]
    if report.forgotten:
        sentences.append(f"{report.forgotten:,} votes without texts, whose visitors were forgotten")
    if head.signed_from:
        sentences.append(f"the signature vouches for what came after vote {head.signed_from:,}")
    if not has_key:
        sentences.append("the signature was not looked at: the key is in the arena's data folder")
    sentences.append("the log is whole" if not faults else f"{len(faults):,} faults")
    say(args, document, *sentences)
    return 1 if faults else 0
