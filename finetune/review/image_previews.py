"""Images for the page, decoded and scaled when it asks for them."""

import io

from PIL import Image

from finetune.data.checking.image_facts import small_copy


def webp_preview(path: str, side: int) -> bytes:
    """Return an image as a WebP file with at most `side` pixels a side.

    Raises:
        ValueError: The image cannot be read.
    """
    pixels = small_copy(path, side)
    if pixels is None:
        raise ValueError("it is damaged, or no longer exists")
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, format="WebP", quality=80, method=1)
    return file.getvalue()
