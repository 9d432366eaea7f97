"""How errors are told: the status that each kind has, and the shape that the protocol of a route gives them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from offload_runtime import errors
from offload_runtime.server.turns import ModelLoadError

_RETRY_S = 5  # while a model is loaded


class ModelNotFoundError(errors.OptionError):
    """A request names another model than those that are served."""


# The first that fits; all others are defects of ours.
_STATUS: tuple[tuple[type[Exception], int, str | None], ...] = (
    (ModelNotFoundError, 404, "model_not_found"), (ModelLoadError, 500, "model_load_failed"),
    (errors.UnavailableError, 503, None), (errors.BudgetError, 503, None),
    (errors.HostError, 503, None), (errors.OptionError, 400, None),
    (errors.ContextLengthError, 400, "context_length_exceeded"), (errors.QueueFullError, 429, None),
)  # fmt: skip
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class Failure:
    """Why a request was not answered: the status, what to say, the field that is to blame, OpenAI's code of it, and
    after how many seconds it may be sent again."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_s: int | None = None

    @property
    def kind(self) -> str:
        """Return what OpenAI, and Anthropic mostly, call errors of this status."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of a response that tells of it."""
        return {} if self.retry_s is None else {"retry-after": str(self.retry_s)}

    def body(self, path: str) -> dict[str, Any]:
        """Return it as the protocol of a route has errors."""
        # Whoever writes half a character shall read that.
        message, param = (
            None if text is None else text.encode("utf-8", "backslashreplace").decode()
            for text in (self.message, self.param)
        )
        if f"{path}/".startswith("/v1/messages/"):  # Anthropic's
            others = {413: "request_too_large", 503: "overloaded_error"}
            kind = others.get(self.status, self.kind if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
        if path.startswith("/api/"):  # ollama's
            return {"error": message}
        return {"error": {"message": message, "type": self.kind, "param": param, "code": self.code}}


def failure_of(error: Exception) -> Failure:
    """Say what an error is to whoever has asked."""
    if hasattr(error, "status_code"):  # of the web framework
        return Failure(error.status_code, str(getattr(error, "detail", error)))
    status, code = next(((status, code) for kind, status, code in _STATUS if isinstance(error, kind)), (500, None))
    retry_s = max(1, math.ceil(getattr(error, "retry_after_s", _RETRY_S))) if status in (429, 503) else None
    # What a defect says is for the log.
    message = str(error) if isinstance(error, errors.OffloadError) else "the server has failed at this request"
    return Failure(status, message, getattr(error, "param", None), code, retry_s)
