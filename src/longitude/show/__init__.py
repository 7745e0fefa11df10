"""Drawings of encodings, mixers, checkpoints and a study's models, computed by the classes that run.

`subjects` makes the drawings of a name as data. Two back ends draw them: `terminal` as braille dots, `charts` as Altair charts
for files, pages and notebooks.
"""
