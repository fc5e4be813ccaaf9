"""Settings: every option declared once, merged once from files, environment and flags, with the origin of every value.

Each concern is one frozen record; a field's description and flag live in its declaration, and the command line, the
environment names and the checks are all derived from it. Later sources win: defaults, then the config file, then
`ROLLPLANE_<TABLE>_<FIELD>`, then flags. Nothing is read again afterwards (keys apart, see `server.auth`).
"""

import os
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from rollplane.errors import InvalidRequest

ENV_PREFIX: Final = "ROLLPLANE_"
MAX_SHOWN_CHARS: Final = 64
"""Of a value that is none, in its refusal."""

Port = Annotated[int, Meta(ge=0, le=65_535)]
Seconds = Annotated[float, Meta(gt=0)]
Bytes = Annotated[int, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


def _about(text: str) -> Meta:
    return Meta(description=text)


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side of a worker or a frontend. Sizes in bytes, times in seconds."""

    host: Annotated[str, _about("Address to listen on; other than loopback needs keys")] = "127.0.0.1"
    port: Annotated[Port, _about("Port to listen on; 0 takes a free one")] = 8000
    admin_host: Annotated[str | None, _about("Address of the administration's own listener; host if absent")] = None
    admin_port: Annotated[
        Port | None, _about("Serve administration on this port only, 0 takes a free one; the first port serves data")
    ] = None
    tls_cert_file: Annotated[str | None, _about("Certificate chain (PEM); with tls_key_file, HTTPS only")] = None
    tls_key_file: Annotated[str | None, _about("Private key of the certificate (PEM, without a passphrase)")] = None
    data_key_file: Annotated[list[str], _about("File of bearer keys for the data plane, one a line")] = []
    admin_key_file: Annotated[list[str], _about("File of bearer keys for every route, one a line")] = []
    root: Annotated[list[str], _about("Directory that weights and adapters may come from")] = []
    max_body_bytes: Annotated[Bytes, _about("Largest request body")] = 64 * 2**20
    max_feature_bytes: Annotated[Bytes, _about("Largest total of decoded features of one request")] = 16 * 2**20
    max_prompt_tokens: Annotated[Count, _about("Longest token_ids")] = 4_194_304
    drop_unknown_sampling: Annotated[bool, _about("Leave out unknown sampling parameters instead of a 400")] = False
    tokenizer: Annotated[
        str | None, _about("Directory of the tokenizer and chat template of the OpenAI routes; the model's if absent")
    ] = None
    tool_call_parser: Annotated[
        Literal["hermes"] | None,
        _about("How the model writes tool calls, to be read from chats with tools; without it those are a 400"),
    ] = None
    routes_encoding: Annotated[
        Literal["structured", "npy"], _about("Encoding of routed experts where a request does not choose")
    ] = "structured"
    stall_s: Annotated[Seconds, _about("Work without progress for this long is reported as unhealthy")] = 120.0
    write_stall_s: Annotated[Seconds, _about("A stream's reader that takes nothing for this long is cut off")] = 300.0
    head_timeout_s: Annotated[Seconds, _about("Longest time for a request's line and headers to arrive")] = 30.0
    body_timeout_s: Annotated[Seconds, _about("Longest time for a request's body to arrive")] = 120.0
    max_connections: Annotated[Count, _about("Connections at once; requests on further ones get a 503")] = 16_384
    drain_s: Annotated[float, Meta(ge=0), _about("How long running requests may take to finish at the end")] = 20.0
    ready_file: Annotated[str | None, _about("File that gets a JSON line once the server accepts requests")] = None
    stop_with_stdin: Annotated[bool, _about("Stop when standard input ends (its parent is gone)")] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _about("Least level that is logged")] = "info"
    log_format: Annotated[Literal["console", "json"], _about("How log lines look")] = "console"


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine replica and the policy it serves. Times in seconds, sizes in bytes."""

    engine: Annotated[str, _about("Engine by its registered name: mock, embedded, vllm, vllm-grpc")] = "mock"
    model: Annotated[str | None, _about("Checkpoint directory")] = None
    served_model_name: Annotated[list[str], _about("Names the model is served under; the first is its main name")] = []
    name: Annotated[str | None, _about("The worker's name; its port's name if absent")] = None
    policy_version: Annotated[str | None, _about("Version of the weights at the start; the directory's name")] = None
    dtype: Annotated[str | None, _about("Type of the engine's weights, such as bfloat16")] = None
    max_model_len: Annotated[Count | None, _about("Longest prompt and completion together, in tokens")] = None
    max_num_seqs: Annotated[Count | None, _about("Sequences that run at once")] = None
    seed: Annotated[int | None, _about("Seed for requests that bring none")] = None
    grpc_endpoint: Annotated[str | None, _about("HOST:PORT of a vLLM gRPC server (engine vllm-grpc)")] = None
    vllm_http_endpoint: Annotated[str | None, _about("Base URL of the same vLLM server's HTTP side")] = None
    engine_option: Annotated[dict[str, str], _about("Further option of the engine, as name=value")] = {}
    engine_args: Annotated[tuple[str, ...], _about("The engine's own arguments, as its command line has them")] = ()
    isolate_by_version: Annotated[bool | None, _about("Scope cached KV by policy version; on if absent")] = None
    max_hold_s: Annotated[Seconds, _about("Longest wait of a request while paused or updating")] = 600.0
    namespace: Annotated[str, _about("Namespace in discovery")] = "rollplane"
    component: Annotated[str, _about("Component name in discovery")] = "worker"
    public_url: Annotated[str | None, _about("Address of this worker as others reach it")] = None
    runtime: Annotated[
        Literal["http", "dynamo"], _about("What requests come by: HTTP alone, or NVIDIA Dynamo's runtime beside it")
    ] = "http"


class DynamoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's part in a Dynamo deployment, whose own settings are its DYN_* variables."""

    runtime_endpoint: Annotated[str, _about("Dynamo: namespace.component.endpoint; one for all workers of a model")] = (
        "dynamo.backend.generate"
    )
    model_card: Annotated[
        str | None, _about("Dynamo: directory of the model's configuration and tokenizer; the model's if absent")
    ] = None
    partial_rollouts: Annotated[
        Literal["refuse", "length"], _about("Dynamo: an aborted rollout is a 499, or ends as length with its tokens")
    ] = "refuse"
    publish_kv_events: Annotated[bool, _about("Dynamo: tell its router what is cached")] = True
    block_tokens: Annotated[
        Count | None, _about("Dynamo: KV block size to register for an engine that has no blocks; 16 if absent")
    ] = None


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers behind a frontend and how requests are spread over them. Times in seconds."""

    workers: Annotated[list[str], _about("Base URLs of the workers, separated by commas")] = []
    workers_file: Annotated[str | None, _about("JSON or TOML file of worker URLs, followed while it changes")] = None
    fleet: Annotated[
        dict[str, str],
        _about("A further model as NAME=URL,URL...: a fleet of its own; several may be given"),
    ] = {}
    dynamo_rl_url: Annotated[
        str | None, _about("Base URL of a Dynamo frontend's RL port: the workers are those that it lists")
    ] = None
    worker_key_file: Annotated[str | None, _about("File whose first key is sent to the workers")] = None
    router: Annotated[str | None, _about("Routing policy: prefix_aware (the default), least_loaded or round_robin")] = (
        None
    )
    max_hold_s: Annotated[Seconds, _about("Longest wait of a request while nobody can serve")] = 600.0
    max_attempts: Annotated[Count, _about("Workers that one request is tried on after faults")] = 4
    silent_s: Annotated[
        float, Meta(ge=2), _about("A worker that says nothing for so long is lost; its requests move")
    ] = 15.0
    prefill_window: Annotated[
        int, Meta(ge=0), _about("Uncached prompt tokens that a worker is sent at a time; 0 sends all at once")
    ] = 8192
    max_running: Annotated[Count | None, _about("Sequences that are let in at once; further requests wait")] = None
    max_running_per_key: Annotated[Count | None, _about("The same of one data key")] = None
    max_waiting: Annotated[Count | None, _about("Requests that wait for room; what is over it is a 429")] = None
    max_waiting_per_key: Annotated[Count | None, _about("The same of one data key")] = None
    share: Annotated[
        dict[str, Share], _about("Weight of a traffic class while requests wait, as train=3; 1 if not named")
    ] = {}
    initial_checkpoint: Annotated[
        str | None, _about("Checkpoint that workers start with: what the first update can be rolled back to")
    ] = None
    initial_version: Annotated[str | None, _about("Its policy version; the directory's name if absent")] = None
    control_record: Annotated[
        str | None, _about("File for what the next frontend must know of the fleet: epoch, versions, adapters")
    ] = None
    join_s: Annotated[float, Meta(ge=0), _about("How long to wait for the workers before saying ready")] = 30.0
    processes: Annotated[
        int, Meta(ge=1, le=64), _about("Processes of this frontend behind its one port; they act as one")
    ] = 1


class CrewSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of several processes of a frontend this is; written by the process that starts them, never by hand."""

    directory: Annotated[str | None, _about("Directory of the processes' sockets and claims; none if absent")] = None
    index: Annotated[int, Meta(ge=0), _about("Number of this process; 0 is the control owner")] = 0
    count: Annotated[Count, _about("How many there are")] = 1


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `rollplane serve` keeps its child processes. Times in seconds."""

    workers: Annotated[Count, _about("Workers to start")] = 1
    start_timeout_s: Annotated[Seconds, _about("Longest time for a worker to become ready")] = 600.0
    restart: Annotated[bool, _about("Start a worker again when it ends by itself")] = True
    backoff_s: Annotated[Seconds, _about("Pause before the first restart; doubles up to max_backoff_s")] = 0.5
    max_backoff_s: Annotated[Seconds, _about("Longest pause before a restart")] = 30.0


class MockVllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vLLM gRPC server without vLLM, for tests and load. Sizes in bytes."""

    host: Annotated[str, _about("Address to listen on")] = "127.0.0.1"
    port: Annotated[Port, _about("Port to listen on; 0 takes a free one")] = 50_051
    tokens_per_message: Annotated[int, Meta(ge=0), _about("How streams are cut; 0: as the engine makes them")] = 1
    model: Annotated[str | None, _about("Directory that clients may read as the model's; none if absent")] = None
    world_size: Annotated[Annotated[int, Meta(ge=0)] | None, _about("World size to report; 0 as older servers do")] = (
        None
    )
    max_request_bytes: Annotated[Bytes, _about("Largest request")] = 32 * 2**20
    engine_option: Annotated[dict[str, str], _about("Option of the mock engine, as name=value")] = {}
    ready_file: Annotated[str | None, _about("File that gets a JSON line once the server accepts requests")] = None


TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "server": ServerSettings,
    "worker": WorkerSettings,
    "dynamo": DynamoSettings,
    "frontend": FrontendSettings,
    "crew": CrewSettings,
    "serve": ServeSettings,
    "mock_vllm": MockVllmSettings,
}
"""Every table of a config file and its record."""

