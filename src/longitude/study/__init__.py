"""Train short, test long: train one small model per encoding and seed on the same text, and measure it at longer lengths."""

from typing import TYPE_CHECKING

from longitude import loaded_on_use
from longitude.errors import require_extra

require_extra("longitude.study", "study")

if TYPE_CHECKING:
    from longitude.study.config import StudyConfig as StudyConfig
    from longitude.study.tasks.base import register_task as register_task
    from longitude.study.tasks.questions import NOT_ASKED as NOT_ASKED, Questions as Questions, Sample as Sample

__getattr__, __all__ = loaded_on_use(
    __name__,
    {
        "study.config": "StudyConfig",
        "study.tasks.base": "register_task",
        "study.tasks.questions": "NOT_ASKED Questions Sample",
    },
)
