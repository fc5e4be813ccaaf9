"""What a run leaves: its steps with their figures, whether each passed, and why not."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Final

REPORT: Final = "proof.json"
"""In a proof's directory: the runs, as `--json` writes them."""
KL_LIMIT: Final = 1e-3
"""Most mismatch KL of a step, in nats; the reference line of such systems is 3e-4 to 6e-4."""
PREVIOUS_RATIO: Final = 50.0
"""How many times worse the previous policy must explain the same rollouts."""
REPLAY_GAIN: Final = 15.0
"""How many times less mismatch both replays leave than the sampling mask alone."""


@dataclass(kw_only=True)
class Step:
    """One step of a run. KLs in nats; `previous_kl`: the same rollouts under the policy before, None where there is none."""

    step: int
    policy_version: str
    mismatch_kl: float
    previous_kl: float | None = None
    reward: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.failures

    def judge(self) -> "Step":
        """Hold the figures to the limits."""
        if not (math.isfinite(self.mismatch_kl) and self.mismatch_kl < KL_LIMIT):
            self.failures.append(f"mismatch KL {self.mismatch_kl:.2e} is not under {KL_LIMIT:.0e}")
        if self.previous_kl is not None and not self.previous_kl >= PREVIOUS_RATIO * self.mismatch_kl:
            self.failures.append(
                f"the previous policy's KL {self.previous_kl:.2e} is under {PREVIOUS_RATIO:g} times {self.mismatch_kl:.2e}"
            )
        return self


@dataclass(kw_only=True)
class Run:
    """One run; `figures` are its own beyond the steps'."""

    name: str
    engine: str
    dtype: str
    steps: list[Step] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every step passed and nothing else failed."""
        return bool(self.steps) and not self.failures and all(step.passed for step in self.steps)

    def tree(self) -> dict[str, Any]:
        """The run for `--json`."""
        return {
            "name": self.name,
            "engine": self.engine,
            "dtype": self.dtype,
            "passed": self.passed,
            "steps": [asdict(step) | {"passed": step.passed} for step in self.steps],
            "mismatch_kl": [step.mismatch_kl for step in self.steps],
            "policy_versions": [step.policy_version for step in self.steps],
            "rewards": [step.reward for step in self.steps],
            "figures": self.figures,
            "failures": self.failures,
        }
