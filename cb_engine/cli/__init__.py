"""The command `cb-engine`. `main.py` lists its commands, `options.py` holds the options that they share."""
