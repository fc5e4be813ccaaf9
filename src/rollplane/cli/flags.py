"""Command-line flags derived from the settings' declarations, so that no option is declared twice."""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, get_args, get_origin

import typer

from rollplane.config import TABLES, Option, Settings, load_settings, options

SEPARATOR = "__"


def settings_command(
    tables: Sequence[str], run: Callable[[Settings], None], *, without: frozenset[str] = frozenset()
) -> Callable[..., None]:
    """A typer command that takes every option of some tables, merges the settings and runs.

    Args:
        tables: in the order of their flags; a flag that two tables share sets both.
        without: `table.field` paths that this command does not offer.

    Where the worker's table is among them, the words after `--` are the engine's own arguments.
    """
    by_flag: dict[str, list[Option]] = {}
    for table in tables:
        for option in options(table):
            if option.path not in without:
                by_flag.setdefault(option.flag, []).append(option)

    def command(**given: Any) -> None:
        file, show, rest = given.pop("config"), given.pop("show_config"), given.pop("rest", None)
        flags: dict[str, Any] = {}
        for shared in by_flag.values():
            value = given[shared[0].field]
            for option in shared:
                flags[option.path] = value or None if isinstance(value, list) else value
        if rest:
            flags["worker.engine_args"] = tuple(rest)
        settings = load_settings(file=file, flags=flags)
        if show:
            show_settings(settings, [option.path for shared in by_flag.values() for option in shared])
            return
        run(settings)

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            _parameter("config", str | None, None, typer.Option("--config", help="TOML file of settings")),
            *(_flag(shared[0]) for shared in by_flag.values()),
            *([_rest()] if "worker" in tables else []),
            _parameter("show_config", bool, False, typer.Option("--show-config", help="Print the settings and stop")),
        ]
    )
    command.__annotations__ = {
        name: parameter.annotation for name, parameter in inspect.signature(command).parameters.items()
    }
    command.__doc__ = run.__doc__
    return command


def show_settings(settings: Settings, paths: Collection[str] | None = None) -> None:
    """Every option of these paths (all where None), its value and where the value came from."""
    for name, record in TABLES.items():
        table = settings.table(record)
        for option in options(name):
            if paths is None or option.path in paths:
                print(f"{option.path} = {getattr(table, option.field)!r}  # {settings.origin(option.path)}")


def _flag(option: Option) -> inspect.Parameter:
    shown = None if option.default in (None, [], {}) else str(option.default)
    if option.shape == "flag":
        info = typer.Option(f"{option.flag}/--no-{option.flag[2:]}", help=option.help, show_default=shown or False)
        return _parameter(option.field, bool | None, None, info)
    several = option.shape in ("list", "map")
    info = typer.Option(option.flag, help=option.help + _choices(option.kind), show_default=shown or False)
    return _parameter(option.field, list[str] | None if several else str | None, None, info)


def _rest() -> inspect.Parameter:
    """The words after `--`: the engine's own arguments."""
    info = typer.Argument(metavar="[-- ENGINE ARGUMENTS]", help="The engine's own arguments", show_default=False)
    return _parameter("rest", list[str] | None, None, info)


def _parameter(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _choices(kind: Any) -> str:
    from typing import Literal

    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return f" ({', '.join(get_args(kind))})" if get_origin(kind) is Literal else ""
