"""The names of codeset 0.9.1: `import carrel.compat.codeset as codeset`."""

from carrel.compat import INTERNAL, refuse_missing
from carrel.compat.codeset import types
from carrel.compat.codeset.client import DEFAULT_MAX_RETRIES, AsyncCodeset, Codeset
from carrel.compat.codeset.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    CodesetError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    UnprocessableEntityError,
)
from carrel.compat.codeset.resources import (
    DEFAULT_TIMEOUT,
    NOT_GIVEN,
    APIResponse,
    AsyncAPIResponse,
    NotGiven,
    Omit,
    Timeout,
    not_given,
    omit,
)
from carrel.compat.codeset.types import BaseModel

Client = Codeset
AsyncClient = AsyncCodeset

__all__ = [
    "DEFAULT_MAX_RETRIES",
    "DEFAULT_TIMEOUT",
    "NOT_GIVEN",
    "APIConnectionError",
    "APIError",
    "APIResponse",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AsyncAPIResponse",
    "AsyncClient",
    "AsyncCodeset",
    "AuthenticationError",
    "BadRequestError",
    "BaseModel",
    "Client",
    "Codeset",
    "CodesetError",
    "ConflictError",
    "InternalServerError",
    "NotFoundError",
    "NotGiven",
    "Omit",
    "PermissionDeniedError",
    "RateLimitError",
    "Timeout",
    "UnprocessableEntityError",
    "not_given",
    "omit",
    "types",
]

__getattr__ = refuse_missing(
    __name__,
    dict.fromkeys(
        ("DefaultHttpxClient", "DefaultAsyncHttpxClient", "DefaultAioHttpClient", "Transport", "ProxiesTypes"),
        "the HTTP client is httpx2; give http_client=httpx2.Client(…) or httpx2.AsyncClient(…)",
    )
    | dict.fromkeys(
        ("Stream", "AsyncStream", "RequestOptions", "file_from_path", "DEFAULT_CONNECTION_LIMITS"),
        INTERNAL,
    ),
)
