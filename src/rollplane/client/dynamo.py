"""The rollout client of a trainer whose workers are behind NVIDIA Dynamo's frontend."""

from typing import Any, Final, Unpack

from rollplane.client.body import TokenIds, make_body, token_array
from rollplane.client.client import GENERATE
from rollplane.client.dynamo_answer import read_answer
from rollplane.client.options import GenerateOptions
from rollplane.client.transport import Connected, Transport
from rollplane.errors import EngineProtocolError, InvalidRequest, RollplaneError
from rollplane.fold import check_again
from rollplane.protocol.request import JSON
from rollplane.protocol.response import GenerateResponse

NOT_PASSED: Final = {
    "idempotency_key": "it is a header, and Dynamo's frontend hands on none",
    "data_parallel_rank": "it is a header, and Dynamo's router chooses the rank",
    "max_policy_lag": "nobody there knows the fleet's newest version; use min_policy_version",
}


class DynamoClient(Connected):
    """Rollouts from our workers behind one Dynamo frontend: `Client.generate`, with the same answers and checks.

    A call that met a lost connection, a 500, 502 or 503 is sent again under the same request id: Dynamo does not move a
    Generate to another worker, so the loss of one is for the caller to mend. Dynamo's 500 has no reason in it; one that comes
    back after all tries is raised as `RollplaneError`, and the worker's log knows more.

    Args:
        base_url: the frontend's address, with or without a trailing `/v1`.
        timeout_s: limit of a call that has no `deadline_s` of its own, all tries together; None: no limit.
        attempts: how often a call is tried in all.
        connect_timeout_s: longest wait for a connection.

    Use it as an async context manager, in one event loop. Administration goes past Dynamo: `AdminClient` on a frontend of ours
    over the same deployment.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float | None = None,
        attempts: int = 4,
        connect_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(
            Transport(base_url, key=None, attempts=attempts, connect_timeout_s=connect_timeout_s, mendable=is_mendable)
        )
        self._timeout_s = timeout_s

    async def generate(self, token_ids: TokenIds, **options: Unpack[GenerateOptions]) -> GenerateResponse:
        """One whole answer, its arrays checked by the response contract again.

        Args:
            token_ids: the prompt, integers in [0, vocabulary).
            **options: see `GenerateOptions`; `model` is needed where the deployment has several names.

        Raises:
            CallerError: the request is wrong; by field. Also an option that does not pass through Dynamo's frontend.
            ServiceError: the deployment cannot do it now, the deadline passed, or the rollout was aborted.
            EngineProtocolError: the answer breaks the contract, or was not made by a worker of ours.
            RollplaneError: a worker or a connection failed, also after all tries.
        """
        for name, why in NOT_PASSED.items():
            if options.get(name) is not None:
                raise InvalidRequest(f"{name} does not pass through Dynamo's frontend: {why}", param=name)
        prompt = token_array(token_ids)
        body = make_body(prompt, wire=JSON, **options)
        limit_s = self._timeout_s if body.deadline_s is None else body.deadline_s
        asked: Any = (options.get("sampling_params") or {}).get("logprobs")

        async def once() -> GenerateResponse:
            async with self._transport.open(
                "POST", GENERATE, data=body.content, headers=body.headers, limit_s=limit_s
            ) as answer:
                content = await answer.read()
            return read_answer(content, prompt=prompt, alternatives=asked)

        response = await self._transport.repeated(once, limit_s=limit_s, retry=True)
        if response.request_id != body.request_id:
            raise EngineProtocolError(f"the answer is to request {response.request_id!r}, not {body.request_id!r}")
        check_again(response, body.plan)
        return response

    async def models(self) -> list[dict[str, Any]]:
        """The cards of every name that `model` may be: the base model and the adapters that are loaded."""
        answer = await self._transport.json("GET", "/v1/models", limit_s=30.0)
        cards = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(cards, list):
            raise EngineProtocolError(
                f"{self._transport.base_url}/v1/models answered something else than a list of models"
            )
        return cards


def is_mendable(error: RollplaneError) -> bool:
    """Whether another try can mend it; a 500 of Dynamo's may be the loss of the worker that had the request."""
    return error.retryable or error.status == 500
