"""`python -m adaptsfl`, for whoever starts processes by their interpreter."""

from adaptsfl.cli import main

if __name__ == "__main__":
    main()
