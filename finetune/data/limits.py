"""Limits on the size of an image. They are checked before memory or time is spent."""

MAX_PIXELS = 178_956_970  # Pillow's own limit: twice Image.MAX_IMAGE_PIXELS, 0.5 GB as RGB
MAX_BYTES = 8 * MAX_PIXELS  # of a file: four uncompressed 16-bit samples per pixel
MAX_SCANS = 100  # of a JPEG, as in libvips; usual files have up to 10
