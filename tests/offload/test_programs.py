"""Any small program of views, edits and reuse gives plain autograd's gradients, or fails as plain autograd does."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from tests.offload.compare import assert_balanced, differences, wait_until_away
from tests.offload.programs import OPERATIONS, Instruction, Program, ProgramModule
from torch import Tensor, nn

import tidegate
from tidegate import OffloadConfig, OffloadSession

EXAMPLES = 400
CONTINUOUS_INTEGRATION = "CI" in os.environ

PLACEMENTS: dict[str, dict[str, Any]] = {
    "disk": {"tiers": ("disk",)},
    "host": {"tiers": ("host",), "window": 1},
    "tiny": {"tiers": ("host", "disk"), "host_budget": "4KiB", "disk_budget": "16KiB", "window": 256},
    "kept": {"tiers": ("host", "disk"), "device_budget": 300, "host_budget": "8KiB", "min_bytes": 32},
    "verified": {"tiers": ("disk",), "verify": True, "window": 512},
}

instructions = st.builds(
    Instruction,
    operation=st.sampled_from(sorted(OPERATIONS)),
    first=st.integers(0, 3),
    second=st.integers(0, 5),
    size=st.integers(0, 7),
    grad=st.sampled_from((True, True, True, True, True, False)),
)
edits = st.builds(
    Instruction,
    operation=st.sampled_from(("mul_", "zero_", "add_", "put", "copy_")),
    first=st.integers(0, 12),
    second=st.integers(0, 5),
    size=st.integers(0, 7),
    grad=st.booleans(),
)
programs = st.builds(
    Program,
    instructions=st.lists(instructions, min_size=1, max_size=12).map(tuple),
    losses=st.lists(st.integers(0, 11), min_size=1, max_size=3).map(lambda late: tuple(-1 - index for index in late)),
    late=st.one_of(st.just(()), st.just(()), st.lists(edits, max_size=1).map(tuple)),
    backward=st.sampled_from(("once", "once", "twice", "create_graph", "never")),
)


@dataclass(slots=True)
class Outcome:
    """What became of a program.

    Args:
        tensors: Loss, gradients and random numbers, if it ended well.
        failed_in: "forward" or "backward", if not.
        error: What it raised there.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    failed_in: str = ""
    error: type[Exception] | None = None


def execute(
    module: ProgramModule, program: Program, seed: int, session: OffloadSession | None, variant: str
) -> Outcome:
    """Runs a program from a start that `seed` fixes, and drops its graph.

    Args:
        module: Holder of the parameter; attached, if `session` is given.
        program: What to run.
        seed: Of values and dropout.
        session: None runs it plain.
        variant: "settled" lets every write end before backward; "whole" puts backward inside the step; or "".
    """
    torch.manual_seed(seed)
    module.weight = nn.Parameter(torch.randn(4, 6))
    leaves = [torch.randn(4, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)]
    inputs = [module.weight, *leaves]
    outcome = Outcome(failed_in="forward")
    try:
        with session.step() if session is not None and variant == "whole" else nullcontext():
            loss = module(program, leaves)
            outcome.tensors["loss"] = loss.detach().clone()
            if session is not None and variant == "settled":
                wait_until_away(session)
            outcome.failed_in = "backward"
            for index, gradient in enumerate(gradients(loss, inputs, program.backward)):
                if gradient is not None:
                    outcome.tensors[f"gradient {index}"] = gradient
        outcome.failed_in = ""
        outcome.tensors["random numbers"] = torch.get_rng_state()
    except Exception as error:
        outcome.error = type(error)
    return outcome


def gradients(loss: Tensor, inputs: list[Tensor], backward: str) -> list[Tensor | None]:
    match backward:
        case "never":
            return []
        case "create_graph":
            first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
            total = sum((gradient.square().sum() for gradient in first if gradient is not None), start=torch.zeros(()))
            second = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else ()
            return [gradient if gradient is None else gradient.detach() for gradient in (*first, *second)]
        case "twice":
            loss.backward(retain_graph=True)
    loss.backward()
    return [tensor.grad for tensor in inputs]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[ProgramModule, OffloadSession]]]:
    """One open session for each placement, used by all programs."""
    opened = {}
    directories: list[Path] = []
    for name, changes in PLACEMENTS.items():
        module = ProgramModule()
        options: dict[str, Any] = {
            "device_budget": 0,
            "min_bytes": 1,
            "host_budget": "1MiB",
            "disk_budget": "16MiB",
            "disk_paths": tmp_path_factory.mktemp("spill"),
            "io_threads": 1,
        }
        opened[name] = module, tidegate.attach(module, OffloadConfig(**(options | changes)))
    yield opened
    for _, session in opened.values():
        directories += session.spill_dirs
        session.close()
    assert directories
    assert [path for path in directories if path.exists()] == []


class TestRandomProgram:
    # Raised as an error it makes torch lose the graph, without tidegate too.
    @pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=CONTINUOUS_INTEGRATION,
        suppress_health_check=[HealthCheck.too_slow],
        phases=[phase for phase in Phase if phase is not Phase.explain],  # it runs for minutes
    )
    @given(
        program=programs,
        seed=st.integers(0, 3),
        placement=st.sampled_from(sorted(PLACEMENTS)),
        variant=st.sampled_from(("settled", "whole", "")),
    )
    def test_does_what_plain_autograd_does(
        self,
        sessions: dict[str, tuple[ProgramModule, OffloadSession]],
        program: Program,
        seed: int,
        placement: str,
        variant: str,
    ) -> None:
        module, session = sessions[placement]
        plain = execute(ProgramModule(), program, seed, None, variant)
        offloaded = execute(module, program, seed, session, variant)
        event(f"ended in {plain.failed_in or 'gradients'}")

        assert offloaded.failed_in == plain.failed_in
        assert same_class(plain.error, offloaded.error), f"plain: {plain.error}, offloaded: {offloaded.error}"
        if plain.error is None:
            assert differences(plain.tensors, offloaded.tensors) == []
        if plain.failed_in == "backward":
            torch.zeros(1, requires_grad=True).sum().backward()  # torch keeps a failed backward's queue until the next
        stats = session.stats()
        if stats.resident or any(stats.pending.values()):
            gc.collect()
            stats = session.stats()
        assert stats.resident == 0
        assert not any(stats.pending.values())
        assert_balanced(stats)

    def test_moves_bytes_in_every_placement(self, sessions: dict[str, tuple[ProgramModule, OffloadSession]]) -> None:
        chain = tuple(Instruction(name, 0, 1, 1, True) for name in ("exp", "sin", "square", "tanh", "softmax", "mul"))
        for placement, (module, session) in sessions.items():
            session.reset_stats()
            outcome = execute(module, Program(chain, (-1,), (), "once"), 0, session, "settled")
            assert outcome.error is None
            assert session.stats().moved > 0, placement


def same_class(plain: type[Exception] | None, offloaded: type[Exception] | None) -> bool:
    """Our error for an edited tensor is a RuntimeError, as autograd's is."""
    if plain is None or offloaded is None:
        return plain is offloaded
    return plain is offloaded or (issubclass(plain, RuntimeError) and issubclass(offloaded, RuntimeError))
