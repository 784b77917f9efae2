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
from app.errors import BadInput, NotFound
from app.numbers import many
from app.security import log_signer
from app.votes import audit
from app.votes.files import SHOWN, Exported, export_lines, guess_format, import_file
from app.votes.formats import FORMATS, format_named, ours
from app.votes.formats.rows import VotesSource
from app.votes.honesty import anomalous, frequent
from app.votes.honesty.simulate import simulate
from db import queries, vote_log
from db.connect import Database
from db.errors import DatabaseUnavailable

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
    auditing = add_verb(verbs, "audit", "look for visitors whose votes are not honest", audit_votes)
    auditing.add_argument(
        "--alpha", type=float, default=anomalous.ALPHA, help="of the sequential test (default: %(default)s)"
    )
    auditing.add_argument("--quarantine", action="store_true", help="count no vote of those who are found")
    thinning = add_verb(verbs, "deduplicate", "count only a sample of votes on the most frequent prompts", thin_votes)
    thinning.add_argument(
        "--percentile", type=float, default=frequent.PERCENTILE, help="default: %(default)s; 100 undoes it"
    )
    thinning.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    simulating = add_verb(verbs, "simulate", "how well planted riggers are told from honest visitors", simulate_votes)
    simulating.add_argument("--alpha", type=float, default=anomalous.ALPHA, help="default: %(default)s")
    simulating.add_argument("--runs", type=int, default=10, help="default: %(default)s")
    simulating.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    verifying.add_argument("--head", metavar="HASH", help="chain hash, published earlier, that a vote must still have")


def add_visitors_parser(subparsers) -> None:
    parser = subparsers.add_parser("visitors", help="put visitors into quarantine, or forget them")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for verb, help_text, run in (
        ("quarantine", "count no vote of a visitor, neither past nor future", quarantine_visitors),
        ("release", "take a quarantine back: the votes count again", release_visitors),
        ("forget", "remove texts, cookie and address of a visitor; the votes stay, anonymous", forget_visitors),
    ):
        sub = add_verb(verbs, verb, help_text, run)
        sub.add_argument("visitors", nargs="+", metavar="VISITOR", help="id as in exports and audits, or the cookie's")
        if verb == "quarantine":
            sub.add_argument("--why", default="the admin decided so", help="reason for the log")


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
def opened(config: AppConfig, *, may_be_new: bool = False) -> Iterator[Database]:
    """The arena's database. Raises BadInput where there is none, unless it `may_be_new`."""
    if may_be_new:
        config.data_folder.mkdir(parents=True, exist_ok=True)
    else:
        config.require_database()
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
        say(args, {"votes": done.votes, "lost": done.lost}, f"{many(done.votes, 'vote')} written to {args.output}")
    return 0


def import_votes(args: argparse.Namespace) -> int:
    columns = next(csv.reader([args.columns])) if args.columns else None
    if columns and (len(columns) != 3 or args.format not in (None, "csv")):
        raise BadInput("--columns takes three names, LEFT,RIGHT,WINNER, of a CSV file")
    found = format_named(args.format) if args.format and not columns else guess_format(args.file, columns)
    config = config_of(args)
    with opened(config, may_be_new=True) as database:
        done = import_file(
            database, args.file, found, log_signer(config), skip_bad=args.skip_bad, same_models=args.same_models
        )
    for row in done.bad:
        print(f"line {row.line}: left out: {row.reason}", file=sys.stderr)
    sentences = [f"{many(done.votes, 'vote')} of {found.title} added to the log"]
    if done.already_here:
        sentences.append(f"here already: {many(done.already_here, 'vote')}")
    if done.no_votes:
        sentences.append(f"{many(done.no_votes, 'row')} without a vote")
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
        f"{many(report.votes, 'vote')} ({report.counted:,} counted), {many(report.decisions, 'decision')}; "
        f"head {head.chain_hash}",
    ]
    if report.forgotten:
        sentences.append(f"{many(report.forgotten, 'vote')} without texts, of visitors who were forgotten")
    if head.signed_from:
        sentences.append(f"the signature vouches for what came after vote {head.signed_from:,}")
    if not has_key:
        sentences.append("the signature was not looked at: the key is in the arena's data folder")
    sentences.append("the log is whole" if not faults else many(len(faults), "fault"))
    say(args, document, *sentences)
    return 1 if faults else 0


