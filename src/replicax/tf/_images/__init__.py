"""`tf.image`, and the operations of `tf.io` that decode and encode images."""
