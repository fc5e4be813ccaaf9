"""The API description: OpenAPI 3.1 generated from the route table and the records, and a page that shows it."""

import html
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import rollplane
from rollplane.protocol.request import MSGPACK
from rollplane.server.error_responses import json_response
from rollplane.server.routes import ApiRoute
from rollplane.server.wire_docs import ErrorBody, GenerateBody

_REASONS = {
    400: "the request is wrong; `param` names the field",
    401: "no key, or an unknown one",
    403: "the key lacks the scope, or the path is outside the allowed roots",
    404: "unknown",
    405: "not a method of this route",
    409: "the state forbids it",
    413: "over a size limit, which the message says",
    415: "a content type nobody reads here",
    422: "an idempotency key that was used with another body",
    429: "over a configured limit",
    500: "a fault of the server",
    502: "the engine broke its contract or failed",
    503: "cannot be served now; see Retry-After",
    504: "the deadline passed",
}


def describe(routes: Sequence[ApiRoute], *, title: str, keyed: bool = True) -> dict[str, Any]:
    """The OpenAPI document of a route table; `keyed`: the server asks for keys."""
    shown = [route for route in routes if not route.doc.hidden]
    kinds = {kind for route in shown for kind in (route.doc.body, route.doc.answer) if kind is not None}
    ordered = sorted({*kinds, ErrorBody}, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    refs = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in shown:
        path = route.path.replace(":path}", "}")
        for method in sorted(set(route.methods or ()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, method, refs, keyed=keyed)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": rollplane.__version__, "description": "Token ids in, token ids out."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, method: str, refs: dict[Any, dict[str, Any]], *, keyed: bool) -> dict[str, Any]:
    doc = route.doc
    error = {"application/json": {"schema": refs[ErrorBody]}}
    own = {"application/json": {"schema": refs[doc.answer]}} if doc.answer is not None else {doc.answer_type: {}}
    responses: dict[str, Any] = {"200": {"description": doc.summary, "content": own}}
    if doc.body is GenerateBody:
        own["text/event-stream"] = {"schema": {"type": "string"}}
        own[MSGPACK] = {}
    locked = keyed and route.access != "open"
    closed = (401, 403) if locked else (403,)
    for status in sorted({*doc.errors, *closed, 500}):
        health = route.access == "open" and status == 503
        responses[str(status)] = {"description": _REASONS[status], "content": own if health else error}
    operation: dict[str, Any] = {
        "summary": doc.summary,
        "operationId": re.sub(r"[^a-z0-9]+", "_", f"{method}{route.path}".lower()).strip("_"),
        "tags": [doc.tag],
        "responses": responses,
        "security": [{"bearer": []}] if locked else [],
        "x-rollplane-access": route.access,
    }
    parameters = [{"name": name, "in": "query", **schema} for name, schema in doc.query.items()]
    parameters += [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)", route.path)
    ]
    if parameters:
        operation["parameters"] = parameters
    if doc.body is not None and method == "POST":
        content: dict[str, Any] = {"application/json": {"schema": refs[doc.body]}}
        if doc.body is GenerateBody:
            content[MSGPACK] = {}
        operation["requestBody"] = {"required": doc.body_required, "content": content}
    return operation


async def openapi(request: Request) -> Response:
    """The description as JSON."""
    return json_response(request.app.state.openapi)


async def docs(request: Request) -> Response:
    """The description as one page without scripts or outside resources."""
    return HTMLResponse(page(request.app.state.openapi))


def page(tree: dict[str, Any]) -> str:
    """A plain table of every route."""
    rows = []
    for path, methods in tree["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = str(body.get("$ref", "")).rsplit("/", 1)[-1]
            link = f'<a href="#{html.escape(name)}">{html.escape(name)}</a>' if name else ""
            rows.append(
                f"<tr><td><code>{method.upper()}</code></td><td><code>{html.escape(path)}</code></td>"
                f"<td>{html.escape(operation['x-rollplane-access'])}</td><td>{html.escape(operation['summary'])}</td>"
                f"<td>{link}</td></tr>"
            )
    records = [
        f'<h3 id="{html.escape(name)}">{html.escape(name)}</h3><p>{html.escape(schema.get("description", ""))}</p>'
        f"<pre>{html.escape(msgspec.json.format(msgspec.json.encode(schema), indent=2).decode())}</pre>"
        for name, schema in tree["components"]["schemas"].items()
    ]
    style = "body{font-family:sans-serif;margin:2em;max-width:70em}td{padding:.2em 1em .2em 0}pre{background:#f4f4f4;padding:1em}"
    title = html.escape(tree["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f'<h1>{title} {html.escape(tree["info"]["version"])}</h1><p><a href="/openapi.json">openapi.json</a></p>'
        f"<table>{''.join(rows)}</table><h2>Records</h2>{''.join(records)}</html>"
    )
