"""What users call: `attach`, `generate_batch`, the manager. Everything here talks to an Engine by commands."""
