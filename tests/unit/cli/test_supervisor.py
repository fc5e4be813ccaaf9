"""What `serve` decides for the workers that it starts."""

import pytest

from rollplane.cli.supervisor import torch_threads
from rollplane.config import WorkerSettings


@pytest.mark.parametrize(
    ("workers", "cores", "threads"),
    [(1, 8, 8), (2, 8, 4), (3, 8, 2), (2, 2, 1), (4, 2, 1)],
)
def test_workers_of_one_machine_share_its_cores(
    workers: int, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert torch_threads(WorkerSettings(engine="embedded"), workers=workers, cores=cores) == threads


def test_threads_that_were_chosen_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    chosen = WorkerSettings(engine="embedded", engine_option={"threads": "3"})
    assert torch_threads(chosen, workers=2, cores=8) is None
    assert torch_threads(WorkerSettings(engine="mock"), workers=2, cores=8) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert torch_threads(WorkerSettings(engine="embedded"), workers=2, cores=8) is None
