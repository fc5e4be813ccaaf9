"""SkyRL's `RemoteInferenceClient`, unmodified. Its packages' own `__init__` import Ray and trainers; the client's module needs none."""

import importlib
import sys
import types

from tests.real.processes import ROOT

SITE = ROOT / ".venv-clients" / "skyrl"
BACKENDS = SITE / "skyrl" / "backends"


def load() -> types.ModuleType:
    """The client's module."""
    assert BACKENDS.is_dir(), "run scripts/make_clients_env.sh"
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    for name, place in (("skyrl.backends", BACKENDS), ("skyrl.backends.skyrl_train", BACKENDS / "skyrl_train")):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(place)]
            sys.modules[name] = package
    return importlib.import_module("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")
