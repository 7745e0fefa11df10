"""What position encodings are: formulas, parameters, tables, terms. Tensors only; knows nothing of attention or models."""
