"""The transformations of `Dataset`, as functions of a dataset: the class binds them as its methods."""
