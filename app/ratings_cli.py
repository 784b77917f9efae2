"""`arena ratings simulate`: what the rating methods promise, shown on votes whose truth is known."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from html import escape
from pathlib import Path

import numpy as np

from app.errors import BadInput
from app.numbers import axis_numbers
from app.ratings.simulate import PAPER, Coverage, PairingCurve, coverage, pairing

MODELS = {"pairing": 20, "coverage": 5}
COLOURS = {"uniform": "#ab4611", "active": "#2558c4"}
WIDTH, HEIGHT, MARGIN = 640, 360, 56


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("ratings", help="simulate what the ratings promise")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    simulate = verbs.add_parser(
        "simulate",
        help="how many votes uniform and active sampling need; how often intervals hold",
        description="Draws votes of models whose strengths are known, and shows what the methods make of them.",
    )
    simulate.add_argument("what", nargs="?", choices=("pairing", "coverage"), default="pairing")
    simulate.add_argument("--models", type=int, metavar="N", help="models (default: 20, and 5 for coverage)")
    simulate.add_argument(
        "--spread", type=float, default=1.5, help="standard deviation of their strengths (default: %(default)s)"
    )
    simulate.add_argument(
        "--width",
        type=float,
        default=PAPER["width"],
        help="mean width of the win matrix to reach (default: %(default)s)",
    )
    simulate.add_argument("--runs", type=int, default=100, help="boards, for coverage (default: %(default)s)")
    simulate.add_argument("--votes", type=int, default=2000, help="a board, for coverage (default: %(default)s)")
    simulate.add_argument("--seed", type=int, default=0, help="of all draws (default: %(default)s)")
    simulate.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curves of pairing there")
    simulate.add_argument("--json", action="store_true", help="print one JSON document")
    simulate.set_defaults(run=simulate_command)


def simulate_command(args: argparse.Namespace) -> int:
    """Raises BadInput for numbers that nothing can be drawn from."""
    models = MODELS[args.what] if args.models is None else args.models
    if models < 2 or args.runs < 1 or args.votes < 200 or not 0 < args.width < 2 or args.spread < 0:
        raise BadInput("it takes 2 models, 1 run, 200 votes, a width between 0 and 2 and a spread that is not negative")
    if args.what == "coverage":
        if args.plot:
            raise BadInput("--plot draws the curves of pairing, and coverage has none")
        found = coverage(models=models, votes=args.votes, runs=args.runs, seed=args.seed)
        print(json.dumps(asdict(found), indent=2) if args.json else coverage_text(found))
        return 0
    strengths = np.random.default_rng(args.seed).normal(0, args.spread, models)
    curves = pairing(strengths=strengths, width=args.width, seed=args.seed)
    if args.plot:
        try:
            args.plot.write_text(plot(curves, args.width), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write {args.plot}: {error.strerror}") from error
    if args.json:
        told = {"models": models, "spread": args.spread, "width": args.width, "seed": args.seed, "paper": PAPER}
        print(json.dumps(told | {"rules": {curve.rule: asdict(curve) for curve in curves}}, indent=2))
    else:
        print(pairing_text(curves, args.width))
    if any(curve.needed is None for curve in curves):
        print("the width was not reached", file=sys.stderr)
    return 0


def pairing_text(curves: list[PairingCurve], width: float) -> str:
    lines = [
        f"{curve.rule:<8} {curve.needed or 0:>8,} votes to a mean width of {width:g}; ratings then "
        f"{curve.rating_width[-1]:.3f} wide"
        for curve in curves
    ]
    needed = {curve.rule: curve.needed for curve in curves}
    if all(needed.values()):
        lines.append(f"uniform takes {needed['uniform'] / needed['active'] - 1:.0%} more")
    return "\n".join([*lines, f"paper    {PAPER['uniform']:,} uniform, {PAPER['active']:,} active: 55% more"])


def coverage_text(found: Coverage) -> str:
    return "\n".join(
        (
            f"{found.runs} boards, each looked at {found.looks} times",
            f"plain 95% interval holds the truth at a look     {found.plain_each_look:.1%}",
            f"plain 95% interval holds it at every look        {found.plain_every_look:.1%}",
            f"always-valid 95% interval holds it at every look {found.always_valid:.1%}",
        )
    )


def plot(curves: list[PairingCurve], width: float) -> str:
    """Mean width of the win matrix against votes, as SVG."""
    most = max(curve.votes[-1] for curve in curves)
    top = max(curve.matrix_width[0] for curve in curves)

    def x(votes: float) -> float:
        return round(MARGIN + (WIDTH - 2 * MARGIN) * votes / most, 1)

    def y(value: float) -> float:
        return round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value / top, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12" '
        'font-family="system-ui">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(width)}" y2="{y(width)}" stroke="#999" '
        'stroke-dasharray="4"/>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 2}" text-anchor="end">votes</text>',
        f'<text x="{MARGIN}" y="24">mean width of the win matrix; dashed: {width:g}</text>',
    ]
    parts += [f'<text x="{x(n)}" y="{HEIGHT - 20}" text-anchor="middle">{n:,.0f}</text>' for n in axis_numbers(0, most)]
    parts += [f'<text x="{MARGIN - 6}" y="{y(w)}" text-anchor="end">{w:g}</text>' for w in axis_numbers(0, top, 5)]
    for place, curve in enumerate(curves):
        points = " ".join(f"{x(n)},{y(w)}" for n, w in zip(curve.votes, curve.matrix_width, strict=True))
        colour = COLOURS[curve.rule]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{WIDTH - MARGIN}" y="{48 + 18 * place}" text-anchor="end" fill="{colour}">{escape(curve.rule)}: '
            f"{curve.needed or 0:,}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])
