"""Screenshots as ``docs/images`` has them: lossless WebP, half as large as PNG.

python -m benchmarks.pictures.webp docs/images PICTURE.png ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image


def main() -> int:
    folder, *pictures = map(Path, sys.argv[1:])
    for picture in pictures:
        with Image.open(picture) as opened:
            opened.convert("RGB").save(folder / f"{picture.stem}.webp", lossless=True, quality=100, method=6)
    return 0


if __name__ == "__main__":
    sys.exit(main())
