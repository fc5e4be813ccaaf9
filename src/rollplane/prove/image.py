"""The run with a policy that sees: `rollplane.demo.image`, held to the limits of all runs."""

from pathlib import Path

from rollplane.demo.image.pictures import COLOURS
from rollplane.demo.image.run import CHOICES, TOKENS, run_image
from rollplane.prove.record import Run, Step


def run_images(out: Path, *, vllm_env: Path, vllm_rs: Path, seed: int) -> Run:
    """Three optimizer steps on features that vLLM rendered, through frontend, gRPC sidecar and vLLM's Rust server.

    Raises:
        RollplaneError: vLLM is missing, a server did not start, or a request or a load failed.
    """
    report = run_image(out, vllm_env=vllm_env, vllm_rs=vllm_rs, seed=seed)
    run = Run(name="image-lora", engine="vllm-rs", dtype="float32")
    for each in report.steps:
        step = Step(
            step=each.step,
            policy_version=each.version,
            mismatch_kl=each.mismatch_kl,
            previous_kl=each.previous_kl,
            reward=each.reward,
            tokens=len(COLOURS) * CHOICES * TOKENS,
            failures=list(each.failures),
        )
        run.steps.append(step)
        run.figures[f"probe_{each.version}"] = {"before": each.probe_before, "after": each.probe_after}
    run.figures["reward_before"] = report.reward_before
    if not report.reward_after > report.reward_before:
        run.failures.append(f"the reward went from {report.reward_before:.3f} to {report.reward_after:.3f}")
    return run