def audit_votes(args: argparse.Namespace) -> int:
    """Exit status 1 where somebody is found who is not in quarantine yet."""
    config = config_of(args)
    with opened(config) as database:
        sign = log_signer(config)
        with database.session(read_only=True) as session:  # it takes a while, and nobody who votes must wait for it
            found = audit.audit(session, alpha=args.alpha, seed=sign("audit"))
        new = [suspect for suspect in found.suspects if not suspect.quarantined]
        stopped = 0
        if args.quarantine:
            with database.session() as session:
                for suspect in new:
                    stopped += audit.quarantine(session, [suspect.visitor], "; ".join(suspect.why), "audit", sign)
    sentences = [
        f"{each.visitor}  {many(each.votes, 'vote')}{', in quarantine' * each.quarantined}  {'; '.join(each.why)}"
        for each in found.suspects
    ]
    sentences.append(
        f"{many(found.visitors, 'visitor')} with {many(found.votes, 'vote')}, {many(len(found.suspects), 'suspect')}"
    )
    if found.alarm:
        sentences.append(
            f"ALARM: {found.alarm.newest:.0%} of the newest votes count, {found.alarm.before:.0%} of those before "
            f"(p = {found.alarm.p:.1g})"
        )
    if args.quarantine:
        sentences.append(f"{len(new):,} put into quarantine: {many(stopped, 'vote')} no longer counted")
    say(args, asdict(found) | {"quarantined": len(new) if args.quarantine else 0, "stopped": stopped}, *sentences)
    return 1 if new and not args.quarantine else 0


def thin_votes(args: argparse.Namespace) -> int:
    config = config_of(args)
    if not 0 < args.percentile <= 100:
        raise BadInput("--percentile is above 0 and at most 100")
    with opened(config) as database:
        stopped, back = audit.deduplicate(database, log_signer(config), percentile=args.percentile, seed=args.seed)
    say(
        args,
        {"stopped": stopped, "counted_again": back},
        f"{many(stopped, 'vote')} no longer counted, {back:,} counted again",
    )
    return 0


def simulate_votes(args: argparse.Namespace) -> int:
    rates = simulate(runs=args.runs, alpha=args.alpha, seed=args.seed)
    document = {
        "runs": rates.runs,
        "alpha": args.alpha,
        "true_positive_rate": rates.true_positive_rate,
        "false_positive_rate": rates.false_positive_rate,
        "found": {kind: [rates.found[kind], rates.riggers[kind]] for kind in rates.riggers},
        "left_alone": [rates.left_alone, rates.honest],
    }
    sentences = [f"{kind}: {rates.found[kind]} of {number} found" for kind, number in rates.riggers.items()]
    sentences.append(f"honest visitors: {rates.left_alone} of {rates.honest} left alone")
    sentences.append(f"true positives {rates.true_positive_rate:.0%}, false positives {rates.false_positive_rate:.0%}")
    say(args, document, *sentences)
    return 0


def quarantine_visitors(args: argparse.Namespace) -> int:
    config = config_of(args)
    with opened(config) as database, database.session() as session:
        stopped = audit.quarantine(session, args.visitors, args.why, "admin", log_signer(config))
    say(args, {"votes": stopped}, f"{many(stopped, 'vote')} no longer counted")
    return 0


def release_visitors(args: argparse.Namespace) -> int:
    config = config_of(args)
    with opened(config) as database, database.session() as session:
        back = audit.release(session, args.visitors, "admin", log_signer(config))
    say(args, {"votes": back}, f"{many(back, 'vote')} counted again")
    return 0


def forget_visitors(args: argparse.Namespace) -> int:
    with opened(config_of(args)) as database:
        try:
            kept = sum(audit.forget(database, visitor) for visitor in args.visitors)
        except NotFound as error:  # as for who asks a second time, which is what is said below
            _empty_journal(database, f"{error}; and ")
            raise
        _empty_journal(database)
    say(args, {"votes": kept}, f"forgotten; {many(kept, 'vote')} kept, anonymous")
    return 0


def _empty_journal(database: Database, also: str = "") -> None:
    try:
        database.empty_journal()
    except DatabaseUnavailable as error:
        raise DatabaseUnavailable(
            f"{also}SQLite's journal still holds texts of who was forgotten: {error}. End that program and run this "
            "again; once it says no more than that there is no such visitor, the journal is empty"
        ) from error
