"""`tf.saved_model`: functions and variables in a folder, from which they are loaded without the code that made them."""
