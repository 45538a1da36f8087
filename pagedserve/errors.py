"""All exceptions that pagedserve raises on purpose.

PagedServeError
 +-- ConfigError              an operator's mistake: one line that says what to change, exit code 2
 +-- ModelNotFoundError       --model names nothing that can be found
 +-- ModelLoadError           the files are there but cannot be served (names the tensor or architecture)
 +-- RequestError             a client's mistake: HTTP 400, names the field
 |    +-- ContextLengthError  prompt and max_tokens do not fit
 |    +-- NotFoundError       HTTP 404
 +-- QueueFullError           HTTP 429 with Retry-After
 +-- DeadlineExceededError    HTTP 408: the request's `timeout` passed
 +-- EngineDeadError          HTTP 503: the core process is gone
 |    +-- DeviceLostError     the device fails whatever it is given: only a new process can help
 +-- EngineStepError          HTTP 500: this request's step failed; the engine lives on
 +-- RequestAbortedError      the request was aborted (client gone, shutdown)
"""

from __future__ import annotations


class PagedServeError(Exception):
    """Base of the tree."""


class ConfigError(PagedServeError):
    """A flag or setting is wrong; the message says which one and what would be right."""


class ModelNotFoundError(PagedServeError):
    """No model under that name; the message lists what was tried."""


class ModelLoadError(PagedServeError):
    """The model's files are broken or of a kind this engine does not know."""


class RequestError(PagedServeError):
    """A client's request is wrong.

    `param` is the field's name as the client sent it, `code` the machine-readable OpenAI code.
    """

    status_code = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt plus requested tokens exceed the context, or the whole KV pool."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message, param=param, code="context_length_exceeded")


class NotFoundError(RequestError):
    """The named model or object does not exist."""

    status_code = 404


class QueueFullError(PagedServeError):
    """The waiting queue is at --max-queue-len; try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceededError(PagedServeError):
    """The request's deadline passed before it finished."""


class EngineDeadError(PagedServeError):
    """The engine core ended; requests cannot be served."""


class DeviceLostError(EngineDeadError):
    """The device answers every call with an error; the core ends, so that a supervisor starts a new one."""


class EngineStepError(PagedServeError):
    """A step failed for this request."""


class RequestAbortedError(PagedServeError):
    """The request was aborted before it finished."""
