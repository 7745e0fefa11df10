from longitude.study.config import StudyConfig as StudyConfig
from longitude.study.tasks.base import register_task as register_task
from longitude.study.tasks.questions import NOT_ASKED as NOT_ASKED, Questions as Questions, Sample as Sample