Record = TypeVar("Record", bound=msgspec.Struct)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One option, derived from a record's field."""

    table: str
    field: str
    kind: Any
    help: str
    default: Any

    @property
    def path(self) -> str:
        """`table.field`, as in a config file and in errors."""
        return f"{self.table}.{self.field}"

    @property
    def env(self) -> str:
        """The environment variable."""
        return f"{ENV_PREFIX}{self.table}_{self.field}".upper()

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.field.replace("_", "-")

    @property
    def shape(self) -> Literal["scalar", "list", "map", "flag", "words"]:
        """How text becomes a value: one word, several, `name=value` pairs, true/false, or a shell's words."""
        kinds = {get_origin(kind) or kind for kind in _alternatives(self.kind)}
        if tuple in kinds:
            return "words"
        if list in kinds:
            return "list"
        if dict in kinds:
            return "map"
        return "flag" if bool in kinds else "scalar"


class Settings:
    """All tables merged, each checked against its record when it is asked for."""

    def __init__(self, values: dict[str, dict[str, Any]], origins: dict[str, str]) -> None:
        self._values = values
        self._origins = origins

    def __repr__(self) -> str:
        return f"<Settings {' '.join(f'{path}<-{where}' for path, where in sorted(self._origins.items()))}>"

    def origin(self, path: str) -> str:
        """Where the value at `table.field` came from: `default`, a file, a variable or a flag."""
        return self._origins.get(path, "default")

    def table(self, kind: type[Record]) -> Record:
        """The record of one table.

        Raises:
            InvalidRequest: a value does not fit; the message has its path and its origin.
        """
        name = next(table for table, record in TABLES.items() if record is kind)
        values = self._values.get(name, {})
        try:
            return msgspec.convert(values, kind, strict=True)
        except msgspec.ValidationError as error:
            text, _, where = str(error).partition(" - at `")
            path = name + where.rstrip("`").removeprefix("$")
            field = ".".join(path.split("[", 1)[0].split(".")[:2])
            raise InvalidRequest(
                f"{path} (from {self.origin(field)}): {text[:1].lower()}{text[1:]}", param=path
            ) from None

    def plain(self, *tables: str) -> dict[str, dict[str, Any]]:
        """The merged values of these tables, as a config file would hold them."""
        return {name: dict(self._values[name]) for name in tables if self._values.get(name)}


