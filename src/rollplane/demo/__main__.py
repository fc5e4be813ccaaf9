"""`python -m rollplane.demo` is `rollplane demo`."""

import typer

from rollplane.demo.command import demo

typer.run(demo)
