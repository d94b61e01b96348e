"""What clients may send: one module per interface. Owns names, types and shapes; knows no engine."""
