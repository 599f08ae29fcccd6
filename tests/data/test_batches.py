"""Mini-batches: every sample once per pass, the same for (seed, device, round) however they are asked for."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.data import DeviceBatches, Normalisation, Samples, augment, evaluation_batches, iid
from adaptsfl.data.augment import crop_and_flip, draw_shifts
from adaptsfl.errors import InvalidInput

NORMALISATION = Normalisation((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def numbered_images(count: int, size: int = 8) -> Samples:
    """Images that differ in every pixel, each labelled with its own number."""
    pixels = torch.randint(
        0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(5)
    )
    return Samples(pixels, torch.arange(count))


def make(count: int = 103, devices: int = 5, batch_size: int = 4, **options) -> DeviceBatches:
    parts = iid(count, devices, np.random.default_rng(0))
    return DeviceBatches(numbered_images(count), parts, batch_size, **options)


@given(count=st.integers(12, 80), devices=st.integers(1, 4), batch_size=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_pass_uses_every_sample_once_and_only_the_devices_own(count, devices, batch_size, seed) -> None:
    parts = iid(count, devices, np.random.default_rng(seed))
    batches = DeviceBatches(numbered_images(count), parts, batch_size, seed=seed)
    for device, part in enumerate(parts):
        rounds = batches.rounds_per_epoch(device)
        for start in (0, 3 * rounds):
            used = torch.cat([batches.indices(start + k, [device])[0] for k in range(rounds)]).tolist()
            assert len(set(used)) == len(used) == rounds * batch_size > len(part) - batch_size
            assert set(used) <= set(part.tolist())


def test_passes_are_shuffled_differently_by_pass_device_and_seed() -> None:
    batches = make(count=100, devices=1, batch_size=100)
    first, second = batches.indices(0), batches.indices(1)
    assert not torch.equal(first, second)
    assert not torch.equal(first, make(count=100, devices=1, batch_size=100, seed=1).indices(0))
    same_part = (np.arange(50), np.arange(50))
    two = DeviceBatches(numbered_images(50), same_part, 50).indices(0)
    assert not torch.equal(two[0], two[1])


def test_any_round_can_be_had_without_those_before_it() -> None:
    going_through = make(augmentation="crop-flip", normalisation=NORMALISATION, seed=3)
    rounds = [going_through.at(k) for k in range(30)]
    for k in (29, 7, 0, 12):
        fresh = make(augmentation="crop-flip", normalisation=NORMALISATION, seed=3).at(k)
        again = going_through.at(k)
        for batch in (fresh, again):
            assert torch.equal(batch.inputs, rounds[k].inputs)
            assert torch.equal(batch.labels, rounds[k].labels)
            assert torch.equal(batch.indices, rounds[k].indices)


def test_chunks_of_devices_are_the_whole_taken_apart() -> None:
    batches = make(augmentation="crop-flip", normalisation=NORMALISATION)
    whole, chunk = batches.at(9), batches.at(9, [3, 1])
    apart = whole.inputs.unflatten(0, (5, 4))
    assert torch.equal(chunk.inputs, torch.cat([apart[3], apart[1]]))
    assert torch.equal(chunk.indices, whole.indices[[3, 1]])


def test_a_device_alone_with_its_samples_gets_the_same_batches() -> None:
    images, parts = numbered_images(60), iid(60, 3, np.random.default_rng(0))
    options = {"seed": 4, "augmentation": "crop-flip", "normalisation": NORMALISATION}
    everyone = DeviceBatches(images, parts, 4, **options)
    mine = Samples(images.inputs[parts[2]], images.labels[parts[2]])
    alone = DeviceBatches(mine, (np.arange(len(mine)),), 4, streams=[2], **options)
    for round_ in range(12):
        assert torch.equal(alone.at(round_).inputs, everyone.at(round_, [2]).inputs)
        assert torch.equal(alone.at(round_).labels, everyone.at(round_, [2]).labels)


def test_a_batch_is_the_normalised_samples_and_their_labels() -> None:
    batches, images = make(normalisation=NORMALISATION), numbered_images(103)
    batch = batches.at(2)
    flat = batch.indices.flatten()
    assert torch.equal(batch.labels, flat)
    assert torch.equal(batch.inputs, NORMALISATION(images.inputs[flat]))
    assert torch.equal(make().at(2).inputs, images.inputs[flat])  # no normalisation: as they are


def test_devices_of_different_sizes_keep_their_own_passes() -> None:
    batches = DeviceBatches(numbered_images(12), (np.arange(4), np.arange(4, 12)), 4)
    small, large = zip(*(batches.indices(k) for k in range(2)), strict=True)
    assert set(small[0].tolist()) == set(small[1].tolist()) == set(range(4))
    assert set(torch.cat(large).tolist()) == set(range(4, 12))


def plain_crop_and_flip(image: torch.Tensor, down: int, right: int, mirrored: int) -> torch.Tensor:
    """One image, pixel by pixel: what the vectorised version must equal."""
    height, width = image.shape[1:]
    result = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y, x = row + down - 4, (width - 1 - column if mirrored else column) + right - 4
            if 0 <= y < height and 0 <= x < width:
                result[:, row, column] = image[:, y, x]
    return result


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_augmentation_equals_pixel_by_pixel(dtype) -> None:
    images = numbered_images(20).inputs[:, :, :6].to(dtype)  # not square
    shifts = draw_shifts(20, torch.Generator().manual_seed(1))
    expected = [plain_crop_and_flip(image, *row) for image, row in zip(images, shifts.tolist(), strict=True)]
    result = crop_and_flip(images, shifts)
    assert result.dtype == dtype
    assert torch.equal(result, torch.stack(expected))


def test_shifts_are_uniform_and_reproducible() -> None:
    shifts = draw_shifts(9000, torch.Generator().manual_seed(0))
    for column, kinds in ((0, 9), (1, 9), (2, 2)):
        counts = torch.bincount(shifts[:, column], minlength=kinds)
        assert len(counts) == kinds
        assert (counts - 9000 / kinds).abs().max() < 5 * (9000 / kinds) ** 0.5
    images = numbered_images(50).inputs
    first, again, other = (augment(images, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_augmentation_changes_images_and_differs_between_passes() -> None:
    plain, varied = (make(count=40, devices=1, batch_size=40, augmentation=kind) for kind in ("none", "crop-flip"))
    assert torch.equal(plain.indices(0), varied.indices(0))  # the order does not depend on it
    assert not torch.equal(plain.at(0).inputs, varied.at(0).inputs)
    by_sample = [varied.at(k).inputs[varied.indices(k)[0].argsort()] for k in range(2)]
    assert not torch.equal(*by_sample)


def test_what_cannot_be_trained_on_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"leaves device 3 with only 20, but a mini-batch takes 21"):
        make(batch_size=21)
    with pytest.raises(InvalidInput, match=r"training.batch_size: is 0"):
        make(batch_size=0)
    with pytest.raises(InvalidInput, match=r"data.seed: is -1"):
        make(seed=-1)
    vectors = Samples(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InvalidInput, match=r"data.augmentation: is 'crop-flip', but a sample has the shape \(3,\)"):
        DeviceBatches(vectors, (np.arange(4),), 2, augmentation="crop-flip")


def test_evaluation_sees_every_sample_once_in_order() -> None:
    images = numbered_images(25)
    seen = list(evaluation_batches(images, NORMALISATION, batch_size=10))
    assert [len(labels) for _, labels in seen] == [10, 10, 5]
    assert torch.equal(torch.cat([labels for _, labels in seen]), images.labels)
    assert torch.equal(torch.cat([inputs for inputs, _ in seen]), NORMALISATION(images.inputs))
