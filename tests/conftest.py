"""Every test starts from the same random state, and warnings that are not ours are left alone."""

import os
import signal
import warnings
from collections.abc import Iterator

import pytest
import torch

import ortho_vit  # noqa: F401

torch.set_num_threads(1)  # the matrices are small, and two workers share two cores
# A shell that starts the tests in the background lets them ignore Ctrl-C, which some of them send
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # about Lightning's calls
CHATTER = [
    r".*LeafSpec.*deprecated.*",  # Lightning walks batches with a function that torch renamed
    r".*does not have many workers.*",
    r".*smaller than the logging interval.*",
]


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in CHATTER:
            warnings.filterwarnings("ignore", message=message)
        yield
