"""What offsets decide is a table of Lq + Lk - 1 entries: attention at about the price of plain attention, in torch and in C."""
