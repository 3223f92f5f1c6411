"""The error object of OpenAI's API."""

from typing import Any

from verl.utils.errors import VerlError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "not_found_error",
    504: "timeout_error",
}
TOO_LONG = "context_length_exceeded"


class ApiError(VerlError, ValueError):
    """A request that cannot be answered. The client gets it as a JSON object.

    Args:
        message: one or two sentences for the client.
        status: of HTTP.
        field: the field of the request that is at fault.
        code: a word that programs read, such as `TOO_LONG`.
    """

    def __init__(
        self, message: str, *, status: int = 400, field: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the JSON object that the client gets."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": _KINDS.get(self.status, kind),
            "param": self.field,
            "code": self.code,
        }
        return {"error": error}


def unknown_model(asked: str, served: str) -> ApiError:
    """Return the error for a model that a server does not have."""
    return ApiError(
        f"The model '{asked}' is not here; this server has '{served}'.",
        status=404,
        field="model",
        code="model_not_found",
    )
