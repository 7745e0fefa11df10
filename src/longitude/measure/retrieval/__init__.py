"""Retrieval by length: can a model find and use what is in its context? Passkey, needles, tracking, word counts.

`run` yields a row per length and depth; `TASKS` are tasks by name; `effective_length` summarizes rows.
"""

from longitude.measure.retrieval.measurement import (
    DEFINITION as DEFINITION,
    THRESHOLD as THRESHOLD,
    Answer as Answer,
    backend_of as backend_of,
    effective_length as effective_length,
    plan as plan,
    run as run,
    scores_by_length as scores_by_length,
)
from longitude.measure.retrieval.tasks import TASKS as TASKS, Task as Task
