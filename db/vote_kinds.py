"""The kinds of vote. A new one is a line here; what the public formats call them, `app.votes.formats` says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VoteKind:
    """`score_a` is what side A gets for it and side B gets the rest: 1 a win, 0 a loss, one half for neither."""

    name: str
    label: str
    score_a: float


VOTE_KINDS = {
    kind.name: kind
    for kind in (
        VoteKind("a", "A is better", 1.0),
        VoteKind("b", "B is better", 0.0),
        VoteKind("tie", "Tie", 0.5),
        VoteKind("both_bad", "Both are bad", 0.5),
    )
}
