"""For tests of code that uses or implements engines: fakes, a real-socket server, and the promises every engine keeps.

from rollplane.testing import Subject, check_engine

report = await check_engine(lambda: Subject(engine=MyEngine()))
"""

from rollplane.testing.check import CHECKS, Check, Report, check_engine, run_check
from rollplane.testing.checks.subject import CheckFailed, NotApplicable, Subject, Watch, watching
from rollplane.testing.clock import FakeClock, settle
from rollplane.testing.requests import answer, collect, folded, make_request, plan_of
from rollplane.testing.scripted import (
    Script,
    ScriptedEngine,
    script_choice,
    script_error,
    script_of,
    scripted_info,
)
from rollplane.testing.serving import serve_in_thread

__all__ = [
    "CHECKS",
    "Check",
    "CheckFailed",
    "FakeClock",
    "NotApplicable",
    "Report",
    "Script",
    "ScriptedEngine",
    "Subject",
    "Watch",
    "answer",
    "check_engine",
    "collect",
    "folded",
    "make_request",
    "plan_of",
    "run_check",
    "script_choice",
    "script_error",
    "script_of",
    "scripted_info",
    "serve_in_thread",
    "settle",
    "watching",
]
