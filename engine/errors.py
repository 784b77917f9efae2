"""Every error the engine answers with. Each has its HTTP status and OpenAI's error type; its words are the caller's.

    EngineError                      500  server_error
    ├── BadRequest                   400  invalid_request_error
    │   ├── InvalidParameter              a value out of its range or of the wrong type; names the parameter
    │   ├── UnsupportedParameter          one we do not honour, so we do not accept it; names the parameter
    │   ├── UnknownParameter              one that no API we speak has
    │   ├── ContextTooLong                says how long the prompt is and how much the model allows
    │   └── BodyTooLarge             413  says how large the body is and how much is read
    ├── DeadlineExceeded             408  not done within its own deadline_seconds; not worth a retry
    ├── NotAuthorized                401  no key or a wrong one
    ├── ModelNotFound                404  no model of that name
    ├── CheckpointError              422  a source that cannot be fetched, read or run here, and why
    ├── QueueFull                    429  as many requests wait as the config allows
    ├── ModelNotReady                503  still loading, or failed to load
    │   └── ModelAsleep                   until somebody wakes it; not worth a retry
    ├── EngineDead                   503  the engine thread has ended, and by what
    └── ConfigError                       a setting that is unknown or wrong; ends the start, never reaches HTTP

`responses.error_response` turns one into a response; nothing else does.
"""

from __future__ import annotations

from typing import Any


class EngineError(Exception):
    status = 500
    type = "server_error"
    code: str | None = None
    worth_a_retry = True  # of those that clients try again by themselves

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's error body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(EngineError):
    status = 400
    type = "invalid_request_error"


class InvalidParameter(BadRequest):
    code = "invalid_value"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param=param)


class UnsupportedParameter(BadRequest):
    code = "unsupported_parameter"

    def __init__(self, param: str, message: str | None = None) -> None:
        super().__init__(message or f"{param} is not supported", param=param)


class UnknownParameter(BadRequest):
    code = "unknown_parameter"

    def __init__(self, param: str) -> None:
        super().__init__(f"unknown parameter: {param}", param=param)


class ContextTooLong(BadRequest):
    """`prompt_tokens` + `max_tokens` do not fit in the `context_length` tokens of `model`."""

    code = "context_length_exceeded"

    def __init__(
        self, model: str, prompt_tokens: int, context_length: int, max_tokens: int = 0, param: str = "prompt"
    ) -> None:
        size = f"prompt is {prompt_tokens:,} tokens"
        if 0 < prompt_tokens < context_length:
            size += f" and max_tokens is {max_tokens:,}"
        super().__init__(f"{size}; {model} allows {context_length:,}", param=param)
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class BodyTooLarge(BadRequest):
    status = 413
    code = "body_too_large"


class DeadlineExceeded(EngineError):
    status = 408
    type = "timeout_error"
    code = "deadline_exceeded"
    worth_a_retry = False


class NotAuthorized(EngineError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(EngineError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, name: str, sort: str = "") -> None:
        super().__init__(f"there is no {sort}model named {name!r}", param="model")


class CheckpointError(EngineError):
    status = 422
    type = "invalid_request_error"
    code = "checkpoint_error"


class QueueFull(EngineError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class ModelNotReady(EngineError):
    status = 503
    type = "service_unavailable_error"
    code = "model_not_ready"


class ModelAsleep(ModelNotReady):
    code = "model_asleep"
    worth_a_retry = False

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} sleeps: its weights and pages were given back until POST /models/{name}/wake")


class EngineDead(EngineError):
    status = 503
    type = "service_unavailable_error"
    code = "engine_dead"


class ConfigError(EngineError):
    """`param` is the key as the user wrote it: a flag, an environment variable or a key of the file."""
