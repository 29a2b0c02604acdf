"""Start one of the measurements: python -m benchmarks.speed loading|gpu|serving|export [options]."""

import importlib
import sys

NAMES = ("loading", "gpu", "serving", "export")


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        print(f"usage: python -m benchmarks.speed {'|'.join(NAMES)} [options]")
        sys.exit(0 if name == "--help" else 2)
    del sys.argv[1]
    importlib.import_module(f"benchmarks.speed.{name}").main()


if __name__ == "__main__":
    main()
