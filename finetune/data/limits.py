"""What a picture may take: more is refused before memory is asked for."""

MAX_PIXELS = 178_956_970  # where Pillow itself refuses: twice Image.MAX_IMAGE_PIXELS, 0.5 GB as RGB
MAX_BYTES = 8 * MAX_PIXELS  # of a file: four samples of 16 bits a pixel, as they are
