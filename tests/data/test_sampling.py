import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from ortho_vit.data import Digits
from ortho_vit.data.sampling import Batch, BatchSet, EpochSampler, Key, Loader, _unchanged
from tests.helpers.dispatch import OTHER, other_device


def batches(loader):
    return [(images.clone(), labels.clone()) for images, labels in loader]


def equal(left, right):
    return len(left) == len(right) and all(
        torch.equal(a, b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def train_loader(epoch=0, **kwargs):
    data = Digits(**{"batch_size": 100, "limit": 450, "seed": 3, **kwargs})
    data.setup("fit")
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return loader


def samples(size, **kwargs):
    return [key.samples for key in EpochSampler(size, **kwargs)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "batch_size"), [(10, 3), (9, 3), (1, 3), (3, 100)])
def test_an_epoch_has_every_sample_once_in_as_many_batches_as_it_says(size, batch_size, shuffle):
    found = samples(size, batch_size=batch_size, shuffle=shuffle)
    assert sorted(np.concatenate(found).tolist()) == list(range(size))
    assert len(found) == len(EpochSampler(size, batch_size=batch_size, shuffle=shuffle))
    assert all(len(batch) == batch_size for batch in found[:-1])


@pytest.mark.parametrize(("size", "world_size"), [(100, 2), (101, 2), (103, 4), (5, 4), (4, 4)])
def test_ranks_train_on_disjoint_shares_of_equal_size(size, world_size):
    shares = [
        samples(size, batch_size=8, shuffle=True, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert len({tuple(len(batch) for batch in share) for share in shares}) == 1
    used = np.concatenate([np.concatenate(share) for share in shares])
    assert len(set(used.tolist())) == len(used) == size - size % world_size


@pytest.mark.parametrize(("size", "world_size"), [(100, 2), (101, 2), (17, 2), (33, 4), (5, 4), (4, 4)])
def test_ranks_evaluate_every_sample_once_in_equally_many_batches(size, world_size):
    kwargs = {"batch_size": 8, "shuffle": False, "world_size": world_size}
    shares = [samples(size, rank=rank, **kwargs) for rank in range(world_size)]
    assert {len(share) for share in shares} == {len(EpochSampler(size, **kwargs))}
    assert all(0 < len(batch) <= 8 for share in shares for batch in share)
    assert sorted(np.concatenate([np.concatenate(share) for share in shares]).tolist()) == list(range(size))


def test_ranks_together_see_the_batches_of_one_process_with_a_larger_batch():
    alone = samples(96, batch_size=16, shuffle=True, seed=1)
    shares = [samples(96, batch_size=8, shuffle=True, seed=1, rank=rank, world_size=2) for rank in range(2)]
    for batch, *parts in zip(alone, *shares, strict=True):
        assert set(batch) == set(np.concatenate(parts))


def test_more_ranks_than_images_are_refused():
    with pytest.raises(ValueError, match="3 images cannot be shared by 4 processes"):
        EpochSampler(3, batch_size=1, shuffle=True, world_size=4)


def test_the_order_follows_seed_and_epoch():
    assert equal(batches(train_loader(2)), batches(train_loader(2)))
    assert not equal(batches(train_loader(2)), batches(train_loader(1)))
    assert not equal(batches(train_loader(2)), batches(train_loader(2, seed=4)))


def test_workers_make_the_batches_that_no_workers_make():
    without, with_two = train_loader(1), train_loader(1, num_workers=2)
    assert equal(batches(without), batches(with_two))
    for loader in (without, with_two):
        loader.sampler.set_epoch(2)
    assert equal(batches(without), batches(with_two))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_resumed_in_its_middle_has_the_rest_of_its_batches(num_workers):
    whole = batches(train_loader(4))
    loader = train_loader(4, num_workers=num_workers)
    loader._position = lambda: 3  # under a trainer, the batches it has finished
    assert len(loader) == len(whole)
    assert equal(batches(loader), whole[3:])


def test_batches_left_out_are_not_made():
    class Counting(BatchSet):
        made = 0

        def __getitem__(self, key):
            self.made += 1
            return Batch(torch.zeros(1), torch.zeros(1), key, [])

    dataset = Counting(np.zeros(100), augmentation=lambda images, labels, key: (images, labels))
    loader = Loader(dataset, EpochSampler(100, batch_size=10, shuffle=True), position=lambda: 7)
    assert len(list(loader)) == dataset.made == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_the_same_wherever_they_are_augmented(num_workers):
    """For the CPU in the workers; for another device in the main process, where the batch is."""
    data = Digits(batch_size=100, limit=450, augment="randaugment", random_erasing=0.5, mixup=0.5, cutmix=0.5)
    data.setup("fit")
    in_workers, here = (data._loader(data.train_set, train=True, num_workers=num_workers) for _ in range(2))
    here._in_workers = False
    here._loader.collate_fn = _unchanged
    assert equal(batches(in_workers), batches(here))
    labels = next(iter(here))[1]
    assert labels.shape == (100, 10)


RANDOM = {"augment": "randaugment", "random_erasing": 0.5, "mixup": 0.5, "cutmix": 0.5}


def batches_on_other_device(done=0, **kwargs):
    """The batches of an epoch, made on another device from number `done` on, with their values."""
    data = Digits(batch_size=100, limit=450, **RANDOM, **kwargs)
    data.setup("fit")
    data._device = lambda: OTHER
    data._batches_done = lambda: done
    with other_device():
        made = list(data.train_dataloader())
    assert all(tensor.device == OTHER for batch in made for tensor in batch)
    return data, [tuple(tensor.values for tensor in batch) for batch in made]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("device_resident", [False, True])
def test_batches_are_the_same_on_another_device_and_in_what_is_left_of_an_epoch(device_resident, num_workers):
    data = Digits(batch_size=100, limit=450, **RANDOM)
    data.setup("fit")
    expected = batches(data.train_dataloader())
    options = {"device_resident": device_resident, "num_workers": num_workers}
    data, whole = batches_on_other_device(**options)
    assert equal(whole, expected)
    assert data.train_set.images.device == (OTHER if device_resident else torch.device("cpu"))
    assert equal(batches_on_other_device(done=3, **options)[1], expected[3:])


def test_resident_images_are_moved_once_and_need_no_workers():
    data = Digits(batch_size=100, device_resident=True, num_workers=2)
    data.setup()
    data._device = lambda: OTHER
    loader = data.train_dataloader()
    assert data.train_set.images.device == OTHER
    assert data.val_set.images is data.train_set.images
    assert data.test_set.images.device == OTHER
    assert loader._loader.num_workers == 0


def test_only_memory_of_the_host_is_pinned(monkeypatch):
    """As torch has it: pinning a tensor of a GPU raises an error."""

    def pin(tensor):
        assert tensor.is_cpu
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    images, labels, key = torch.ones(2, 1, 4, 4), torch.arange(2), Key(0, np.arange(2))
    pinned = torch_pin_memory(Batch(images, labels, key, []))
    assert pinned.images is not images
    assert pinned.labels is not labels
    resident = torch_pin_memory(Batch(images.to(OTHER), labels, key, ["a failure"]))
    assert resident.images.device == OTHER
    assert resident.labels is not labels
    assert resident.failures == ["a failure"]


def test_resident_images_on_a_cpu_are_where_they_were_and_workers_augment_them():
    data = Digits(batch_size=100, device_resident=True, num_workers=2, augment="autoaugment")
    data.setup("fit")
    images = data.train_set.images
    assert data.train_dataloader()._loader.num_workers == 2
    assert data.train_set.images is images
    assert data.train_set.augmentation.policy._operations  # which the workers inherit


def test_nothing_is_decided_before_the_first_batch_is_asked_for():
    loader = train_loader(0)
    iterator = iter(loader)  # Lightning does this before it sets the epoch
    loader.sampler.set_epoch(5)
    assert equal([next(iterator)], batches(train_loader(5))[:1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_leaves_the_global_random_state_alone(num_workers):
    before = torch.get_rng_state()
    list(train_loader(num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("epoch", [0, 3])
def test_the_samples_of_a_batch_are_known_by_their_places_in_the_whole_set(epoch):
    loader = train_loader(epoch, crop=False)
    images, labels = Digits().read(train=True)
    for number, (found, targets) in enumerate(loader):
        rows = loader.samples(epoch, number)
        assert torch.equal(labels[rows], targets)
        torch.testing.assert_close(images[rows] / 255, found * Digits.std[0] + Digits.mean[0])
