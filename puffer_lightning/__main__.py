"""``python -m puffer_lightning``."""

from puffer_lightning.cli import main

if __name__ == "__main__":
    main()
