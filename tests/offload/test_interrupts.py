"""Ctrl-C at any moment: it arrives, and the session goes on, by the plain run's bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STORM = """
import faulthandler, json, os, random, signal, sys, threading, time, warnings
from pathlib import Path
import torch, tidegate
from torch import nn
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients

faulthandler.dump_traceback_later(100, exit=True)  # a hang is a failure
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has switched it off
torch.set_num_threads(1)
tiers, seed, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
random.seed(seed)
lost = []
sys.unraisablehook = lambda unraisable: lost.append(repr(unraisable))
plain = gradients(blocks())
model = blocks()
session = tidegate.attach(model, everything(path, tiers=tiers)) if tiers != "plain" else None
sent = arrived = steps = 0
main = threading.main_thread().ident


def send():
    signal.pthread_kill(main, signal.SIGINT)


ends = time.monotonic() + 8
while time.monotonic() < ends:
    timer = threading.Timer(random.uniform(0.001, 0.03), send)
    try:
        timer.start()
        sent += 1
        until = time.monotonic() + 1
        while time.monotonic() < until:
            found = gradients(model)
            assert_same_gradients(plain, found)
            steps += 1
    except KeyboardInterrupt:
        arrived += 1
    timer.join()
moved = 0
if session is not None:
    assert_same_gradients(plain, gradients(model))
    moved = session.stats().moved
    assert session.stats().resident == 0, session.stats()
    session.close()
faulthandler.cancel_dump_traceback_later()
print(json.dumps({"sent": sent, "arrived": arrived, "steps": steps, "moved": moved, "lost": lost[:3]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("tiers", ["disk", "host"])
def test_every_interrupt_arrives_and_training_goes_on(tiers: str, seed: int, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", STORM, tiers, str(seed), str(spill)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["sent"] > 50
    # Weak references of torch and of Python's executors end in Python code that is not ours.
    assert seen["arrived"] >= 0.97 * seen["sent"] - 1, seen["lost"]
    assert seen["moved"] > 0
    assert list(spill.iterdir()) == []
