"""Operations of `tf.image` on bounding boxes: drawing, sampling, and suppression of those that overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, SupportsInt, TypeAlias

import jax
import numpy as np

from replicax.tf import _draws, _host
from replicax.tf._host import jnp
from replicax.tf._images.checks import image_of, require
from replicax.tf._operations import operations
from replicax.tf._ops import as_int, convert_to_tensor, known
from replicax.tf._types import DTypeLike, ShapeLike, TensorLike

# The colors of boxes that are given none: yellow, blue, red, lime, purple, olive, maroon, navy, aqua, fuchsia.
_COLORS = [[1, 1, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 1], [0.5, 0, 0.5, 1], [0.5, 0.5, 0, 1], [0.5, 0, 0, 1],
           [0, 0, 0.5, 1], [0, 1, 1, 1], [1, 0, 1, 1]]  # fmt: skip


def draw_bounding_boxes(
    images: TensorLike, boxes: TensorLike, colors: TensorLike | None, name: str | None = None
) -> jax.Array:
    """Draws the edges of boxes into images.

    Args:
        images: `[batch, height, width, channels]` of floats.
        boxes: `[batch, boxes, 4]`, the top, left, bottom and right of each, from 0 to 1.
        colors: `[colors, channels]`, which the boxes get in turn.
        name: accepted for compatibility.
    """
    found, edges = image_of(images, (4,)), convert_to_tensor(boxes)
    _, height, width, channels = found.shape
    require(edges.ndim == 3 and edges.shape[2] == 4, f"boxes must be [batch, boxes, 4], got {tuple(edges.shape)}.")
    table = np.asarray(_COLORS, np.float32)[:, :channels] if colors is None else convert_to_tensor(colors)
    if colors is None and channels == 1:
        table = np.ones((1, 1), np.float32)
    scale = np.asarray([height - 1, width - 1, height - 1, width - 1], np.float32)
    places = (edges * scale).astype(np.int32)
    row, column = np.arange(height)[None, :, None], np.arange(width)[None, None, :]
    for number in range(edges.shape[1]):
        top, left, bottom, right = (places[:, number, i][:, None, None] for i in range(4))
        inside = (row >= top) & (row <= bottom) & (column >= left) & (column <= right)
        edge = inside & ((row == top) | (row == bottom) | (column == left) | (column == right))
        color = table[number % table.shape[0]].astype(found.dtype)
        found = jnp.where(edge[..., None], color, found)
    return found


# Suppression


# The numbers of the boxes that are kept, padded with 0, their scores, and how many they are.
_Kept: TypeAlias = "tuple[jax.Array, jax.Array, jax.Array]"


def _suppressed(
    overlaps: Callable[[jax.Array], jax.Array],
    scores: jax.Array,
    most: int,
    iou_threshold: jax.Array,
    score_threshold: jax.Array,
    sigma: jax.Array,
) -> _Kept:
    """Returns the numbers of the boxes that are kept, the best first and padded with 0, their scores, and their number.

    Args:
        overlaps: called with the number of a box; returns its overlap with each.
        scores: those of the boxes.
        most: how many may be kept.
        iou_threshold: boxes that overlap a better one by more are dropped.
        score_threshold: those with at most this score are dropped.
        sigma: of the bell by which scores of boxes that overlap become less; 0 for none.
    """

    def step(at: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left, kept, values, count = state
        best = jax.numpy.argmax(left)
        score = left[best]
        taken = score > score_threshold
        shared = overlaps(best)
        less = jax.numpy.where(sigma > 0, jax.numpy.exp(-0.5 * shared**2 / jax.numpy.where(sigma > 0, sigma, 1)), 1.0)
        less = jax.numpy.where((shared > iou_threshold) & (sigma <= 0), 0.0, less)
        after = jax.numpy.where(less > 0, left * less, -jax.numpy.inf).at[best].set(-jax.numpy.inf)
        kept = kept.at[at].set(jax.numpy.where(taken, best, 0).astype(np.int32))
        values = values.at[at].set(jax.numpy.where(taken, score, 0.0))
        return jax.numpy.where(taken, after, left), kept, values, count + taken.astype(np.int32)

    kept, values = jax.numpy.zeros(most, np.int32), jax.numpy.zeros(most, np.float32)
    count = jax.numpy.zeros((), np.int32)
    if scores.shape[0]:
        begin = scores.astype(np.float32), kept, values, count
        _, kept, values, count = jax.lax.fori_loop(0, most, step, begin)
    return kept, values, count


def _of_boxes(boxes: jax.Array, scores: jax.Array, most: int, *limits: jax.Array) -> _Kept:
    low, high = jax.numpy.minimum(boxes[:, :2], boxes[:, 2:]), jax.numpy.maximum(boxes[:, :2], boxes[:, 2:])
    (top, left), (bottom, right), area = low.T, high.T, jax.numpy.prod(high - low, 1)

    def overlaps(one: jax.Array) -> jax.Array:
        down = jax.numpy.maximum(jax.numpy.minimum(bottom, bottom[one]) - jax.numpy.maximum(top, top[one]), 0)
        across = jax.numpy.maximum(jax.numpy.minimum(right, right[one]) - jax.numpy.maximum(left, left[one]), 0)
        common = down * across
        empty = (area <= 0) | (area[one] <= 0)
        union = jax.numpy.where(empty, 1, area + area[one] - common)
        return jax.numpy.where(empty, 0, common / union)

    return _suppressed(overlaps, scores, most, *limits)


def _of_overlaps(table: jax.Array, scores: jax.Array, most: int, *limits: jax.Array) -> _Kept:
    return _suppressed(lambda one: table[one], scores, most, *limits)


_PROGRAMS: dict[Callable[..., _Kept], Callable[..., _Kept]] = {
    compute: jax.jit(compute, static_argnums=2) for compute in (_of_boxes, _of_overlaps)
}


def _kept(
    compute: Callable[..., _Kept], boxes: TensorLike, scores: TensorLike, most: TensorLike, *limits: TensorLike
) -> _Kept:
    of_boxes, values = convert_to_tensor(boxes), convert_to_tensor(scores)
    count = as_int(most, "max_output_size")
    require(of_boxes.ndim == 2, f"boxes must have shape [boxes, 4], got {tuple(of_boxes.shape)}.")
    require(values.shape == of_boxes.shape[:1], f"scores has incompatible shape {tuple(values.shape)}.")
    numbers = [np.float32(x) if isinstance(x, (int, float)) else convert_to_tensor(x) for x in limits]
    program = _host.on_jax(lambda *arrays: _PROGRAMS[compute](*arrays[:2], count, *arrays[2:]))
    return program(of_boxes, values, *numbers)


def _cut(found: _Kept) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers and the scores of the boxes that are kept, without padding."""
    end = int(known(found[2], "The number of boxes", "In compiled code, use tf.image.non_max_suppression_padded."))
    return found[0][:end], found[1][:end]


