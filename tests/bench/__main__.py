"""`make bench-peers`: installs the peers, runs the loads in rounds, prints the tables. `--help` lists the flags.

Installing takes tens of minutes once and about 10 GB; a round takes some twenty minutes on two cores, and wants the
machine for itself. Exit status: 0 all measured, 1 something failed (its log is named), 2 a flag is wrong.
"""

from __future__ import annotations

import argparse
import functools
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engine.bench import LOADS, MEASURED, checkpoint, load_of
from engine.config import EngineConfig
from tests.bench.peers import PEERS
from tests.bench.place import InstallError, Place
from tests.bench.report import document, failures, markdown
from tests.bench.rounds import APART, IN_PRECISION, OURS, Contestant, Record, contestant, install, ours, read, run
from tests.bench.server import ServerError

BEGIN, END = "<!-- peers: written by `make bench-peers ARGS=--write` -->", "<!-- peers: end -->"
NAMES = (OURS, *IN_PRECISION, APART, *(peer.name for peer in PEERS))


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    config = EngineConfig.load({})
    folder = options.folder or config.cache_folder / "peers"
    weights = checkpoint(config)
    places = {peer.folder: Place(folder / peer.folder, weights, options.jobs) for peer in PEERS}
    engines, loads = chosen(options.only)
    if options.install:
        return install_all(engines, places)
    results = options.results or folder / "results.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    if not options.report:
        tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
        build = functools.partial(load_of, tokenizer=tokenizer)
        contestants = [contestant_of(name, places, weights) for name in engines]
        for record in run(contestants, loads, options.rounds, results, lambda name, seed: build(name, seed=seed)):
            print(line(record), file=sys.stderr, flush=True)
    records = [each for each in read(results) if each["engine"] in engines and each["load"] in loads]
    return show(records, options)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="make bench-peers", description=__doc__.split("\n\n")[0])
    top.add_argument("--rounds", type=positive, default=3, help="rounds of every load on every engine (default: 3)")
    top.add_argument(
        "--only",
        type=names,
        action="append",
        default=[],
        metavar="NAME,...",
        help=f"engines and loads to take, of {', '.join((*NAMES, *LOADS))}; default: all",
    )
    top.add_argument("--folder", type=Path, help="where peers are installed (default: peers in the cache folder)")
    top.add_argument("--results", type=Path, help="file of records to go on with (default: results.jsonl there)")
    top.add_argument("--jobs", type=positive, default=1, help="compilers at once when llama.cpp is built (default: 1)")
    top.add_argument("--install", action="store_true", help="only install")
    top.add_argument("--report", action="store_true", help="only print what is already measured")
    top.add_argument("--json", action="store_true", help="print the records as one JSON document instead of tables")
    top.add_argument("--write", action="store_true", help="put the tables and records into docs/performance.md, .json")
    return top


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def names(text: str) -> set[str]:
    asked = set(text.split(","))
    if unknown := asked - {*NAMES, *LOADS}:
        raise argparse.ArgumentTypeError(f"no engine or load is called {', '.join(sorted(unknown))}")
    return asked


def chosen(only: Sequence[set[str]]) -> tuple[list[str], list[str]]:
    """Engines and loads by their names; all of a kind that no name was given of."""
    asked = set().union(*only)
    every = (NAMES, LOADS)
    engines, loads = ([each for each in kind if each in asked or asked.isdisjoint(kind)] for kind in every)
    return engines, loads


def contestant_of(name: str, places: dict[str, Place], weights: Path) -> Contestant:
    if name == OURS:
        return ours()
    if name == APART:
        return ours(apart=weights)
    if name in IN_PRECISION:
        return ours(precision=IN_PRECISION[name])
    peer = next(each for each in PEERS if each.name == name)
    return contestant(peer, places[peer.folder])


def install_all(engines: Sequence[str], places: dict[str, Place]) -> int:
    """Installs the peers among `engines`. One that fails is named with its log, and the others go on."""
    status = 0
    for peer in PEERS:
        if peer.name not in engines:
            continue
        place = places[peer.folder]
        try:
            install(peer, place, place.folder.with_name(f"{peer.name}.log"))
            print(f"{peer.name}: ready in {place.folder}", file=sys.stderr)
        except (InstallError, ServerError) as error:
            status = 1
            print(f"{peer.name}: {error}\n  the log: {error.log}", file=sys.stderr)
    return status


def line(record: Record) -> str:
    name = f"{record['load']} round {record['round']} {record['engine']:16}"
    if "failure" in record:
        return f"{name} FAILED: {record['failure']}\n  the log: {record['log']}"
    first, between = record["ttft_ms"], record["itl_ms"]
    battles = f" {record['battles_per_minute']:6.1f} battles/min" if "battles_per_minute" in record else ""
    errors = f"; {record['errors']} ERRORS, the first: {record['first_error']}" if record["errors"] else ""
    return (
        f"{name} {record['tokens_per_second']:7.1f} tokens/s{battles}, first token {first['median']} / {first['p95']} "
        f"ms, between {between['median']} / {between['p95']} ms, {record['peak_pss_mib']} MiB, ready in "
        f"{record['launch_seconds']} s{errors}"
    )


def show(records: Sequence[Record], options: argparse.Namespace) -> int:
    if not records:
        print("nothing is measured yet", file=sys.stderr)
        return 1
    command = "make bench-peers"
    print(json.dumps(document(records, command), indent=1) if options.json else markdown(records, command))
    if options.write:
        write(records, command)
    return 1 if failures(records) else 0


def write(records: Sequence[Record], command: str, measured: Path = MEASURED) -> None:
    """The tables into the document, between its marks, and the records they were made of into the file beside it."""
    page = measured.with_suffix(".md")
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{markdown(records, command)}\n{END}{after}", encoding="utf-8")
    known = json.loads(measured.read_text()) | {"peers": document(records, command)}
    measured.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server outlives us
    sys.exit(main())
