"""Small copies of the official CIFAR files, in each of their layouts, and a pickle that would run code."""

import io
import os
import pickle
import tarfile

import numpy as np

from ortho_vit.data import CIFAR10

PER_FILE = 8


def contents(dataset, layout, per_file=PER_FILE):
    """Every file of a small official layout: the same images in each."""
    rng = np.random.default_rng(0)
    files = {}
    for name in layout.train + layout.test:
        pixels = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        labels = rng.integers(0, len(dataset.classes), per_file)
        coarse = rng.integers(0, 20, per_file)
        if name.endswith(".bin"):
            columns = [labels] if dataset is CIFAR10 else [coarse, labels]
            files[name] = np.column_stack([*columns, pixels]).astype(np.uint8).tobytes()
        else:
            fine = "labels" if dataset is CIFAR10 else "fine_labels"
            batch = {"data": pixels, fine: labels.tolist(), "coarse_labels": coarse.tolist()}
            files[name] = pickle.dumps({key.encode(): value for key, value in batch.items()}, protocol=2)
    return files


def pack(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def place(root, dataset, form, per_file=PER_FILE):
    """Put a small data set below root in one of the forms it may have, and return the path that has it."""
    kind, where = form.split()
    layout = dataset.layouts[["binary", "python"].index(kind)]
    files = contents(dataset, layout, per_file)
    root.mkdir(exist_ok=True)
    if where == "archive":
        path = root / layout.archive
        pack(path, {f"{layout.folder}/{name}": content for name, content in files.items()})
        return path
    path = root / layout.folder if where == "folder" else root
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
