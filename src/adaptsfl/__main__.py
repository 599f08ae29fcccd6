"""`python -m adaptsfl`, as torchrun starts it on every rank."""

from adaptsfl.cli import main

if __name__ == "__main__":
    main()
