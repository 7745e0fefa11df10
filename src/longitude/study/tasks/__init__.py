"""The tasks of a study, one class each; every module here is imported when a task is first looked up."""
