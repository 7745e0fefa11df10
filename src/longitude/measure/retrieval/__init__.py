"""Retrieval by length: can a model find and use what is in its context? Passkey, needles, tracking, word counts.

`run` yields a row per length and depth; `TASKS` are tasks by name; `effective_length` summarizes rows.
"""

from longitude.measure.retrieval.measurement import Answer as Answer, backend_of as backend_of, plan as plan, run as run
from longitude.measure.retrieval.summary import (
    DEFINITION as DEFINITION,
    THRESHOLD as THRESHOLD,
    effective_length as effective_length,
    scores_by_length as scores_by_length,
)
from longitude.measure.retrieval.tasks import TASKS as TASKS, Task as Task
