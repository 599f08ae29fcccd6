"""Entry point of `python -m adaptsfl`."""

from adaptsfl.cli import main

if __name__ == "__main__":
    main()
