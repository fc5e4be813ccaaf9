"""The `rollplane` command. Loads the command line's own libraries only when it runs."""

import sys

from rollplane.errors import RollplaneError


def main() -> None:
    """Run the command line; exit codes: 0 done, 1 failed, 2 wrong settings or a missing extra."""
    try:
        from rollplane.cli.commands import app
    except ModuleNotFoundError as error:
        sys.exit(_refused(error))
    try:
        app()
    except ModuleNotFoundError as error:
        sys.exit(_refused(error))
    except RollplaneError as error:
        print(f"rollplane: {error.message}", file=sys.stderr)
        sys.exit(2 if 400 <= error.status < 500 else 1)


EXTRAS = {
    "torch": "embedded",
    "transformers": "embedded",
    "peft": "embedded",
    "safetensors": "embedded",
    "matplotlib": "embedded",
    "grpc": "grpc",
    "google": "grpc",
    "dynamo": "dynamo",
    "vllm": "vllm",
}


def missing(error: ModuleNotFoundError) -> str:
    """Which extra brings a module that is not installed."""
    name = (error.name or "a module").split(".", 1)[0]
    extra = EXTRAS.get(name, "server")
    return f"{name} is needed for this and is not installed; pip install 'rollplane[{extra}]'"


def _refused(error: ModuleNotFoundError) -> int:
    print(f"rollplane: {missing(error)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
