import warnings
from collections.abc import Iterator

import pytest

import ortho_vit  # noqa: F401  (before anything imports torchvision)

CHATTER = [
    r".*LeafSpec.*deprecated.*",  # Lightning walks batches with a function that torch renamed
    r".*does not have many workers.*",
    r".*smaller than the logging interval.*",
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in CHATTER:
            warnings.filterwarnings("ignore", message=message)
        yield
