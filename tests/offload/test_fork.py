"""Forks of a process that trains: the child trains plainly and leaves its parent's files alone.

Each runs in a process of its own that sees no GPU: torch refuses backward in a fork of a process whose GPU threads run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import os, sys, warnings
from pathlib import Path
import torch, tidegate
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
torch.set_num_threads(1)
path = Path(sys.argv[1])
model, plain = blocks(), gradients(blocks())


def in_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

PROGRAMS = {
    "trains plainly": """
with tidegate.attach(model, everything(path)) as session:
    gradients(model)
    moved = session.stats().moved

    def work():
        assert session.closed
        assert_same_gradients(plain, gradients(model))
        assert session.stats().moved == moved
        session.close()

    with session._engine._lock, session._engine._core.writes._lock:  # as a worker may hold them at that moment
        assert in_child(work) == 0
    assert session.spill_dirs and all(folder.is_dir() for folder in session.spill_dirs)
    assert_same_gradients(plain, gradients(model, session))
""",
    "attaches anew": """
def work():
    with tidegate.attach(model, everything(path)) as session:
        assert_same_gradients(plain, gradients(model, session))
        assert session.stats().moved > 0


with tidegate.attach(model, everything(path)) as session:
    gradients(model)
    assert in_child(work) == 0
    assert_same_gradients(plain, gradients(model, session))
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_forked_child(program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + PROGRAMS[program], str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
