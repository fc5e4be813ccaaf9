"""An engine from a worker's settings: its class by name, its own settings record filled from ours.

Every engine takes one `settings` record. Fields of ours that the record knows (under one of its names) are handed on;
one that was set and that the engine does not know is an error, and so is an unknown `engine_option`.
"""

import dataclasses
from typing import Any, Final, get_type_hints

import msgspec
import msgspec.inspect

from rollplane.config import WorkerSettings
from rollplane.engines.base import Engine
from rollplane.engines.registry import engine_class
from rollplane.errors import InvalidRequest

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "model": ("model_path", "checkpoint", "model", "path"),
    "max_model_len": ("max_model_len",),
    "max_num_seqs": ("max_num_seqs", "max_slots", "slots"),
    "dtype": ("dtype",),
    "policy_version": ("policy_version", "version"),
    "seed": ("seed",),
    "grpc_endpoint": ("endpoint",),
    "vllm_http_endpoint": ("http_endpoint",),
    "engine_args": ("engine_args",),
}
"""A worker's setting -> the names under which engines' records have it, the first that is there is used."""


def build_engine(settings: WorkerSettings) -> Engine:
    """The engine, not started.

    Raises:
        InvalidRequest: an unknown engine or option, or a value that does not fit; naming the setting.
    """
    cls = engine_class(settings.engine)
    kind = settings_type(cls)
    fields = field_types(kind)
    values: dict[str, Any] = {}
    for ours, theirs in NAMES.items():
        value = getattr(settings, ours)
        if value is None or value == ():
            continue
        name = next((name for name in theirs if name in fields), None)
        if name is None:
            raise InvalidRequest(f"the {settings.engine} engine has no setting {ours}", param=f"worker.{ours}")
        values[name] = value
    if settings.isolate_by_version is not None and "isolate_by_version" in fields:
        values["isolate_by_version"] = settings.isolate_by_version  # for the others the worker does it
    if settings.served_model_name:
        _name_model(settings, fields, values)
    for name, text in settings.engine_option.items():
        if name not in fields:
            known = ", ".join(sorted(fields))
            raise InvalidRequest(
                f"worker.engine_option.{name}: the {settings.engine} engine has no such setting; it has {known}",
                param=f"worker.engine_option.{name}",
            )
        values[name] = option_value(text, fields[name], name=name)
    for ours, theirs in NAMES.items():
        if any(name in theirs and name not in values for name in required_fields(kind)):
            raise InvalidRequest(
                f"the {settings.engine} engine needs worker.{ours} (--{ours.replace('_', '-')})", param=f"worker.{ours}"
            )
    try:
        record = msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"settings of the {settings.engine} engine: {error}", param="worker") from None
    engine: Engine = cls(record)
    return engine


def settings_type(cls: type[Any]) -> type[Any]:
    """The record that an engine's constructor takes as `settings`.

    Raises:
        InvalidRequest: it takes none, so it cannot be chosen by name.
    """
    hint = get_type_hints(cls.__init__).get("settings")
    for kind in getattr(hint, "__args__", (hint,)):
        if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)):
            return kind
    raise InvalidRequest(f"{cls.__name__} takes no settings and cannot be run as a worker", param="worker.engine")


def field_types(kind: type[Any]) -> dict[str, Any]:
    """Field name -> type of a settings record."""
    hints = get_type_hints(kind, include_extras=True)
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [f.name for f in dataclasses.fields(kind)]
    return {name: hints[name] for name in names}


def required_fields(kind: type[Any]) -> list[str]:
    """The fields of a settings record that have no default."""
    found: Any = msgspec.inspect.type_info(kind)
    return [field.name for field in found.fields if field.required]


def option_value(text: str, kind: Any, *, name: str) -> Any:
    """What the text of an engine option stands for: a word, a number, or JSON.

    Raises:
        InvalidRequest: it does not fit the setting's type.
    """
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as first:
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.ValidationError, msgspec.DecodeError):
            raise InvalidRequest(
                f"worker.engine_option.{name}: {first}", param=f"worker.engine_option.{name}"
            ) from None


def _name_model(settings: WorkerSettings, fields: dict[str, Any], values: dict[str, Any]) -> None:
    """The first served name is the model's main name where the engine has one beside its path; the rest are aliases."""
    if "served_model_name" in fields:
        values["served_model_name"] = list(settings.served_model_name)
        return
    main = next((name for name in ("model_name", "name", "model") if name in fields and name not in values), None)
    aliases = list(settings.served_model_name)
    if main is not None:
        values[main] = aliases.pop(0)
    if aliases and "aliases" not in fields:
        raise InvalidRequest(f"the {settings.engine} engine serves one name only", param="worker.served_model_name")
    if aliases:
        values["aliases"] = aliases
