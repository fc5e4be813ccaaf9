"""`POST /internal/v1/keys`: which worker keeps the answer to an idempotency key; see `engines.wrappers.key_book`."""

from starlette.requests import Request
from starlette.responses import Response

from rollplane.errors import NotFound
from rollplane.protocol.hop import KeyClaim, KeyKeeper
from rollplane.server.admin_calls import decode_body
from rollplane.server.error_responses import json_response
from rollplane.server.service import Service


async def keys(request: Request) -> Response:
    """The key's keeper.

    Raises:
        NotFound: this is no worker.
    """
    service: Service = request.app.state.service
    if service.worker is None:
        raise NotFound("only a worker keeps a book of keys")
    claim = await decode_body(request, KeyClaim)
    keeper, number = service.worker.keys.claim(claim.key, claim.keeper, number=claim.number)
    return json_response(KeyKeeper(keeper=keeper, number=number))
