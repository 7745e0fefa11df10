"""Biases of the offset as a table of Lq + Lk - 1 entries: attention at about the cost of plain attention, in torch and in C."""
