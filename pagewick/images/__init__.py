"""Images from requests: files become pictures of the size that a model reads. Numpy and Pillow, no torch."""
