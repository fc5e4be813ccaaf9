"""A stand-in for the two kinds of a Kubernetes API that Dynamo's discovery uses: its own resource and the EndpointSlices of pods.

    python kubernetes_api.py PORT POD...

Every POD is ready from the start. The real API would add to this: authentication, admission, garbage collection by owner.
"""

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

METADATA, SLICES = "dynamoworkermetadatas", "endpointslices"
KINDS = {
    METADATA: ("DynamoWorkerMetadataList", "nvidia.com/v1alpha1"),
    SLICES: ("EndpointSliceList", "discovery.k8s.io/v1"),
}


class Api:
    def __init__(self, pods: list[str]) -> None:
        self.version = 1
        self.items: dict[str, dict[str, Any]] = {METADATA: {}, SLICES: {"workers": endpoint_slice(pods)}}
        self.watchers: list[tuple[str, asyncio.Queue[Any]]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if request.method == "GET" and parts[-1] in KINDS:
            return await self.watch(request, parts[-1]) if request.query.get("watch") else self.listed(parts[-1])
        if request.method == "PATCH" and parts[-2] == METADATA:
            return web.json_response(self.apply(parts[-1], json.loads(await request.text())))
        if request.method == "DELETE" and parts[-2] == METADATA:
            gone = self.items[METADATA].pop(parts[-1], None)
            self.tell(METADATA, "DELETED", gone)
            return web.json_response(gone)
        return web.json_response({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound"}, status=404)

    def listed(self, kind: str) -> web.Response:
        name, api = KINDS[kind]
        tree = {"kind": name, "apiVersion": api, "metadata": {"resourceVersion": str(self.version)}}
        return web.json_response({**tree, "items": list(self.items[kind].values())})

    async def watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.watchers.append((kind, queue))
        await response.prepare(request)
        while True:
            await response.write(json.dumps(await queue.get()).encode() + b"\n")

    def apply(self, name: str, item: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        known = name in self.items[METADATA]
        item["metadata"] |= {"namespace": "default", "uid": f"of-{name}", "resourceVersion": str(self.version)}
        item["metadata"]["generation"] = self.version
        self.items[METADATA][name] = item
        self.tell(METADATA, "MODIFIED" if known else "ADDED", item)
        return item

    def tell(self, kind: str, what: str, item: Any) -> None:
        for wanted, queue in self.watchers:
            if wanted == kind:
                queue.put_nowait({"type": what, "object": item})


def uid_of(pod: str) -> str:
    return f"uid-of-{pod}"


def endpoint_slice(pods: list[str]) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "workers",
            "namespace": "default",
            "resourceVersion": "1",
            "labels": {"nvidia.com/dynamo-discovery-enabled": "true"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "system", "port": 9090, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [f"127.0.0.{2 + i}"],
                "conditions": {"ready": True},
                "targetRef": {"kind": "Pod", "name": pod, "uid": uid_of(pod)},
            }
            for i, pod in enumerate(pods)
        ],
    }


def main() -> None:
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", Api(sys.argv[2:]).answer)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=lambda _: None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
