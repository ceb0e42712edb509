"""What happens to every HTTP request: owns its id and the last catch of errors."""

from __future__ import annotations

import logging
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.gateway.errors import error_response
from shared.clock import Entropy
from shared.errors import InternalError

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class GatewayMiddleware:
    """Echoes ``X-Request-Id`` (or gives one, and notes it as ``state.request_id``), and turns an
    unforeseen exception into a 500 that tells nothing."""

    def __init__(self, app: ASGIApp, entropy: Entropy) -> None:
        self._app, self._entropy = app, entropy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        known = _REQUEST_ID.fullmatch(given) is not None
        request_id = given if known else self._entropy.hex_id().encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # the last catch: whatever it is, the client learns nothing of it
            _log.exception("unforeseen error in a request")
            if started:
                raise
            await error_response(InternalError("internal error"))(scope, receive, send_with_id)
