"""A few rows of every format, as its documentation describes them."""

from __future__ import annotations

import json

ASKED = [{"content": "Why is the sky blue?", "role": "user"}]
SAID_A = [*ASKED, {"content": "Scattering.\nOf light.", "role": "assistant"}]
SAID_B = [*ASKED, {"content": 'It "just" is…', "role": "assistant"}]
LMSYS = {"model_a": "koala-13b", "model_b": "vicuna-13b", "conversation_a": SAID_A, "conversation_b": SAID_B}


def lmsys_33k() -> list[dict]:
    moderation = {"categories": {"hate": False}, "category_scores": {"hate": 1.5e-05}, "flagged": False}
    rows = [
        {"question_id": f"{n:032x}", **LMSYS, "winner": winner, "judge": f"arena_user_{n}", "turn": 1, "anony": n != 2}
        | {
            "language": "English",
            "tstamp": 1682351591.1322 + n,
            "openai_moderation": moderation,
            "toxic_chat_tag": None,
        }
        for n, winner in enumerate(("model_a", "model_b", "tie", "tie (bothbad)"))
    ]
    rows[3]["conversation_b"] = SAID_B + SAID_B  # two turns against one: kept as they are
    return rows


def lmarena_100k() -> list[dict]:
    extra = {"conv_metadata": {"turns": 1}, "category_tag": {"math_v0.1": {"math": False}}, "is_code": False}
    rows = lmsys_33k()
    return [{("judge_hash" if k == "judge" else k): v for k, v in row.items()} | extra for row in rows]


def lmarena_140k() -> list[dict]:
    def parts(said):
        return [
            {"role": m["role"], "content": [{"type": "text", "text": m["content"], "image": None, "mimeType": None}]}
            for m in said
        ]

    return [
        {"id": f"c4b9710c-{n}", "model_a": "x", "model_b": "y", "winner": winner, "evaluation_session_id": "s-1"}
        | {"evaluation_order": n, "conversation_a": parts(SAID_A), "conversation_b": parts(SAID_B)}
        | {"language": "en", "is_code": False, "timestamp": f"2025-05-29T14:48:4{n}.602925"}
        for n, winner in enumerate(("model_a", "model_b", "tie", "both_bad"))
    ]


def lmsys_55k() -> list[dict]:
    texts = {"prompt": '["Why?", "And then?"]', "response_a": '["So.", "Thus."]', "response_b": '["No.", null]'}
    flags = ("winner_model_a", "winner_model_b", "winner_tie")
    rows = [
        {
            "id": 30192 + n,
            "model_a": "x",
            "model_b": "y",
            **texts,
            **{flag: int(n == i) for i, flag in enumerate(flags)},
        }
        for n in range(3)
    ]
    rows[1]["response_b"] = '["No.", "Never."]'
    return rows


def fastchat_log() -> list[dict]:
    def state(name, text):
        said = [["USER", "Why?"], ["ASSISTANT", text]]
        return {"template_name": "one_shot", "roles": ["USER", "ASSISTANT"], "messages": said, "offset": 0} | {
            "conv_id": f"{name}-id",
            "model_name": name,
        }

    return [
        {
            "tstamp": 1683000000.25 + n,
            "type": kind,
            "models": ["", ""],
            "states": [state("x", "So."), state("y", "No.")],
            "ip": "1.2.3.4",
        }
        for n, kind in enumerate(("leftvote", "rightvote", "tievote", "bothbad_vote"))
    ]


def comparia_votes() -> list[dict]:
    base = {"model_a_name": "x", "model_b_name": "y", "opening_msg": "Why is the sky blue?", "visitor_id": "v"}
    base |= {"conversation_a": SAID_A, "conversation_b": SAID_B, "conv_useful_a": True, "conv_useful_b": None}
    votes = (("x", False), ("y", False), (None, True))
    return [
        {"id": n, "timestamp": f"2025-01-0{n + 1}T10:00:00", "chosen_model_name": chosen, "both_equal": equal, **base}
        | {"conversation_pair_id": f"p-{n}"}
        for n, (chosen, equal) in enumerate(votes)
    ]


def comparia_reactions() -> list[dict]:
    def row(pair, side, liked):
        return {"id": f"{pair}{side}", "timestamp": "2025-01-01T10:00:00", "model_a_name": "x", "model_b_name": "y"} | {
            "refers_to_model": side,
            "question_content": "Why?",
            "response_content": f"said {side}",
            "liked": liked,
            "disliked": not liked,
            "conversation_pair_id": pair,
            "msg_rank": 1,
            "useful": liked,
            "visitor_id": "v",
        }

    reactions = (("1", "x", True), ("2", "x", False), ("3", "x", True), ("3", "y", True), ("4", "x", False))
    return [row(*each) for each in (*reactions, ("4", "y", False))]


def written(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


CSV = 'id,left,right,winner,why\n1,ant,bee,left,\n2,ant,bee,bee,"so, there"\n3,bee,ant,tie,\n4,bee,ant,neither,x\n'
SAMPLES = {
    "lmsys_33k": written(lmsys_33k()),
    "lmarena_100k": written(lmarena_100k()),
    "lmarena_140k": written(lmarena_140k()),
    "lmsys_55k": written(lmsys_55k()),
    "fastchat_log": written(fastchat_log()),
    "comparia_votes": written(comparia_votes()),
    "comparia_reactions": written(comparia_reactions()),
    "csv": CSV,
}
KINDS = {name: ["a", "b", "tie", "both_bad"][: 3 if name in ("lmsys_55k", "comparia_votes") else 4] for name in SAMPLES}


def by_lines(text: str) -> list:
    """What the lines say: of JSON the values, of CSV the text."""
    return [json.loads(line) if line.startswith("{") else line for line in text.splitlines()]
