import json
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from safetensors.numpy import save_file

from rollplane.engines.mock.engine import MockEngine
from rollplane.server.policy_metrics import PolicyMetrics
from rollplane.worker import Worker


def adapter(path: Path, fill: float) -> str:
    path.mkdir()
    save_file({"m.w.lora_A.weight": np.full((2, 4), fill, np.float32), "m.w.lora_B.weight": np.zeros((4, 2), np.float32)},
              path / "adapter_model.safetensors")  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    return str(path)


async def test_a_scrape_says_state_leases_and_generations_and_forgets_what_is_gone(tmp_path: Path) -> None:
    worker = Worker(MockEngine())
    await worker.start()
    registry = CollectorRegistry()
    gauges = PolicyMetrics(registry)

    def scrape() -> list[str]:
        gauges.read(worker)
        text = generate_latest(registry).decode().splitlines()
        return [line for line in text if not line.startswith("#") and "age_seconds" not in line]

    def states() -> list[str]:
        gauges.read(worker)
        return [
            line for line in generate_latest(registry).decode().splitlines() if line.startswith("rollplane_policy_")
        ]

    await worker.load_adapter("a", adapter(tmp_path / "1", 1.0))
    assert worker.adapter_table is not None
    async with worker.adapter_table.lease("a"):
        await worker.load_adapter("a", adapter(tmp_path / "2", 2.0))
        assert 'rollplane_adapter_leases{adapter="a",generation="1",state="draining"} 1.0' in scrape()
        assert 'rollplane_adapter_generations{state="ready"} 1.0' in scrape()
    await worker.unload_adapter("a")
    await worker.pause()
    assert [line.split(" ")[0] for line in states()] == ['rollplane_policy_state_age_seconds{state="paused"}']
    assert "rollplane_adapters_not_dropped 0.0" in scrape()
    await worker.close()
    assert not any('adapter="a",generation="2"' in line for line in scrape())
