"""A training step gets its memory from the one before."""

import ortho_vit  # noqa: F401  (before anything imports torchvision)

# isort: split
import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from ortho_vit.models import create_model
from ortho_vit.training.memory import keep_freed_memory

kept = keep_freed_memory() if "keep" in sys.argv else None
model = create_model("ortho_vit_nano", constraint="none", num_classes=10)
images = torch.zeros(128, 3, 32, 32)

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        model(images).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(3)
print(kept, faults(3))
"""


def run(*arguments: str, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_kept():
    (_, otherwise), (kept, faults) = run(), run("keep")
    assert kept == "True"
    assert int(faults) < int(otherwise) / 2


def test_settings_of_the_user_stay():
    assert run("keep", MALLOC_ARENA_MAX="2")[0] == "False"
