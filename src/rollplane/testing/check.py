"""Hold any engine to the promises of `rollplane.engines.base`."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollplane.engines.base import WeightReceiver
from rollplane.testing.checks import native, policy, sampling, serving
from rollplane.testing.checks.subject import PATIENCE_S, CheckFailed, MomentMissed, NotApplicable, Subject, within

Check = Callable[[Subject], Awaitable[None]]

CHECKS: tuple[Check, ...] = (*serving.CHECKS, *sampling.CHECKS, *policy.CHECKS, *native.CHECKS)
"""Every check; its name says the promise, its docstring the details."""

TRIES = 5
"""How often a check is run whose moment passed before it could look."""


@dataclass(kw_only=True)
class Report:
    """What `check_engine` found. `not_applicable`: check name -> what the engine lacks."""

    engine: str
    kept: list[str] = field(default_factory=list)
    not_applicable: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.engine}: {len(self.kept)} promises kept, {len(self.not_applicable)} not applicable"]
        lines += [f"  not applicable: {name}: {why}" for name, why in self.not_applicable.items()]
        return "\n".join(lines)


async def run_check(check: Check, subject: Subject) -> str | None:
    """Run one check on a started engine; None if it was kept, else why it does not apply.

    A check whose moment passed before it could look is run again, up to `TRIES` times.

    Raises:
        CheckFailed: the engine broke the promise; the message begins with the check's name.
    """
    missed = ""
    for _ in range(TRIES):
        try:
            return await _try_check(check, subject)
        except MomentMissed as why:
            missed = str(why)
    return missed


async def _try_check(check: Check, subject: Subject) -> str | None:
    name = getattr(check, "__name__", repr(check))
    try:
        await within(check(subject), "the check to end", seconds=PATIENCE_S * 2)
    except MomentMissed:
        raise
    except NotApplicable as why:
        return str(why)
    except CheckFailed as error:
        raise CheckFailed(f"{name}: {error}") from error
    except Exception as error:
        raise CheckFailed(f"{name}: {error!r}") from error
    finally:
        if isinstance(subject.engine, WeightReceiver) and (await subject.engine.health()).state == "paused":
            # A check that gave up while the engine was paused must not stop those after it.
            await subject.engine.resume()
    return None


async def check_engine(make: Callable[[], Subject | Awaitable[Subject]], *, checks: Sequence[Check] = CHECKS) -> Report:
    """Start an engine, hold it to its promises one after another, and close it.

    Args:
        make: makes the subject, its engine not started yet. Without checkpoints and adapters in it the checks of
            updates and adapters do not apply.
        checks: which; all by default.

    Raises:
        CheckFailed: the first promise that was broken.
    """
    made = make()
    subject = made if isinstance(made, Subject) else await made
    await subject.engine.start()
    report = Report(engine=subject.engine.info.engine)
    try:
        for check in checks:
            name = getattr(check, "__name__", repr(check))
            why = await run_check(check, subject)
            if why is None:
                report.kept.append(name)
            else:
                report.not_applicable[name] = why
    finally:
        await subject.engine.close()
    health = await subject.engine.health()
    if health.alive:
        raise CheckFailed(f"a closed engine says that it is alive: {health}")
    await subject.engine.close()
    return report