def non_max_suppression(
    boxes: TensorLike,
    scores: TensorLike,
    max_output_size: TensorLike,
    iou_threshold: float = 0.5,
    score_threshold: float = -math.inf,
    name: str | None = None,
) -> jax.Array:
    """Returns the numbers of the boxes with the best scores that do not overlap better ones; int32.

    Args:
        boxes: `[boxes, 4]`, two opposite corners of each.
        scores: `[boxes]`.
        max_output_size: how many boxes are returned at most.
        iou_threshold: two boxes overlap if their common part is more than this of their union.
        score_threshold: boxes with at most this score are left out.
        name: accepted for compatibility.
    """
    return _cut(_kept(_of_boxes, boxes, scores, max_output_size, iou_threshold, score_threshold, 0.0))[0]


def non_max_suppression_with_scores(
    boxes: TensorLike,
    scores: TensorLike,
    max_output_size: TensorLike,
    iou_threshold: float = 0.5,
    score_threshold: float = -math.inf,
    soft_nms_sigma: float = 0.0,
    name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns what `non_max_suppression` does and the scores.

    With `soft_nms_sigma`, boxes that overlap better ones are not left out, but their scores become less.
    """
    return _cut(_kept(_of_boxes, boxes, scores, max_output_size, iou_threshold, score_threshold, soft_nms_sigma))


def non_max_suppression_overlaps(
    overlaps: TensorLike,
    scores: TensorLike,
    max_output_size: TensorLike,
    overlap_threshold: float = 0.5,
    score_threshold: float = -math.inf,
    name: str | None = None,
) -> jax.Array:
    """Returns what `non_max_suppression` does, from a table `[boxes, boxes]` of overlaps."""
    return _cut(_kept(_of_overlaps, overlaps, scores, max_output_size, overlap_threshold, score_threshold, 0.0))[0]


def non_max_suppression_padded(
    boxes: TensorLike,
    scores: TensorLike,
    max_output_size: TensorLike,
    iou_threshold: float = 0.5,
    score_threshold: float = -math.inf,
    pad_to_max_output_size: bool = False,
    name: str | None = None,
    sorted_input: bool = False,
    canonicalized_coordinates: bool = False,
    tile_size: int = 512,
) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of the boxes that are kept, padded with 0, and how many there are.

    Args:
        boxes: `[boxes, 4]`, or `[..., boxes, 4]` with `pad_to_max_output_size`.
        scores: `[boxes]`, or `[..., boxes]`.
        max_output_size: how many boxes are returned at most.
        iou_threshold: two boxes overlap if their common part is more than this of their union.
        score_threshold: boxes with at most this score are left out.
        pad_to_max_output_size: whether `max_output_size` numbers are returned, which works in compiled code.
        name: accepted for compatibility.
        sorted_input: accepted for compatibility.
        canonicalized_coordinates: accepted for compatibility.
        tile_size: accepted for compatibility.
    """
    limits = max_output_size, iou_threshold, score_threshold, 0.0
    of_boxes, values = convert_to_tensor(boxes), convert_to_tensor(scores)
    if of_boxes.ndim > 2:
        require(pad_to_max_output_size, "Batches of boxes need pad_to_max_output_size=True.")
        front, most = of_boxes.shape[:-2], as_int(max_output_size, "max_output_size")
        batch = math.prod(front)
        flat = of_boxes.reshape(batch, *of_boxes.shape[-2:]), values.reshape(batch, values.shape[-1])
        images = [_kept(_of_boxes, *image, *limits)[::2] for image in zip(*flat)]
        numbers, counts = _stack_images(images, [((most,), np.int32), ((), np.int32)])
        return numbers.reshape(*front, most), counts.reshape(front)
    found = _kept(_of_boxes, of_boxes, values, *limits)
    return (found[0] if pad_to_max_output_size else _cut(found)[0]), found[2]


def _stack_images(
    images: Sequence[tuple[jax.Array, ...]], kinds: Sequence[tuple[tuple[int, ...], DTypeLike]]
) -> list[jax.Array]:
    """Stack the results of all images.

    Args:
        images: the results of each image.
        kinds: shape and dtype of each result of one image, for a batch without images.
    """
    if not images:
        return [jnp.zeros((0, *shape), dtype) for shape, dtype in kinds]
    return [jnp.stack(results) for results in zip(*images)]


class CombinedNonMaxSuppression(NamedTuple):
    """The boxes that are kept of each image, padded with zeros, their scores and classes, and how many there are."""

    nmsed_boxes: jax.Array
    nmsed_scores: jax.Array
    nmsed_classes: jax.Array
    valid_detections: jax.Array


def combined_non_max_suppression(
    boxes: TensorLike,
    scores: TensorLike,
    max_output_size_per_class: TensorLike,
    max_total_size: TensorLike,
    iou_threshold: float = 0.5,
    score_threshold: float = -math.inf,
    pad_per_class: bool = False,
    clip_boxes: bool = True,
    name: str | None = None,
) -> CombinedNonMaxSuppression:
    """Returns the best boxes of several classes that do not overlap better ones of their class.

    Args:
        boxes: `[batch, boxes, classes or 1, 4]`.
        scores: `[batch, boxes, classes]`.
        max_output_size_per_class: how many boxes of a class there are at most.
        max_total_size: how many boxes of an image there are at most.
        iou_threshold: two boxes overlap if their common part is more than this of their union.
        score_threshold: boxes with at most this score are left out.
        pad_per_class: whether the results have the size of all classes together, if that is less.
        clip_boxes: whether edges are clipped to 0 and 1.
        name: accepted for compatibility.
    """
    of_boxes, values = convert_to_tensor(boxes), convert_to_tensor(scores)
    require(of_boxes.ndim == 4 and values.ndim == 3, "boxes must be [batch, boxes, classes, 4], scores without the 4.")
    per_class, total = (as_int(n, "The size") for n in (max_output_size_per_class, max_total_size))
    per_class, classes = min(per_class, of_boxes.shape[1]), values.shape[2]
    size = min(total, per_class * classes) if pad_per_class else total
    images = []
    for image in range(of_boxes.shape[0]):
        rows = []
        for kind in range(classes):
            own = of_boxes[image, :, kind if of_boxes.shape[2] > 1 else 0]
            kept, best, count = _kept(
                _of_boxes, own, values[image, :, kind], per_class, iou_threshold, score_threshold, 0.0
            )
            there = np.arange(per_class) < count
            rows.append((own[kept], jnp.where(there, best, -np.inf), np.full(per_class, kind, np.float32), there))
        images.append(_best([jnp.concatenate(part) for part in zip(*rows)], size, clip_boxes))
    kinds: list[tuple[tuple[int, ...], DTypeLike]]
    kinds = [((size, 4), of_boxes.dtype), ((size,), np.float32), ((size,), np.float32), ((), np.int32)]
    return CombinedNonMaxSuppression(*_stack_images(images, kinds))


def _best(rows: list[jax.Array], size: int, clip: bool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns so many boxes with the best scores, padded with zeros, of boxes, scores, classes, and which are there."""
    order = jnp.argsort(-rows[1])[:size]
    missing = size - order.shape[0]
    boxes, scores, kinds, there = (part[order] for part in rows)
    boxes = jnp.clip(boxes, 0, 1) if clip else boxes
    count = jnp.sum(there).astype(np.int32)
    parts = (jnp.where(there.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in (boxes, scores, kinds))
    padded = [jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in parts]
    return padded[0], padded[1], padded[2], count


# Sampling


class SampledBox(NamedTuple):
    """A window of an image: where it begins and its size, for `tf.slice`, and the same as a box from 0 to 1."""

    begin: jax.Array
    size: jax.Array
    bboxes: jax.Array


def _sampled(
    draw: _draws.Draw,
    image_size: ShapeLike,
    bounding_boxes: TensorLike,
    least_covered: TensorLike,
    aspect_ratio_range: Sequence[float] | None,
    area_range: Sequence[float] | None,
    max_attempts: int | None,
    use_image: bool | None,
) -> SampledBox:
    """Samples all attempts at once, and takes the first that is fine; the whole image if none is."""
    shape, boxes = convert_to_tensor(image_size), convert_to_tensor(bounding_boxes)
    ratios, areas = aspect_ratio_range or (0.75, 1.33), area_range or (0.05, 1.0)
    require(
        boxes.ndim == 3 and boxes.shape[-1] == 4, f"bounding_boxes must be [1, boxes, 4], got {tuple(boxes.shape)}."
    )
    require(0 < ratios[0] <= ratios[1], f"aspect_ratio_range must be positive and in order, got {ratios}.")
    require(0 < areas[0] <= areas[1] <= 1, f"area_range must be in order and in (0, 1], got {areas}.")
    require(
        boxes.size or use_image,
        "No bounding boxes provided as input. One must enable use_image_if_no_bounding_boxes if you wish to not "
        "provide any bounding boxes.",
    )
    attempts = 100 if max_attempts is None else int(max_attempts)
    chance = _draws.uniform(draw, (4, attempts), 0.0, 1.0, np.float32)
    rows, columns = (shape[i].astype(np.float32) for i in range(2))
    height, width, fits = _sizes(chance, rows, columns, ratios, areas)
    top = jnp.floor(chance[2] * jnp.maximum(rows - height, 1))
    left = jnp.floor(chance[3] * jnp.maximum(columns - width, 1))
    objects = boxes.reshape(-1, 4) * jnp.stack([rows, columns, rows, columns])
    if not boxes.size:
        objects = jnp.stack([0 * rows, 0 * rows, rows, columns])[None]
    fine = fits & _covers(objects, top, left, height, width, least_covered)
    first, any_ = jnp.argmax(fine), jnp.any(fine)
    window = [jnp.where(any_, part[first], otherwise) for part, otherwise in
              ((top, 0 * rows), (left, 0 * rows), (height, rows), (width, columns))]  # fmt: skip
    box = jnp.stack([window[0] / rows, window[1] / columns, (window[0] + window[2]) / rows,
                     (window[1] + window[3]) / columns])  # fmt: skip
    begin = jnp.stack([window[0], window[1], 0 * rows]).astype(shape.dtype)
    size = jnp.stack([window[2], window[3], 0 * rows - 1]).astype(shape.dtype)
    return SampledBox(begin, size, box.astype(np.float32)[None, None])


def _sizes(
    chance: jax.Array, rows: jax.Array, columns: jax.Array, ratios: Sequence[float], areas: Sequence[float]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the heights and widths of attempts, and which of them have an area that is allowed."""
    ratio = np.float32(ratios[0]) + chance[0] * np.float32(ratios[1] - ratios[0])
    least, most = (np.float32(part) * rows * columns for part in areas)
    low, high = jnp.rint(jnp.sqrt(least / ratio)), jnp.rint(jnp.sqrt(most / ratio))
    widest = jnp.floor((columns + np.float32(0.5 - 1e-7)) / ratio)
    widest = jnp.where(jnp.rint(widest * ratio) > columns, widest - 1, widest)
    high = jnp.minimum(jnp.where(jnp.rint(high * ratio) > columns, widest, high), rows)
    low = jnp.minimum(low, high)
    height = low + jnp.floor(chance[1] * (high - low + 1))
    height = jnp.where(jnp.rint(height * ratio) * height < least, height + 1, height)
    height = jnp.where(jnp.rint(height * ratio) * height > most, height - 1, height)
    width = jnp.rint(height * ratio)
    area = height * width
    return height, width, (area >= least) & (area <= most) & (height <= rows) & (width <= columns) & (area > 0)


def _covers(
    objects: jax.Array, top: jax.Array, left: jax.Array, height: jax.Array, width: jax.Array, least: TensorLike
) -> jax.Array:
    """Returns which windows have this part of an object in them."""
    down = jnp.minimum(objects[:, 2, None], top + height) - jnp.maximum(objects[:, 0, None], top)
    across = jnp.minimum(objects[:, 3, None], left + width) - jnp.maximum(objects[:, 1, None], left)
    common = jnp.maximum(down, 0) * jnp.maximum(across, 0)
    area = (objects[:, 2] - objects[:, 0]) * (objects[:, 3] - objects[:, 1])
    return jnp.any((common >= area[:, None] * convert_to_tensor(least)) & (area > 0)[:, None], 0)


def sample_distorted_bounding_box(
    image_size: ShapeLike,
    bounding_boxes: TensorLike,
    seed: SupportsInt = 0,
    min_object_covered: TensorLike = 0.1,
    aspect_ratio_range: Sequence[float] | None = None,
    area_range: Sequence[float] | None = None,
    max_attempts: int | None = None,
    use_image_if_no_bounding_boxes: bool | None = None,
    name: str | None = None,
) -> SampledBox:
    """Samples a window of an image that has a part of one of its objects in it.

    Args:
        image_size: the shape of the image, `[height, width, channels]`.
        bounding_boxes: `[1, boxes, 4]`, the top, left, bottom and right of objects, from 0 to 1.
        seed: of the random numbers; 0 for none.
        min_object_covered: how much of an object must be in the window.
        aspect_ratio_range: between which the ratio of width to height is; (0.75, 1.33) by default.
        area_range: between which the part of the image is; (0.05, 1) by default.
        max_attempts: how many windows are tried; 100 by default. If none is fine, it is the whole image.
        use_image_if_no_bounding_boxes: whether the image is the object if there are no boxes.
        name: accepted for compatibility.

    Returns:
        the beginning and the size for `tf.slice`, and the box as `[1, 1, 4]`.
    """
    return _sampled(
        _draws.of_op("uniform", np.dtype(np.float32), seed if seed else None), image_size, bounding_boxes,
        min_object_covered, aspect_ratio_range, area_range, max_attempts, use_image_if_no_bounding_boxes,
    )  # fmt: skip


def stateless_sample_distorted_bounding_box(
    image_size: ShapeLike,
    bounding_boxes: TensorLike,
    seed: TensorLike,
    min_object_covered: TensorLike = 0.1,
    aspect_ratio_range: Sequence[float] | None = None,
    area_range: Sequence[float] | None = None,
    max_attempts: int | None = None,
    use_image_if_no_bounding_boxes: bool | None = None,
    name: str | None = None,
) -> SampledBox:
    """Does what `sample_distorted_bounding_box` does, depending on `seed` (two integers) alone."""
    return _sampled(
        _draws.of_seed(seed), image_size, bounding_boxes, min_object_covered, aspect_ratio_range,
        area_range, max_attempts, use_image_if_no_bounding_boxes,
    )  # fmt: skip


BOXES = """combined_non_max_suppression draw_bounding_boxes non_max_suppression non_max_suppression_overlaps
non_max_suppression_padded non_max_suppression_with_scores sample_distorted_bounding_box
stateless_sample_distorted_bounding_box"""

operations(globals())