def options(table: str) -> list[Option]:
    """The options of one table, in the order of declaration."""
    record = TABLES[table]
    hints = get_type_hints(record, include_extras=True)
    found = []
    for field in msgspec.structs.fields(record):
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        found.append(
            Option(
                table=table,
                field=field.name,
                kind=hints[field.name],
                help=_description(hints[field.name]),
                default=default,
            )
        )
    return found


def load_settings(
    *, file: str | Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Settings:
    """Merge every source once.

    Args:
        file: a TOML (or JSON) file of tables, or None.
        env: the environment; None reads the process's.
        flags: `table.field` -> text, list of texts, or a value; None values were not given.

    Raises:
        InvalidRequest: a file that cannot be read, an unknown table, field or variable, or text that is no value;
            with its path.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    origins: dict[str, str] = {}
    known = {option.path: option for name in TABLES for option in options(name)}
    if file is not None:
        for table, entries in _read_file(Path(file)).items():
            if table not in TABLES or not isinstance(entries, dict):
                raise InvalidRequest(f"{file}: {table} is not a table; known: {', '.join(TABLES)}", param=table)
            for field, value in entries.items():
                _put(values, origins, known, f"{table}.{field}", value, origin=f"file {file}")
    by_env = {option.env: option for option in known.values()}
    for name, text in sorted((os.environ if env is None else env).items()):
        if name in by_env:
            option = by_env[name]
            _put(values, origins, known, option.path, read_text(option, text, origin=name), origin=f"env {name}")
        elif name.startswith(tuple(f"{ENV_PREFIX}{table.upper()}_" for table in TABLES)):
            raise InvalidRequest(f"{name} names no option", param=name)
    for path, value in (flags or {}).items():
        if value is not None:
            option = known[path]
            given = read_text(option, value, origin=option.flag) if isinstance(value, (str, list)) else value
            _put(values, origins, known, path, given, origin=f"flag {option.flag}")
    return Settings(values, origins)


def read_text(option: Option, text: str | list[str], *, origin: str) -> Any:
    """The value that text from the environment or a flag stands for.

    Raises:
        InvalidRequest: it stands for none.
    """
    if option.shape in ("list", "map"):
        # Text of a map is cut at commas only where it is one text: a repeated flag may hold JSON.
        whole = isinstance(text, list) and option.shape == "map"
        given = text if isinstance(text, list) else [text]
        parts = [part.strip() for each in given for part in ([each] if whole else each.split(","))]
        parts = [part for part in parts if part]
        if option.shape == "list":
            return parts
        pairs = [part.partition("=") for part in parts]
        if not all(name and sign for name, sign, _ in pairs):
            raise InvalidRequest(f"{option.path} (from {origin}): expected name=value, got {text!r}", param=option.path)
        try:
            return msgspec.convert({name: value for name, _, value in pairs}, option.kind, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{option.path} (from {origin}): {error}", param=option.path) from None
    if not isinstance(text, str):
        return text
    if option.shape == "words":
        try:
            return tuple(shlex.split(text))
        except ValueError as error:
            raise InvalidRequest(f"{option.path} (from {origin}): {error}", param=option.path) from None
    try:
        return msgspec.convert(text, option.kind, strict=False)
    except msgspec.ValidationError as error:
        words = str(error).partition(" - at `")[0].partition(", got `")[0]
        raise InvalidRequest(
            f"{option.path} (from {origin}): {words[:1].lower()}{words[1:]}, got {text[:MAX_SHOWN_CHARS]!r}",
            param=option.path,
        ) from None


def read_keys(path: str | Path) -> list[str]:
    """The keys in a file: one a line, blank lines and lines that begin with `#` left out.

    Raises:
        InvalidRequest: the file cannot be read, or a line is no key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the key file {path} cannot be read: {error}") from None
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidRequest(f"{path}, line {number}: a key is printable ASCII without blanks")
        keys.append(key)
    return keys


def _put(
    values: dict[str, dict[str, Any]],
    origins: dict[str, str],
    known: dict[str, Option],
    path: str,
    value: Any,
    *,
    origin: str,
) -> None:
    if path not in known:
        raise InvalidRequest(f"{path} (from {origin}) is not an option", param=path)
    table, _, field = path.partition(".")
    values[table][field] = value
    origins[path] = origin


def _read_file(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        tree = msgspec.json.decode(raw) if path.suffix == ".json" else tomllib.loads(raw.decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"the config file {path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise InvalidRequest(f"the config file {path} must hold tables")
    return tree


def _alternatives(kind: Any) -> list[Any]:
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) is not None and type(None) in get_args(kind):
        return [inner for arg in get_args(kind) if arg is not type(None) for inner in _alternatives(arg)]
    return [kind]


def _description(kind: Any) -> str:
    if get_origin(kind) is not Annotated:
        return ""
    texts = [meta.description for meta in kind.__metadata__ if isinstance(meta, Meta) and meta.description]
    return texts[0] if texts else ""
