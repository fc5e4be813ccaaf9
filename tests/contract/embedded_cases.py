"""The embedded engine's cases of the contract suite, on tiny models made once."""

from collections.abc import Callable
from pathlib import Path

from tests.models import tiny

from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.testing import Subject


def make_embedded(kind: str, *, dtype: str = "float32") -> Callable[[Path], Subject]:
    """An embedded engine over a tiny `kind` model, two further checkpoints of it and two adapters."""

    def make(root: Path) -> Subject:
        base = tiny.shared_model(kind, layers=2)
        weights = [str(tiny.shared_model(kind, layers=2, seed=seed)) for seed in (1, 2)]
        adapters = [str(tiny.make_lora(root / f"adapter-{seed}", base=base, seed=seed)) for seed in (1, 2)]
        settings = EmbeddedSettings(model=str(base), dtype=dtype, threads=1, max_num_seqs=16, max_model_len=1024)
        return Subject(engine=EmbeddedEngine(settings), weights=weights, adapters=adapters, long_tokens=300)

    return make
