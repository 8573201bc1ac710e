"""Memory that a training step frees is kept for the next one.

glibc gives large blocks back to the system, which clears every page when it hands it out again: on a CPU that is up to
a tenth of a small model's step.  The results are the same to the bit.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
SIZES = (2**25, 2**30)  # what every glibc takes, and what is better


def keep_freed_memory() -> bool:
    """Tell glibc so; False where there is another allocator, or the user has settings of their own."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc; TypeError: Windows
        return False
    kept = [mallopt(option, size) for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD) for size in SIZES]
    return all(kept[::2])
