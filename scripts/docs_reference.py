"""Writes the generated pages of the reference while mkdocs builds the site: settings, commands and HTTP routes, each from
the declarations that the program itself uses. A hook of mkdocs.yml.
"""

from typing import Any, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click
from typer.main import get_command

from rollplane.cli.commands import app
from rollplane.config import TABLES, Option, options
from rollplane.server.app import route_table
from rollplane.server.openapi import describe

Tree = dict[str, Any]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs calls this once it has found the written pages."""
    for path, text in (
        ("reference/settings.md", settings_page()),
        ("reference/commands.md", commands_page()),
        ("reference/http.md", http_page()),
    ):
        files.append(File.generated(config, path, content=text))
    return files


def settings_page() -> str:
    """Every table of a config file."""
    lines = ["# Settings", ""]
    lines += ["A value comes from the config file (`--config`, a table of TOML each), the environment or a flag; the"]
    lines += ["later of these wins. See [Running it](../operate.md).", ""]
    for table, record in TABLES.items():
        lines += [f"## {table}", "", str(record.__doc__ or ""), ""]
        lines += ["| field | flag | environment | kind | default | meaning |", "| --- | --- | --- | --- | --- | --- |"]
        lines += [_setting(option) for option in options(table)] + [""]
    return "\n".join(lines)


def _setting(option: Option) -> str:
    default = "" if option.default in (None, [], {}, ()) else f"`{option.default}`"
    flag = "after `--`" if option.shape == "words" else f"`{option.flag}`"
    cells = (f"`{option.field}`", flag, f"`{option.env}`", _kind(option.kind), default, _cell(option.help))
    return f"| {' | '.join(cells)} |"


def _kind(kind: Any) -> str:
    if get_origin(kind) is not None and hasattr(kind, "__metadata__"):
        return _kind(get_args(kind)[0])
    if get_args(kind) and all(isinstance(each, str) for each in get_args(kind)):
        return " or ".join(f"`{each}`" for each in get_args(kind))
    if type(None) in get_args(kind):
        return " or ".join(_kind(each) for each in get_args(kind) if each is not type(None))
    return f"`{getattr(kind, '__name__', kind)}`" if not get_args(kind) else f"`{get_origin(kind).__name__}`"


def commands_page() -> str:
    """Every command, as its own `--help` has it."""
    command = get_command(app)
    context = command.context_class(command, info_name="rollplane")
    text = get_docs_for_click(obj=command, ctx=context, name="rollplane")
    return text.replace("# `rollplane`", "# Commands\n\n`rollplane`", 1)


def http_page() -> str:
    """Every route of a worker and of a frontend, and the records that they read and answer with."""
    trees = {role: describe(route_table(role), title=role) for role in ("worker", "frontend")}
    lines = ["# HTTP routes", "", "Both a worker and a frontend serve these; a running server has its own list at"]
    lines += ["`/openapi.json` and, as a page, at `/docs`. Every error has the body [`ErrorBody`](#errorbody).", ""]
    operations: dict[str, list[str]] = {}
    for path, methods in _paths(trees).items():
        for method, operation in methods.items():
            operations.setdefault(operation["tags"][0], []).append(_route(method, path, operation))
    for tag, rows in operations.items():
        lines += [f"## {tag}", "", "| route | key | does | query | body | answer |"]
        lines += ["| --- | --- | --- | --- | --- | --- |", *rows, ""]
    lines += ["## Records", ""]
    for name, schema in sorted({k: v for t in trees.values() for k, v in t["components"]["schemas"].items()}.items()):
        lines += _record(name, schema)
    return "\n".join(lines)


def _paths(trees: dict[str, Tree]) -> Tree:
    """The routes of both roles, in the worker's order; what only one of them serves says so."""
    found: Tree = {}
    for role, tree in trees.items():
        (other,) = (each for name, each in trees.items() if name != role)
        for path, methods in tree["paths"].items():
            for method, operation in methods.items():
                alone = method not in other["paths"].get(path, {})
                summary = f"{operation['summary']} ({role} only)" if alone else operation["summary"]
                found.setdefault(path, {}).setdefault(method, {**operation, "summary": summary})
    return found


def _route(method: str, path: str, operation: Tree) -> str:
    query = [f"`{each['name']}`" for each in operation.get("parameters", []) if each["in"] == "query"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    answer = operation["responses"]["200"]["content"].get("application/json", {}).get("schema", {})
    cells = (f"`{method.upper()} {path}`", operation["x-rollplane-access"], _cell(operation["summary"]))
    return f"| {' | '.join((*cells, ', '.join(query), _type(body), _type(answer)))} |"


def _record(name: str, schema: Tree) -> list[str]:
    lines = [f"### {name}", "", schema.get("description", ""), ""]
    fields = schema.get("properties", {})
    if not fields:
        return [*lines, _type(schema), ""]
    lines += ["| field | type | |", "| --- | --- | --- |"]
    for field, kind in fields.items():
        need = "required" if field in schema.get("required", ()) else ""
        what = ", ".join(part for part in (need, _limits(kind)) if part)
        lines.append(f"| `{field}` | {_type(kind) or 'any'} | {what} |")
    return [*lines, ""]


def _limits(kind: Tree) -> str:
    names = {"minimum": "at least", "maximum": "at most", "exclusiveMaximum": "below", "exclusiveMinimum": "above"}
    names |= {"minLength": "characters at least", "maxLength": "characters at most", "minItems": "items at least"}
    parts = [kind, *kind.get("anyOf", [])]
    return ", ".join(f"{word} {part[key]}" for part in parts for key, word in names.items() if key in part)


def _type(kind: Tree) -> str:
    if "$ref" in kind:
        name = kind["$ref"].rsplit("/", 1)[-1]
        return f"[`{name}`](#{name.lower()})"
    if "anyOf" in kind:
        return " or ".join(_type(each) for each in kind["anyOf"])
    if "enum" in kind:
        return " or ".join(f"`{each}`" for each in kind["enum"])
    if kind.get("type") == "array":
        items = kind.get("items") or {}
        return f"array of {_type(items)}" if items else "array"
    return str(kind.get("type", ""))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
