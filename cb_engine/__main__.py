"""`python -m cb_engine` is the command `cb-engine`."""

from cb_engine.cli.main import main

if __name__ == "__main__":
    main()
