"""What an engine's own weight transfer is given in the contract suite, and what engines without one lack."""

from typing import Any

NO_NATIVE = frozenset({"native_weights_take_effect", "an_engine_asleep_refuses_until_it_is_awake"})
TRANSFER: tuple[dict[str, Any], list[dict[str, Any]]] = (
    {"master_address": "127.0.0.1", "master_port": 29_500, "rank_offset": 1, "world_size": 2},
    [{"names": ["w"], "shapes": [[2, 3]]}, {"names": ["b"], "shapes": [[3]]}],
)
