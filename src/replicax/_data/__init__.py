"""Datasets over host data, with tf.data's names.

A `Dataset` is a recipe: a function that makes an iterator over elements, together with what is known of the elements
beforehand (`element_spec`, `cardinality`, the batch size). Each transformation wraps that function in another one.
Elements are structures of numpy arrays throughout; only the user's functions and the user's loop see tensors.

Rows that lie in arrays are not moved one by one. Such a dataset also carries `Rows`: the order of its rows as chunks
of row numbers, and a function from row numbers to rows. `shuffle`, `repeat`, `take` and their like act on the numbers
alone, and `batch` fetches the rows of a whole batch at once, or of several.
"""
