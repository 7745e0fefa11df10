"""What position encodings are: formulas, parameters, tables, terms. Tensors only; independent of attention and models."""
