"""Every refusal of the website. Each knows its HTTP status, a code for programs and the sentence a visitor reads.

    ArenaError                        500  internal
    ├── NotSignedIn                   401  not_signed_in      no admin session or bearer key, or a wrong one
    ├── ForeignOrigin                 403  foreign_origin     the request was sent by a page of another site
    ├── NoticeRequired                403  notice_required    the notice has not been accepted with this cookie
    ├── NotFound                      404  not_found          no such battle of this visitor, no such model
    ├── Conflict                      409  conflict
    │   ├── AlreadyVoted                   already_voted
    │   ├── NotVotable                     not_votable        streaming, or an answer is missing
    │   ├── WrongState                     wrong_state        what is asked does not fit the battle's state
    │   └── NameTaken                      name_taken
    ├── BadInput                      400  bad_input          names what is wrong with what was sent
    │   ├── ModelRefused                                      an entry that cannot be a model, and which rule it breaks
    │   ├── BlankPrompt                    blank_prompt
    │   └── PromptTooLong                  prompt_too_long    says both numbers
    ├── BodyTooLarge                  413  body_too_large
    ├── TooMany                       429  too_many           a limit of the config; says when to come back
    ├── NotReady                      503  not_ready          fewer than two models can answer; says how to mend
    ├── StorageUnavailable            503  storage            database locked or full: nothing was recorded
    └── ConfigError                        a setting that is unknown or wrong; ends the start, never reaches HTTP

No sentence names a model, an engine or a checkpoint, except where only the admin reads it (BadInput and Conflict of
the registry). What went wrong with an engine is `EngineError` (app.engine_client); a visitor sees one neutral
sentence, the same for every cause. `web.answer_arena_error` turns these into responses; nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIDE_FAILED = "This answer could not be finished."  # the one sentence for every cause


class ArenaError(Exception):
    status = 500
    code = "internal"

    def __init__(
        self,
        message: str,
        *,
        retry_after_seconds: float | None = None,
        rule: str | None = None,
        values: Mapping[str, Any] | None = None,
    ):
        """`rule` is the key of the sentence (rule_<rule> in app.views.words) and `values` fill its blanks, so that a
        view can say it in another language; None where its code says enough."""
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.rule = rule
        self.values = values or {}

    def as_dict(self) -> dict:
        return {"error": {"code": self.code, "message": self.message}}


class NotSignedIn(ArenaError):
    status = 401
    code = "not_signed_in"


class ForeignOrigin(ArenaError):
    status = 403
    code = "foreign_origin"


class NoticeRequired(ArenaError):
    status = 403
    code = "notice_required"


class NotFound(ArenaError):
    status = 404
    code = "not_found"


class Conflict(ArenaError):
    status = 409
    code = "conflict"


class AlreadyVoted(Conflict):
    code = "already_voted"


class NotVotable(Conflict):
    code = "not_votable"


class WrongState(Conflict):
    code = "wrong_state"


class NameTaken(Conflict):
    code = "name_taken"


class BadInput(ArenaError):
    status = 400
    code = "bad_input"


class ModelRefused(BadInput):
    """`field` is the one of the entry's that is wrong."""

    def __init__(self, message: str, *, rule: str, field: str, values: Mapping[str, Any]):
        super().__init__(message, rule=rule, values=values)
        self.field = field


class BlankPrompt(BadInput):
    code = "blank_prompt"


class PromptTooLong(BadInput):
    code = "prompt_too_long"

    def __init__(self, tokens: int, limit: int, *, about: bool = False):
        super().__init__(
            f"Your message is {'about ' if about else ''}{tokens:,} tokens long; there is room for {limit:,} here."
        )
        self.tokens = tokens
        self.limit = limit

    def as_dict(self) -> dict:
        error = super().as_dict()["error"]
        return {"error": {**error, "tokens": self.tokens, "limit": self.limit}}


class BodyTooLarge(ArenaError):
    status = 413
    code = "body_too_large"


class TooMany(ArenaError):
    status = 429
    code = "too_many"


class NotReady(ArenaError):
    status = 503
    code = "not_ready"


class StorageUnavailable(ArenaError):
    status = 503
    code = "storage"


class ConfigError(ArenaError):
    """`key` is the setting as the user wrote it: a flag, an environment variable or a key of the file."""

    def __init__(self, message: str, *, key: str):
        super().__init__(message)
        self.key = key
