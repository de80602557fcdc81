"""Import order, cold imports and the name in Lightning's registry. Each case needs an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from tidegate.strategies import OffloadStrategy, registration

TRAINER = (
    "trainer = L.Trainer(strategy='tidegate', accelerator='cpu', devices=1, logger=False, enable_checkpointing=False);"
    "assert type(trainer.strategy) is tidegate.strategies.OffloadStrategy;"
)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_a_bare_import_loads_no_torch_and_no_trainer() -> None:
    run_python(
        "import sys, tidegate, tidegate.strategies;"
        "loaded = {'torch', 'lightning', 'transformers', 'accelerate'} & set(sys.modules);"
        "assert not loaded, loaded"
    )


@pytest.mark.parametrize(
    "imports",
    ["import tidegate; import lightning as L", "import lightning as L; import tidegate"],
    ids=["tidegate-first", "lightning-first"],
)
def test_the_name_is_known_in_either_import_order(imports: str) -> None:
    run_python(f"{imports}; {TRAINER}")


def test_waiting_for_lightning_leaves_its_modules_as_they_were() -> None:
    run_python(
        "import tidegate, lightning.pytorch as pl, importlib.machinery as m;"
        "assert type(pl.__spec__.loader) is type(pl.__loader__) is m.SourceFileLoader"
    )


def test_an_adapter_that_fails_to_load_does_not_break_lightning() -> None:
    done = run_python(
        "import sys, tidegate; sys.modules['tidegate.strategies.lightning'] = None;"
        "import lightning.pytorch.strategies as s; assert 'tidegate' not in s.StrategyRegistry"
    )
    assert "import tidegate.strategies.lightning shows why" in done.stderr


def test_without_lightning_the_error_names_the_extra() -> None:
    done = run_python(
        "import sys; sys.modules['lightning'] = None; import tidegate\n"
        "try: tidegate.strategies.OffloadStrategy\n"
        "except tidegate.MissingExtraError as error: print(error)"
    )
    assert "pip install 'tidegate[lightning]'" in done.stdout


def test_registering_again_changes_nothing() -> None:
    before = StrategyRegistry["tidegate"]
    registration.register_lightning()
    OffloadStrategy.register_strategies(StrategyRegistry)
    assert StrategyRegistry["tidegate"] is before


def test_unknown_names_are_attribute_errors() -> None:
    import tidegate

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tidegate.nothing
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tidegate.strategies.nothing
