"""Composed tensors against the same cuts and stacks of a dense array; views beside the catalog."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import boxes, chunkings, examples, shapes
from tests.test_reading import lazy, stored
from workbench.core import cache
from workbench.core.place import Place
from workbench.core.rebox import ComposedBox, Composition, compose


@examples(300)
@given(st.data())
def test_a_cut_with_permuted_dropped_and_new_axes_is_that_of_the_dense_array(tmp_path_factory, data):
    shape = data.draw(shapes(max_dims=4, min_side=1).filter(len))
    dense = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    folder = tmp_path_factory.mktemp("case")
    order = data.draw(st.none() | st.permutations(range(len(shape))))
    catalog = stored(folder, dense, data.draw(chunkings(shape)), order=order, big=data.draw(st.booleans()))
    low, size = data.draw(boxes(shape))
    keep = [axis for axis, n in enumerate(size) if n != 1 or data.draw(st.booleans())]
    axes = list(data.draw(st.permutations(keep)))
    if data.draw(st.booleans()) and len(axes) < 5:
        axes.insert(data.draw(st.integers(0, len(axes))), None)
    cut = dense[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))]
    cut = cut.transpose([a for a in axes if a is not None] + [a for a in range(len(shape)) if a not in axes])
    cut = cut.reshape(
        [cut.shape[sum(x is not None for x in axes[:k])] if a is not None else 1 for k, a in enumerate(axes)]
    )
    made = compose(catalog, [Composition("t", cut.shape, [ComposedBox(0, low, size, (0,) * cut.ndim, tuple(axes))])])
    made.check()
    assert (lazy(folder, made).numpy() == cut).all()


@examples(200)
@given(st.data())
def test_every_second_or_third_element_is_that_of_a_stepped_slice(tmp_path_factory, data):
    shape = data.draw(shapes(max_dims=3, max_side=9, min_side=1).filter(len))
    dense = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    folder = tmp_path_factory.mktemp("case")
    order = data.draw(st.none() | st.permutations(range(len(shape))))
    catalog = stored(folder, dense, data.draw(chunkings(shape)), order=order)
    low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    steps = tuple(data.draw(st.integers(1, 4)) for _ in shape)
    cut = dense[tuple(slice(a, None, step) for a, step in zip(low, steps, strict=True))]
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    want = cut.transpose(axes)
    made = compose(
        catalog, [Composition("t", want.shape, [ComposedBox(0, low, cut.shape, (0,) * cut.ndim, axes, steps)])]
    )
    made.check()
    assert (lazy(folder, made).numpy() == want).all()


@examples(150)
@given(st.data())
def test_pieces_put_together_are_the_concatenation(tmp_path_factory, data):
    rows, cols = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    dense = np.arange(rows * cols, dtype=np.int32).reshape(rows, cols)
    folder = tmp_path_factory.mktemp("case")
    catalog = stored(folder, dense, data.draw(chunkings((rows, cols))))
    picks = data.draw(st.lists(boxes((rows,)), min_size=1, max_size=4))
    pieces, want, at = [], [], 0
    for (low,), (count,) in picks:
        pieces.append(ComposedBox(0, (low, 0), (count, cols), (at, 0), (0, 1)))
        want.append(dense[low : low + count])
        at += count
    made = compose(
        catalog,
        [
            Composition("t", (at, cols), pieces),
            Composition("u", (cols,), [ComposedBox(0, (0, 0), (1, cols), (0,), (1,))]),
        ],
    )
    assert (lazy(folder, made).numpy() == np.concatenate(want)).all()
    assert (lazy(folder, made, key="u").numpy() == dense[0]).all()
    # views of views are views of the same bytes
    again = compose(made, [Composition("t", (cols,), [ComposedBox(1, (0,), (cols,), (0,), (0,))])])
    assert (lazy(folder, again).numpy() == dense[0]).all()


def test_views_are_cached_with_their_catalog(tmp_path, cache_dir):
    dense = np.arange(12, dtype=np.int32).reshape(3, 4)
    catalog = stored(tmp_path, dense, [((0, 0), (3, 4))])
    catalog = replace(
        catalog, views=compose(catalog, [Composition("row", (4,), [ComposedBox(0, (1, 0), (1, 4), (0,), (1,))])])
    )
    cache.save(Place(tmp_path), catalog)
    again = cache.load(Place(tmp_path), "test")
    assert again is not None and again.views is not None and again.views.keys == ["row"]
    assert (lazy(tmp_path, again.views, key="row").numpy() == dense[1]).all()
